"""A key goes where the Java client, librdkafka and kafka-python would put it."""

from __future__ import annotations

import random
import zlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.partitioner.default import murmur2 as kafka_python_murmur2

from raftmq_client.core.partitioners import choose_partition, make_partitioner, murmur2
from raftmq_client.errors import UsageError


@pytest.mark.parametrize(
    ("key", "signed"),
    [
        # The vectors of Kafka's own UtilsTest.testMurmur2.
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_has_kafkas_vectors(key: bytes, signed: int) -> None:
    assert murmur2(key) == signed & 0xFFFFFFFF


@given(st.binary(max_size=64))
def test_murmur2_agrees_with_kafka_python(key: bytes) -> None:
    assert murmur2(key) & 0x7FFFFFFF == kafka_python_murmur2(key) & 0x7FFFFFFF


@given(st.binary(max_size=64), st.integers(1, 300))
def test_keys_choose_by_hash_alone(key: bytes, count: int) -> None:
    for name, hashed in (("murmur2", murmur2(key) & 0x7FFFFFFF), ("crc32", zlib.crc32(key))):
        if key or name == "murmur2":
            chosen = make_partitioner(name, random.Random(1)).choose("t", key, count)
            assert chosen == hashed % count


def test_an_empty_key_is_none_to_librdkafka_alone() -> None:
    for name, spreads in (("murmur2", False), ("crc32", True)):
        partitioner = make_partitioner(name, random.Random(1))
        chosen = set()
        for _ in range(50):
            chosen.add(partitioner.choose("t", b"", 8))
            partitioner.batch_closed("t", partitioner.choose("t", b"", 8))
        assert (len(chosen) > 1) is spreads, name


def test_records_without_key_stick_until_the_batch_closes() -> None:
    partitioner = make_partitioner("murmur2", random.Random(7))
    first = partitioner.choose("t", None, 100)
    assert {partitioner.choose("t", None, 100) for _ in range(50)} == {first}
    partitioner.batch_closed("t", first + 1)  # another partition's batch changes nothing
    assert partitioner.choose("t", None, 100) == first
    chosen = Counter()
    for _ in range(200):
        now = partitioner.choose("t", None, 100)
        partitioner.batch_closed("t", now)
        chosen[now] += 1
    assert len(chosen) > 50


def test_sticky_forgets_a_partition_that_is_gone() -> None:
    partitioner = make_partitioner("murmur2", random.Random(3))
    for _ in range(20):
        partitioner.choose("t", None, 50)
        assert partitioner.choose("t", None, 1) == 0


def test_round_robin_takes_turns_whatever_the_key() -> None:
    partitioner = make_partitioner("round_robin", random.Random())
    chosen = [partitioner.choose("t", b"same", 3) for _ in range(7)]
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'fnv'"):
        make_partitioner("fnv", random.Random())


def test_sticky_and_random_do_without_keys() -> None:
    sticky = make_partitioner("sticky", random.Random(1))
    first = sticky.choose("t", b"a", 16)
    assert {sticky.choose("t", b"%d" % i, 16) for i in range(50)} == {first}
    sticky.batch_closed("t", first)
    anywhere = make_partitioner("random", random.Random(1))
    assert {anywhere.choose("t", b"a", 4) for _ in range(100)} == {0, 1, 2, 3}


def test_a_function_chooses_and_its_failures_are_told() -> None:
    def by_length(topic: str, key: bytes | None, count: int) -> int:
        return len(key or b"") if topic == "t" else 1 // 0

    chosen = make_partitioner(by_length, random.Random(1))
    assert choose_partition(chosen, "t", b"abc", None, 4) == 3
    assert choose_partition(chosen, "t", b"abc", 1, 4) == 1, "a number that is given counts"
    for topic, key, partition in (("t", b"abcd", None), ("u", b"", None), ("t", b"", 4)):
        with pytest.raises(UsageError):
            choose_partition(chosen, topic, key, partition, 4)
