"""A fourth broker joins under load, and a balance gives it its share: even, and nothing lost."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.live.harness import Cluster, wait_until
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]
PARTITIONS = 8


def _partitions(cluster: Cluster) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = cluster[1].get("/leaders")["partitions"]
    return told


def _counts(cluster: Cluster) -> tuple[list[int], list[int]]:
    """(replicas, preferred leaderships) of the four brokers."""
    rows = _partitions(cluster)
    held = Counter(n for row in rows for n in row["replicas"])
    led = Counter(row["preferred"] for row in rows)
    return [held[n] for n in (1, 2, 3, 4)], [led[n] for n in (1, 2, 3, 4)]


def test_shares_are_given_and_evened_out_under_load(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=PARTITIONS)
        cluster.add_node()
        with Load(cluster.bootstrap, "t", PARTITIONS, rate=1500) as load:
            load.wait_for(2000, 90)
            added = cluster.run("node", "add", "4")
            assert added.returncode == 0, added.stdout + added.stderr
            assert _counts(cluster) == ([6, 6, 6, 6], [2, 2, 2, 2])
            assert cluster.run("node", "cordon", "4").returncode == 0
            create_topic(cluster.bootstrap, "u", partitions=PARTITIONS)
            assert _counts(cluster)[0] == [14, 14, 14, 6]
            assert cluster.run("node", "uncordon", "4").returncode == 0
            told = _planned(cluster)
            load.wait_for(1000, 90)
            done = cluster.run("cluster", "balance")
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"done: {len(told)} partitions moved, as planned" in done.stdout
            now = {
                (row["topic"], row["partition"]): row["replicas"] for row in _partitions(cluster)
            }
            for move in told:
                assert now[move["topic"], move["partition"]] == move["after"], "as was told"
            load.wait_for(1000, 90)
        load.reckon(f"127.0.0.1:{cluster[4].client_port}").check()
        assert _counts(cluster) == ([12, 12, 12, 12], [4, 4, 4, 4])
        wait_until(
            lambda: all(sorted(p["isr"]) == sorted(p["replicas"]) for p in _partitions(cluster)),
            60,
            "all are in sync",
        )
        again = cluster.run("cluster", "balance")
        assert again.stdout.splitlines() == ["nothing to move", "done: it is even"]


def _planned(cluster: Cluster) -> list[dict[str, Any]]:
    """What a dry run tells: six copies onto the broker that has the least."""
    dry = cluster.run("cluster", "balance", "--dry-run", "--json")
    assert dry.returncode == 0, dry.stderr
    told: list[dict[str, Any]] = json.loads(dry.stdout)["moves"]
    copies = [m for m in told if set(m["after"]) - set(m["before"])]
    assert len(copies) == 6
    assert all(set(m["after"]) - set(m["before"]) == {4} for m in copies)
    assert {m["topic"] for m in copies} == {"u"}, "it is empty, so its moves cost nothing"
    assert all(m["steps"][-1].endswith("3 of 3 live, quorum 2") for m in copies)
    assert _counts(cluster)[0] == [14, 14, 14, 6], "a dry run moves nothing"
    return told
