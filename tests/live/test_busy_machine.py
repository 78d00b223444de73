"""A machine without a free core: nodes that live are not fenced, since heartbeats go first."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.harness import Cluster, Node
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

BUSY = 20
BUSY_S = 60.0
PARTITIONS = 12
QUIET, BULK = 2_000, 20_000
"""Records of 1,000 bytes in a second, as far as there is time for them."""


@contextlib.contextmanager
def busy_processes(count: int, seconds: float) -> Iterator[None]:
    """So many that never wait; each ends by itself, whatever becomes of this one."""
    code = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def events(node: Node, since_bytes: int) -> Counter[str]:
    """What a node's log tells from there on, by event."""
    with node.log_path.open("rb") as file:
        file.seek(since_bytes)
        lines = file.read().splitlines()
    return Counter(json.loads(line)["event"] for line in lines if line.startswith(b"{"))


@pytest.mark.parametrize("rate", [QUIET, BULK])
def test_no_live_broker_is_fenced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rate: int
) -> None:
    with Cluster(tmp_path, settings={"broker_session_ms": 2_000}) as cluster:
        create_topic(cluster.bootstrap, "t", PARTITIONS)
        with Load(cluster.bootstrap, "t", PARTITIONS, rate=rate, size=1_000) as load:
            load.wait_for(2_000)
            sizes = {n: node.log_path.stat().st_size for n, node in cluster.nodes.items()}
            before = load.count
            with busy_processes(BUSY, 2 * BUSY_S):
                time.sleep(BUSY_S)
            acknowledged = load.count - before
        told = {n: events(node, sizes[n]) for n, node in cluster.nodes.items()}
        load.reckon().check()
    with capsys.disabled():
        sys.stdout.write(f"\n{BUSY} busy processes, {BUSY_S:.0f} s: {acknowledged} acknowledged\n")
        sys.stdout.writelines(f"node {n}: {dict(counts)}\n" for n, counts in told.items())
    assert not any(counts["broker fenced"] for counts in told.values())
