"""Proposals to drop a prefix, whatever their order: all replicas begin at the same offset."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmq.errors import ErrorCode
from raftmq.log.shared import LoopShare
from raftmq.partition.partition import Partition
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch
from raftmq.replication.replica import Replica
from raftmq.types import Offset, RaftIndex
from tests.replication.three_nodes import ThreeNodes

BATCH = bytes(build_batch([NewRecord(b"k", b"v")], timestamp=1_000_000))


@pytest.mark.parametrize("targets", [(8, 4), (4, 8), (4, 8, 6)])
def test_proposals_committed_together_come_to_the_greatest(
    tmp_path: Path, targets: tuple[int, ...]
) -> None:
    """The leader commits them one by one, its followers learn of all at once."""
    nodes = ThreeNodes(tmp_path)
    for _ in range(10):
        nodes.produce(BATCH)
    answers = [nodes.leader.delete_records(target, 1_000) for target in targets]
    nodes.settle()
    for _ in range(30):
        nodes.tick()
    starts = {n: p.replica.log_start_offset for n, p in nodes.partitions.items()}
    assert starts == dict.fromkeys(starts, Offset(8))
    for target, answer in zip(targets, answers, strict=True):
        result = answer.result() if isinstance(answer, Promise) else answer
        assert result.code is ErrorCode.NONE
        assert result.low_watermark >= target


def test_moves_take_a_share_of_the_loop_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands may be due in one pass; each that has to wait shows nobody what is to go."""
    nodes = ThreeNodes(tmp_path)
    for _ in range(10):
        nodes.produce(BATCH)
    replica = nodes.leader.replica
    assert isinstance(replica, Replica)
    share = replica.log.moves
    now_ms = replica._clock.monotonic_ms()
    share.spend(now_ms, now_ms + 100.0)
    assert not share.is_free(now_ms + 300.0)
    assert share.is_free(now_ms + 400.0)
    monkeypatch.setattr(LoopShare, "is_free", lambda _share, _now_ms: False)
    nodes.leader.delete_records(8, 1_000)
    nodes.settle()
    assert replica.log.log_start_offset == 0
    assert replica.log_start_offset == 8
    monkeypatch.undo()
    share._free_at_ms = 0.0
    nodes.tick()
    assert replica.log.log_start_offset == 8


def test_a_state_that_takes_long_is_made_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = ThreeNodes(tmp_path)
    for _ in range(10):
        nodes.produce(BATCH)
    asked: list[int] = []
    state_at = Partition.state_at

    def late(partition: Partition, offset: Offset, index: RaftIndex) -> bytes | None:
        asked.append(offset)
        return None if len(asked) % 4 else state_at(partition, offset, index)

    monkeypatch.setattr(Partition, "state_at", late)
    nodes.leader.delete_records(8, 1_000)
    for _ in range(40):
        nodes.tick()
        nodes.settle()
    assert {p.replica.log.log_start_offset for p in nodes.partitions.values()} == {8}
    assert len(asked) == 3 * 4
