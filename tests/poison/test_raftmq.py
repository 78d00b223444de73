"""What raftmq's leader answers to each kind of batch: what Kafka does, or it is explained."""

from __future__ import annotations

import json
from typing import Final

import pytest

from raftmq.errors import ErrorCode
from raftmq.partition.ports import AppendResult
from raftmq.partition.settings import PartitionSettings
from raftmq.records import check_batch, read_records
from tests.partition.fake_replica import Bench
from tests.poison.kinds import DIFFERENT, KINDS, TOPICS
from tests.poison.test_kafka import RECORDED

KAFKA: Final = json.loads(RECORDED.read_text())
NOW_MS: Final = 1_700_000_000_000


def bench(topic: str, **configs: str) -> Bench:
    made = Bench(settings=PartitionSettings.from_configs({**TOPICS[topic], **configs}))
    made.clock.now_ms = float(NOW_MS)
    return made


def answer(it: Bench, batch: bytes) -> AppendResult:
    result = it.partition.append(memoryview(bytearray(batch)), 1, 1_000)
    assert isinstance(result, AppendResult)
    return result


@pytest.mark.parametrize("name", KINDS)
def test_the_answer_is_kafkas_or_explained(name: str) -> None:
    kind = KINDS[name]
    it = bench(kind.topic)
    result = answer(it, kind.build(NOW_MS))
    found = [result.code.name, [index for index, _ in result.record_errors]]
    if name in DIFFERENT:
        different = DIFFERENT[name]
        assert found[0] != KAFKA[name][0], "no longer different: take it out"
        assert found[0] == different.code, different.why
    elif KAFKA[name][0] == "UNKNOWN_SERVER_ERROR":
        assert found == ["INVALID_RECORD", []]
    else:
        assert found == KAFKA[name]
    assert (result.code is ErrorCode.NONE) == bool(it.replica.log.batches)


@pytest.mark.parametrize("name", [name for name in KINDS if KAFKA[name][0] == "NONE"])
def test_what_is_taken_can_be_read(name: str) -> None:
    """By the strictest reader that we have, with timestamps that its header tells."""
    kind = KINDS[name]
    it = bench(kind.topic)
    if answer(it, kind.build(NOW_MS)).code is not ErrorCode.NONE:
        return  # explained above
    stored = it.replica.log.batches[0][1]
    header = check_batch(stored)
    records = list(read_records(stored))
    assert [record.offset for record in records] == list(range(header.record_count))
    assert header.max_timestamp == max(-1, *(record.timestamp for record in records))


def test_the_table_is_large_and_names_what_is_there() -> None:
    lies = [name for name in KINDS if KAFKA[name][0] != "NONE" or name in DIFFERENT]
    assert len(lies) >= 80
    assert set(KAFKA) == set(KINDS)
    assert set(DIFFERENT) <= set(KINDS)
