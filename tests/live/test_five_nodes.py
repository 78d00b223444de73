"""Five nodes, and every one of them is replaced in turn under load; then five become three.

By hand: `FIVE_NODES_MIB=100 pytest -n 0 -m soak -s tests/live/test_five_nodes.py` fills each of 20
partitions with 100 MiB first (6 GiB with all replicas). It prints what was moved and how long that
took. Clients know the first five nodes alone, none of which is left in the end.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raftmq.cli.console import out
from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic
from tests.live.members import Members
from tests.live.transacting import RECORDS, TARGET, Transacting
from tests.second_try import PromiseBrokenError

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.soak]

TOPIC = "t"
PARTITIONS = 20
FILL_MIB = int(os.environ.get("FIVE_NODES_MIB", "4"))
"""Of each partition."""
FILL_RECORD_BYTES = 16 << 10
RATE = 300
PRODUCERS = 4


def _ok(cluster: Cluster, *words: str) -> str:
    """What a command that went well said."""
    done = cluster.run(*words, timeout_s=1_500)
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _fill(cluster: Cluster) -> Load:
    room: dict[str, Any] = {"queue.buffering.max.kbytes": 64 << 10, "batch.size": 512 << 10}
    load = Load(
        cluster.bootstrap,
        TOPIC,
        PARTITIONS,
        rate=1e6,
        size=FILL_RECORD_BYTES,
        **room,
    )
    count = PARTITIONS * (FILL_MIB << 20) // FILL_RECORD_BYTES
    with load:
        load.wait_for(count, 60 + FILL_MIB * 10)
    assert load.errors == []
    return load


def _go(cluster: Cluster, old: int) -> None:
    """Have a node go that other nodes have room for."""
    began = time.perf_counter()
    _ok(cluster, "node", "drain", str(old))
    drained_s = time.perf_counter() - began
    assert cluster[old].terminate() == 0
    assert f"done: node {old} is gone" in _ok(cluster, "node", "remove", str(old))
    cluster.nodes.pop(old)
    out(f"node {old}: drained in {drained_s:.1f} s; now {_summary(_told(cluster))}")


def _told(cluster: Cluster) -> dict[str, Any]:
    """What the controller tells of all nodes."""
    node = next(iter(cluster.nodes.values()))
    controller = wait_until(lambda: cluster.nodes.get(node.get("/nodes")["controller_id"]), 30)
    told: dict[str, Any] = controller.get("/nodes")
    return told


def _summary(told: dict[str, Any]) -> str:
    rows = [(row["node_id"], row["replicas"], row["role"]) for row in told["nodes"]]
    return ", ".join(f"node {n} has {count} ({role})" for n, count, role in rows)


def _voters(cluster: Cluster) -> list[int]:
    return [row["node_id"] for row in _told(cluster)["nodes"] if row["role"] == "voter"]


def _replace(cluster: Cluster, old: int) -> None:
    """A new node joins, told of those that are there, and takes the part of an old one."""
    cluster.voters = list(cluster.nodes.values())
    began = time.perf_counter()
    new = cluster.add_node().node_id
    _ok(cluster, "node", "add", str(new))
    held = {row["node_id"]: row["replicas"] for row in _told(cluster)["nodes"]}
    took_s = time.perf_counter() - began
    out(f"node {new}: joined and has its share, {held[new]} replicas, in {took_s:.1f} s")
    assert held[new] >= sum(held.values()) // len(held), held
    _go(cluster, old)
    assert _voters(cluster) == sorted(cluster.nodes), "five nodes, five votes"


def _check_replicas(cluster: Cluster) -> None:
    """Three live replicas of everything, all in sync."""

    def lacking() -> list[dict[str, Any]]:
        rows = next(iter(cluster.nodes.values())).get("/leaders")["partitions"]
        live = set(cluster.nodes)
        assert len(rows) > PARTITIONS
        return [
            row
            for row in rows
            if len(set(row["replicas"]) & live) != 3
            or sorted(row["isr"]) != sorted(row["replicas"])
        ]

    wait_until(lambda: not lacking(), 120, "three replicas of each in sync")


def _check_group(members: Members, load: Load, began: dict[int, int]) -> None:
    """Each record that was acknowledged since the group began was read, and once."""
    wanted = {
        (partition, offset)
        for partition, told in enumerate(load.acknowledged)
        for offset in told.values()
        if offset is not None and offset >= began[partition]
    }
    wait_until(lambda: wanted <= members.read.keys(), 120, "the group has read all")
    members.check()


def _check_committed(readers: Members, transacting: Transacting) -> None:
    """Readers of committed records saw each committed transaction wholly, and nothing else."""
    wanted = Counter(
        {b"%d %d" % (one.number, n): RECORDS for one in transacting.all for n in one.committed}
    )
    wait_until(lambda: len(readers.read) >= wanted.total(), 120, f"all records of {TARGET}")
    seen = Counter(readers.read.values())
    if seen != wanted:
        raise PromiseBrokenError(f"lost {wanted - seen}, not to be there {seen - wanted}")
    readers.check()


@pytest.mark.timeout(1_700, method="signal")
def test_every_node_is_replaced_in_turn_and_five_become_three(tmp_path: Path) -> None:
    with Cluster(tmp_path, 5, voters=5) as cluster:
        first = cluster.bootstrap
        create_topic(first, TOPIC, PARTITIONS, min_insync_replicas="2")
        filled = _fill(cluster)
        began = dict(Counter(n % PARTITIONS for n in range(filled.sent)))
        members = Members(first, "members", TOPIC, 2)
        members.start_at(began)
        transacting = Transacting(first, PRODUCERS, pause_s=0.1)
        readers = Members(first, "committed", TARGET, 1, **{"isolation.level": "read_committed"})
        with (
            Load(first, TOPIC, PARTITIONS, rate=RATE, after=filled) as load,
            members,
            readers,
        ):
            with transacting:
                for old in list(cluster.nodes):
                    load.wait_for(RATE)
                    transacting.wait_for(PRODUCERS)
                    _replace(cluster, old)
                for old in list(cluster.nodes)[1:3]:
                    load.wait_for(RATE)
                    _go(cluster, old)
                assert _voters(cluster) == sorted(cluster.nodes), "three nodes, three votes"
                _check_replicas(cluster)
                _start_again(cluster)
                load.wait_for(RATE)
                transacting.wait_for(PRODUCERS)
            load.stop()
            _check_group(members, load, began)
            _check_committed(readers, transacting)
        assert load.errors == []
        reckoning = load.reckon(cluster.bootstrap)
        reckoning.check()
        transacting.check(cluster.bootstrap)
        _check_replicas(cluster)
        out(f"{reckoning.acknowledged} acknowledged beside {filled.count} of the fill; the longest")
        out(f"pause {reckoning.gap_ms_max:.0f} ms; {transacting.ended} transactions, of which")
        out(f"{sum(len(one.aborted) for one in transacting.all)} aborted")
        for one in (members, readers):
            out(f"{len(one.read)} read in {one.assignments} assignments; told {dict(one.errors)}")


def _start_again(cluster: Cluster) -> None:
    """A node whose `peers` names none that is left knows the others from its own disk."""
    gone = [node for node in cluster.voters if node.node_id not in cluster.nodes]
    cluster.voters = gone
    node = next(iter(cluster.nodes.values()))
    node.kill()
    node.start()
    node.wait_ready()
    _check_replicas(cluster)
