"""Ten times the usual rate for a while: producers are slowed, nobody fails, nothing is lost.

A busy machine for a minute: never in the default suite. How fast it is again is the benchmark's
matter.
"""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks.dev_run import DevRun
from benchmarks.surge import surge

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

RSS_MB_MAX = 600


def test_surge() -> None:
    options = Namespace(
        seconds=15.0,
        before=5.0,
        warm=3.0,
        rate=20.0,
        producers=50,
        partitions=6,
        steady_batch=16 << 10,
        surge_batch=256 << 10,
    )
    with DevRun() as run:
        result = surge(run, options)
    assert result["lost"] == 0
    assert result["codes"] == {}, "producers are slowed and not failed"
    assert result["failures"] == []
    assert result["consumer_errors"] == []
    assert result["rebalances"] == 1, "groups live on"
    assert result["taken_mb_s"] > 0
    assert result["rss_node_max_mb"] < RSS_MB_MAX
