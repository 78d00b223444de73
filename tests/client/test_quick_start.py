"""The documentation's quick start is at most twelve lines, and runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live.harness import Cluster

PAGE = Path(__file__).parent.parent.parent / "docs" / "client.md"


def quick_start() -> str:
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_quick_start_is_short() -> None:
    assert len([line for line in quick_start().splitlines() if line.strip()]) <= 12


@pytest.mark.live
@pytest.mark.slow
def test_the_quick_start_runs(shared_cluster: Cluster) -> None:
    first = shared_cluster.bootstrap.split(",")[0]
    code = quick_start().replace("127.0.0.1:9092", first)
    with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline().startswith("RecordMetadata(topic='orders', partition=")
            assert run.stdout.readline().endswith("{'item': 7}\n")
        finally:
            run.kill()
