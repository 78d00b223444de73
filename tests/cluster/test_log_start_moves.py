"""Wishes to drop a prefix, whatever their order: all replicas begin at the same offset."""

from __future__ import annotations

from pathlib import Path

import pytest

from raftmq.errors import ErrorCode
from raftmq.promise import Promise
from raftmq.records import NewRecord, build_batch
from raftmq.types import Offset
from tests.cluster.three_nodes import ThreeNodes

BATCH = bytes(build_batch([NewRecord(b"k", b"v")], timestamp=1_000_000))


@pytest.mark.parametrize("targets", [(8, 4), (4, 8), (4, 8, 6)])
def test_wishes_committed_together_come_to_the_greatest(
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
