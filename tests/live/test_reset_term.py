"""Journals that hold a term no election can have reached: said at start, set back by all voters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from attrs import evolve

from raftmq.foreign import TERM_MAX
from raftmq.log.journal import HardStateJournal
from raftmq.runtime.data_folder import DataFolder
from raftmq.runtime.disk import RealDisk
from raftmq.tools.unsafe_recovery import TERM_STEP
from raftmq.types import METADATA_GROUP, RaftGroupId
from tests.live.harness import Cluster, Node, wait_until
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]


def _journal(node: Node) -> HardStateJournal:
    path = f"{node.data}/state.journal"
    return HardStateJournal.open(RealDisk(), path, is_expected=True)


def _plant(node: Node, groups: list[RaftGroupId]) -> None:
    """As one VoteRequest did before there were bounds."""
    journal = _journal(node)
    for group in groups:
        state = journal.get(group)
        assert state is not None
        journal.put(group, evolve(state, term=TERM_MAX, vote=None))
    journal.close()


def _group_of(node: Node, partition: int) -> RaftGroupId:
    journal = _journal(node)
    groups = [g for g in journal.groups() if g != METADATA_GROUP and g.partition == partition]
    journal.close()
    (group,) = groups
    return group


def _reset(cluster: Cluster, node: Node, *words: str) -> str:
    done = cluster.run("recover", "--reset-term", *words, "--data", str(node.data))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _reset_on_all(cluster: Cluster, nodes: list[Node], topic: str, partition: int) -> None:
    where = (topic, str(partition))
    tokens = []
    for node in nodes:
        found = re.search(r"^token: (\S+)$", _reset(cluster, node, *where, "--dry-run"), re.M)
        assert found is not None
        tokens.append(found[1])
    for node in nodes:
        _reset(cluster, node, *where, "--agree", ",".join(tokens), "--yes")


def _told(node: Node) -> list[tuple[object, object]]:
    lines = [json.loads(line) for line in node.log_path.read_text().splitlines() if line[:1] == "{"]
    event = "no election can have reached this term"
    found = [line for line in lines if line["event"] == event]
    assert all(line["term"] == TERM_MAX > line["last_epoch"] > 0 for line in found)
    return [(line["topic"], line["partition"]) for line in found]


def _partition(node: Node, index: int) -> dict[str, object]:
    (row,) = [r for r in node.get("/status")["partitions"] if r["partition"] == index]
    found: dict[str, object] = row
    return found


def test_absurd_terms_are_told_and_set_back(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=3)
        nodes = list(cluster.nodes.values())
        with Load(cluster.bootstrap, "t", 3, rate=500) as load:
            load.wait_for(500)
        cluster.stop()
        group = _group_of(nodes[0], 1)
        for node in nodes:
            _plant(node, [group])

        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()
            assert _told(node) == [("t", 1)]
            row = _partition(node, 1)
            assert row["leader"] is None, row
            assert "no election can have led there" in str(row["troubles"])
            assert "raftmq_partitions_absurd_term 1.0" in node.text("/metrics")

        refused = cluster.run("recover", "--reset-term", "t", "1", "--data", str(nodes[0].data))
        assert "in use by another process" in refused.stderr
        cluster.stop()
        _reset_on_all(cluster, nodes, "t", 1)
        for node in nodes:  # and metadata, with which no node gets ready
            _plant(node, [METADATA_GROUP])
        for node in nodes:
            node.start()
        for node in nodes:
            wait_until(lambda node=node: ("__cluster_metadata", 0) in _told(node), 60, "told")
        cluster.stop()
        _reset_on_all(cluster, nodes, "__cluster_metadata", 0)
        for node in nodes:
            node.start()
        for node in nodes:
            node.wait_ready()
        load.reckon(cluster.bootstrap).check()
        with Load(cluster.bootstrap, "t", 3, rate=500) as more:
            more.wait_for(200)
        epoch = max(int(str(_partition(node, 1)["leader_epoch"])) for node in nodes)
        assert TERM_STEP < epoch < 2 * TERM_STEP
        cluster.stop()
        for node in nodes:
            folder = DataFolder.open_known(RealDisk(), node.data)
            assert len(folder.load_formation().term_resets) == 2
            folder.close()
