"""The count of files that a produce crosses: what counts, and that three nodes can be counted."""

from __future__ import annotations

import json

import pytest

from benchmarks.crossings import Counting, fewest, watched
from raftmq.codec import Codec
from raftmq.records import NewRecord, build_batch


def test_calls_between_files_of_the_product_count_while_a_request_is_under_way() -> None:
    counting = Counting()
    with watched(counting):
        build_batch([NewRecord(None, b"x")], codec=Codec.GZIP)
        counting.begin()
        build_batch([NewRecord(None, b"x")], codec=Codec.GZIP)
        json.dumps("not ours")
        crossed = counting.end()
        build_batch([NewRecord(None, b"x")], codec=Codec.GZIP)
    assert {"records.py", "codec.py"} <= crossed.files
    assert crossed.pairs["records.py", "codec.py"] == 1
    assert crossed.count == crossed.pairs.total()
    assert not any(origin == to for origin, to in crossed.pairs)
    assert all("json" not in name for name in crossed.files)


@pytest.mark.live
def test_a_produce_crosses_the_files_of_leader_and_followers() -> None:
    crossed = fewest(runs=5)
    assert {
        "server/kafka/connection.py",
        "server/kafka/handlers/produce.py",
        "partition/partition.py",
        "replication/replica.py",
        "raft/core.py",
        "raft/follower.py",
        "log/segment.py",
        "runtime/threads.py",
        "runtime/peer_streams.py",
    } <= crossed.files
