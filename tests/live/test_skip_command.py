"""A metadata command that no node can apply ends all of them, until a majority passes over it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from attrs import evolve
from crc32c import crc32c

from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.log.model import LogConfig
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.records import NewRecord, build_batch
from raftmq.runtime.clock import RealClock
from raftmq.runtime.data_folder import DataFolder
from raftmq.runtime.disk import RealDisk
from raftmq.types import METADATA_GROUP, RaftIndex
from tests.live.harness import Cluster, Node
from tests.live.load import Load, create_topic

pytestmark = [pytest.mark.live, pytest.mark.slow]

NEWER = b'{"v":2,"node":1,"incarnation":1,"sequence":1,"command":{"type":"NoOperation","x":1}}'
"""Of a version to come: all of it but one field can be read."""
POISON = b'{"v":1,"node":1,"incarnation":1,"sequence":1,"command":{"type":"RegisterBroker"}}'


def _open_log(data: Path, state: GroupState) -> ReplicatedLog:
    return ReplicatedLog.open(
        RealDisk(),
        f"{data}/meta",
        LogConfig(),
        claimed_flushed_end=RaftIndex(state.flushed_end),
        clock=RealClock(),
    )


def _journal(data: Path) -> HardStateJournal:
    return HardStateJournal.open(RealDisk(), f"{data}/state.journal", is_expected=True)


def _states(nodes: list[Node]) -> dict[int, GroupState]:
    found = {}
    for node in nodes:
        journal = _journal(node.data)
        state = journal.get(METADATA_GROUP)
        assert state is not None
        found[node.node_id] = state
        journal.close()
    return found


def _plant(nodes: list[Node], command: bytes = POISON) -> int:
    """Commit the command on every stopped node, as a leader without the check would have."""
    states = _states(nodes)
    ends = {}
    for node in nodes:
        log = _open_log(node.data, states[node.node_id])
        ends[node.node_id] = (max(log.epochs())[0], log.end_index)
        log.close()
    source = max(nodes, key=lambda node: ends[node.node_id])
    log = _open_log(source.data, states[source.node_id])
    epoch, offset = max(log.epochs())[0], log.log_end_offset
    batch = build_batch([NewRecord(None, command)], base_offset=offset, leader_epoch=epoch)
    log.append_batch(bytes(batch))
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)
    end = log.end_index
    log.close()
    term = max(state.term for state in states.values())
    for node in nodes:
        if node is not source:
            shutil.rmtree(node.data / "meta")
            shutil.copytree(source.data / "meta", node.data / "meta")
        journal = _journal(node.data)
        state = states[node.node_id]
        vote = state.vote if state.term == term else None
        journal.put(
            METADATA_GROUP, evolve(state, term=term, vote=vote, flushed_end=end, commit_end=end)
        )
        journal.flush_now()
        journal.close()
    return int(offset)


def _skip(cluster: Cluster, node: Node, offset: int, *words: str) -> str:
    done = cluster.run("recover", "--skip-command", str(offset), "--data", str(node.data), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _events(node: Node, event: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in node.log_path.read_text().splitlines() if line[:1] == "{"]
    return [line for line in lines if line["event"] == event]


def _log_start(node: Node) -> int:
    journal = _journal(node.data)
    state = journal.get(METADATA_GROUP)
    journal.close()
    assert state is not None
    log = _open_log(node.data, state)
    try:
        return int(log.log_start_offset)
    finally:
        log.close()


def test_a_poisoned_command_is_passed_over_by_a_majority(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        create_topic(cluster.bootstrap, "t", partitions=3)
        nodes = list(cluster.nodes.values())
        with Load(cluster.bootstrap, "t", 3, rate=500) as load:
            load.wait_for(500)
        cluster.stop()
        offset = _plant(nodes)

        for node in nodes:
            node.start()
        for node in nodes:
            assert node.wait_end(60) == 1
            (told,) = _events(node, "node must stop")
            assert f"the metadata command at offset {offset} (leader epoch " in str(told["reason"])
            assert POISON.decode() in str(told["reason"])
            assert f"`raftmq recover --skip-command {offset}`" in str(told["reason"])

        pattern = re.compile(r"^token: (\S+)$", re.MULTILINE)
        tokens = []
        for node in nodes[:2]:
            found = pattern.search(_skip(cluster, node, offset, "--dry-run"))
            assert found is not None
            tokens.append(found[1])
        agree = ("--agree", ",".join(tokens), "--yes")
        for node in nodes[:2]:
            _skip(cluster, node, offset, *agree)

        for node in nodes:
            node.start()
        for node in nodes[:2]:
            node.wait_ready()
            (skipped,) = _events(node, "metadata command skipped")
            assert skipped["offset"] == offset
        assert nodes[2].wait_end(60) == 1, "who was not told still stops there"
        create_topic(cluster.bootstrap, "u", partitions=1, replicas=2)

        _skip(cluster, nodes[2], offset, *agree)
        nodes[2].start()
        nodes[2].wait_ready()
        newcomer = cluster.add_node()
        assert newcomer.is_running, "a snapshot reached it, so it needs no word"
        assert _events(newcomer, "metadata command skipped") == []
        load.reckon(cluster.bootstrap).check()
        cluster.stop()
        for node in nodes:
            assert _log_start(node) > offset, "a snapshot took the place of the command"
            folder = DataFolder.open_known(RealDisk(), node.data)
            assert [skip.offset for skip in folder.load_formation().skips] == [offset]
            folder.close()


def test_a_command_of_a_newer_version_ends_a_node_and_is_not_skipped(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1) as cluster:
        node = cluster[1]
        assert node.terminate() == 0
        offset = _plant([node], NEWER)
        for _ in range(2):
            node.start()
            assert node.wait_end(60) == 4, node.log_tail()
        reasons = [str(line["reason"]) for line in _events(node, "node must stop")]
        assert len(reasons) == 2
        for reason in reasons:
            assert reason.startswith("this cluster is ahead of this version: the metadata command")
            assert "NoOperation of version 2, this version knows 1" in reason
            assert reason.endswith("Nothing is lost: start a newer raftmq on this node")
        words = ("recover", "--skip-command", str(offset), "--data", str(node.data), "--dry-run")
        refused = cluster.run(*words)
        assert refused.returncode == 1
        assert "is one of a newer raftmq" in refused.stderr


def test_a_folder_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, nodes=1) as cluster:
        node = cluster[1]
        assert node.terminate() == 0
        path = node.data / "node.json"
        before = path.read_bytes()
        content = json.dumps({**json.loads(before)["content"], "format_version": 2}).encode()
        seal = f"{crc32c(content):08x}".encode()
        path.write_bytes(b'{"crc32c":"' + seal + b'","content":' + content + b"}")
        node.start()
        assert node.wait_end(60) == 4, node.log_tail()
        [line] = _events(node, "cannot start")
        assert str(line["reason"]).startswith("this cluster is ahead of this version: ")
        assert "has format version 2" in str(line["reason"])
        path.write_bytes(before)
        node.start()
        node.wait_ready()
