"""Stored, replicated and served bytes cost no Python object, and no step, per record.

The same way is gone with batches of one record and of ten thousand, through the real request
codecs, partition, replica, peer codec and log. Calls are counted by the interpreter's own profiler,
kept objects by its allocator, and both are the same; only bytes differ. A leader's look into the
records that it takes is apart from that: those of one layout cost it no object, and a step for
many of them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import raftmq
from raftmq.errors import ErrorCode
from raftmq.record_walk import walk_records
from raftmq.records import HEADER_SIZE, NewRecord, build_batch, parse_header
from tests.replication.three_nodes import ThreeNodes
from tests.server.kafka.world import World

RECORDS_MANY = 10_000
PRODUCT = f"{Path(raftmq.__file__).parent}{os.sep}"


def batch_of(count: int) -> bytes:
    """Few and long, or many and short: nearly the same bytes, so that no buffer grows between."""
    value = bytes(10 * RECORDS_MANY // count)
    return bytes(build_batch([NewRecord(b"k", value)] * count, timestamp=1_000_000))


def produce_and_read(nodes: ThreeNodes, batch: bytes) -> None:
    """From the leader's append to the spans that a consumer is given."""
    base_offset = nodes.produce(batch)
    read = nodes.leader.read(base_offset, 1 << 20)
    assert read.code is ErrorCode.NONE
    assert read.size == len(batch)


def calls_of(work: Callable[[], object]) -> dict[str, int]:
    """How often `work` calls each function of the product, be it Python's or C's."""
    counts: dict[str, int] = {}

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        if not frame.f_code.co_filename.startswith(PRODUCT):
            return
        name = argument.__name__ if event == "c_call" else frame.f_code.co_qualname
        counts[name] = counts.get(name, 0) + 1

    gc.collect()
    gc.disable()  # when the collector comes, and calls whom it tells, is not the work's doing
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts


def blocks_kept_by(work: Callable[[], object]) -> int:
    """How many more memory blocks of the interpreter are in use after `work`."""
    gc.collect()
    before = sys.getallocatedblocks()
    work()
    gc.collect()
    return sys.getallocatedblocks() - before


def test_replication_takes_no_step_and_no_object_per_record(tmp_path: Path) -> None:
    nodes = ThreeNodes(tmp_path)
    few, many = batch_of(1), batch_of(RECORDS_MANY)
    for batch in (few, many) * 4:  # tables grow, caches fill
        produce_and_read(nodes, batch)
    calls = [calls_of(lambda batch=batch: produce_and_read(nodes, batch)) for batch in (few, many)]
    assert len(nodes.ends) == 1, "all three have it"
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 100, "the profiler saw the work"
    kept = [
        max(blocks_kept_by(lambda batch=batch: produce_and_read(nodes, batch)) for _ in range(2))
        for batch in (few, many)
    ]
    assert abs(kept[1] - kept[0]) < RECORDS_MANY // 100, kept


def test_requests_take_no_step_per_record() -> None:
    calls = []
    for count in (1, RECORDS_MANY):
        world = World()
        world.add_topic("t", **{"raftmq.produce.check": "crc"})
        replica, batch = world.replica("t"), batch_of(count)

        def serve(world: World = world, batch: bytes = batch) -> None:
            replica = world.replica("t")
            offset = int(replica.log_end_offset)
            produced = world.produce(9, [("t", 0, batch)])
            replica.commit(replica.log_end_offset)
            assert produced.pieces is not None
            fetched = world.fetch(12, [("t", 0, offset)])
            assert fetched.pieces is not None
            assert any(getattr(piece, "size", 0) == len(batch) for piece in fetched.pieces)

        serve()
        calls.append(calls_of(serve))
        assert replica.high_watermark == 2 * count
    assert calls[0] == calls[1]
    assert sum(calls[0].values()) > 50, "the profiler saw the work"


def test_a_look_into_records_of_one_layout_takes_a_step_for_many_of_them() -> None:
    made = build_batch([NewRecord(b"key", b"value")] * RECORDS_MANY, timestamp=1_000_000)
    data, header = bytes(made[HEADER_SIZE:]), parse_header(made)
    walk_records(data, header)
    calls = calls_of(lambda: walk_records(data, header))
    assert 0 < sum(calls.values()) < RECORDS_MANY // 4
    assert blocks_kept_by(lambda: walk_records(data, header)) < 100
