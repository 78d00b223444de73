"""Fifty clusters in a row leave nothing; how soon each acknowledged, and what memory it took.

Prints its figures: `pytest tests/testing/test_soak.py -m soak -s`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer

from raftmq.testing import Cluster

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

FIXTURES = 50
PSS_MIB_MAX = 150.0


def pss_mib(pids: list[int]) -> float:
    """Proportional set sizes: pages that processes share count once."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def our_processes() -> set[str]:
    """Children of this process, and keepers and nodes with their folder in our TMPDIR."""
    mark = tempfile.gettempdir().encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"raftmq.testing.keeper" in words and mark in words:
                found.add(entry.name)
    return found


def listening_ports() -> set[str]:
    """Ports of 127.0.0.1 on which somebody listens."""
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return {row.split()[1] for row in rows if row.split()[3] == "0A"}


@pytest.mark.timeout(1_200, method="signal")
def test_fifty_in_a_row_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    first_ack_s, ready_s, ended_s, memory = [], [], [], []
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(FIXTURES):
        begun = time.monotonic()
        with Cluster() as cluster:
            ready_s.append(time.monotonic() - begun)
            errors: list[object] = []
            producer = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0})
            producer.produce("t", b"value", on_delivery=lambda e, _, to=errors: to.append(e))
            assert producer.flush(60) == 0
            assert errors == [None]
            first_ack_s.append(time.monotonic() - begun)
            cluster.wait_until_healthy()  # every node has its admin pages imported
            assert cluster._link is not None
            pids = [cluster._link.pid, *(cluster.node(n).pid for n in cluster.node_ids)]
            memory.append(pss_mib(pids))
            ports = {cluster.node(n).port for n in cluster.node_ids}
            ports |= {cluster.node(n).admin_port for n in cluster.node_ids}
            del producer
            ending = time.monotonic()
        ended_s.append(time.monotonic() - ending)
        assert not our_processes()
        assert not list(tmp_path.iterdir())
        assert not {f"0100007F:{port:04X}" for port in ports} & listening_ports()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2
    with capsys.disabled():
        for name, values in (
            ("nodes serve, s", ready_s),
            ("first ack after the start, s", first_ack_s),
            ("end, s", ended_s),
            ("memory with the keeper, PSS MiB", memory),
        ):
            print(  # noqa: T201 - its figures are why it is run
                f"\n{name}: median {statistics.median(values):.2f}, max {max(values):.2f}", end=""
            )
        print()  # noqa: T201
    assert max(memory) <= PSS_MIB_MAX
