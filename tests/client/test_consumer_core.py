"""What a consumer hands out and commits, step by step, without sockets."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import FetchPartitionResponse, FetchResponse, FetchTopicResponse
from raftmq.records import NewRecord, build_batch, stamp
from raftmq.types import TopicPartition
from raftmq_client import CorruptRecordsError, DeserializationError, MustAbortError, UsageError
from raftmq_client.core.build import build_consumer, build_producer
from raftmq_client.core.client import ClientCore, ClientOptions
from raftmq_client.core.consumer import ConsumerCore
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.group_state import Assigned
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.core.metadata import Broker, ClusterInfo, PartitionInfo, TopicInfo
from raftmq_client.options import consumer_options

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


def batch_of(base: int, *values: bytes, epoch: int = 0) -> bytearray:
    batch = bytearray(build_batch([NewRecord(None, value, 0, ()) for value in values]))
    stamp(batch, base, epoch)
    return batch


class Reader:
    """A consumer of two partitions, and a broker that serves what the test puts there."""

    def __init__(self, **settings: Any) -> None:
        client = ClientCore(ClientOptions())
        parts = tuple(PartitionInfo("t", p, 1, 0) for p in range(2))
        topics = (TopicInfo("t", None, False, parts),)
        client.metadata.apply(ClusterInfo("c", 1, (Broker(1, "h", 1),), topics), 0)
        self.core = ConsumerCore(consumer_options(**settings), client)
        self.core.assign({T0: 0, T1: 0}, 0)
        self.batches: dict[TopicPartition, list[bytearray]] = {T0: [], T1: []}
        self.now = 0.0

    def fetch(self) -> None:
        """Answer the fetches that are due."""
        for call in self.core.fetcher.calls(self.now):
            assert call.api == ApiKey.FETCH
            call.complete(FetchResponse([self._answer()]), None, self.now)

    def _answer(self) -> FetchTopicResponse:
        parts = [
            FetchPartitionResponse(
                key.partition, 0, 99, 99, 0, records=[memoryview(batch) for batch in batches]
            )
            for key, batches in self.batches.items()
        ]
        return FetchTopicResponse("t", None, parts)

    def offsets(self, records: list[ConsumerRecord]) -> list[tuple[int, int]]:
        return [(record.partition, record.offset) for record in records]

    def commit(self, *args: Any) -> dict[TopicPartition, int]:
        """The positions that a commit would save."""
        pending = self.core.commit(*(args or (None,)), self.now)
        if pending is None:
            return {}
        return dict(self.core._open_commits[-1][1])

    def committed_epochs(self, *args: Any) -> dict[int, int]:
        """By partition, the leader epochs of a commit's request."""
        pending = self.core.commit(*(args or (None,)), self.now)
        assert pending is not None
        (topic,) = pending.request(Identity("g", 1, "m"))(8).topics
        return {item.partition_index: item.committed_leader_epoch for item in topic.partitions}


def test_a_commit_covers_what_an_iteration_handed_out_and_no_more() -> None:
    reader = Reader(group="g")
    reader.batches[T0].append(batch_of(0, b"a", b"b", b"c"))
    reader.batches[T1].append(batch_of(0, b"d"))
    reader.fetch()
    first = reader.core.iterate(reader.core.take(500, 0))
    assert (first.partition, first.value) == (0, b"a")
    assert reader.commit() == {T0: 1, T1: 0}
    assert reader.core.next_record(0).value == b"b"  # type: ignore[union-attr]
    assert reader.commit() == {T0: 2, T1: 0}
    reader.core.end_iteration()
    assert reader.core.position(T0) == 2, "what was taken and not handed out is read again"
    reader.fetch()
    assert sorted(reader.offsets(reader.core.take(500, 0))) == [(0, 2), (1, 0)]
    assert reader.commit() == {T0: 3, T1: 1}


def test_a_commit_names_the_leader_epoch_of_the_last_record_it_covers() -> None:
    reader = Reader(group="g")
    core = reader.core
    reader.batches[T0] += [batch_of(0, b"a", epoch=3), batch_of(1, b"b", b"c", epoch=4)]
    reader.batches[T1].append(batch_of(0, b"d", epoch=6))
    reader.fetch()
    message = core.iterate(core.take(500, 0))
    assert reader.committed_epochs() == {0: 3, 1: -1}
    assert core.next_record(0).value == b"b"  # type: ignore[union-attr]
    assert reader.committed_epochs() == {0: 4, 1: -1}
    core.end_iteration()
    assert reader.committed_epochs() == {0: 4, 1: -1}, "what was put back does not count"
    reader.fetch()
    assert len(core.take(500, 0)) == 2
    assert reader.committed_epochs() == {0: 4, 1: 6}
    assert reader.committed_epochs(message) == {0: 3}
    assert reader.committed_epochs({T0: 1}) == {0: -1}, "nobody said which record that was"


def test_a_member_keeps_the_epochs_that_were_committed_before_it() -> None:
    reader = Reader(group="g")
    committed = {T0: CommittedOffset(5, 7, "a note")}
    reader.core._take_over(Assigned((T0, T1), committed))
    assert reader.committed_epochs() == {0: 7, 1: -1}
    reader.core.seek(T0, 3)
    assert reader.committed_epochs() == {0: -1, 1: -1}


def test_a_messages_commit_is_the_offset_behind_it() -> None:
    reader = Reader(group="g")
    reader.batches[T0].append(batch_of(7, b"a", b"b"))
    reader.core.seek(T0, 7)
    reader.fetch()
    message = reader.core.take(500, 0)[0]
    assert reader.commit(message) == {T0: 8}
    assert reader.commit({T1: 3}) == {T1: 3}


def test_automatic_commits_wait_for_their_time_and_repeat_what_failed() -> None:
    reader = Reader(group="g", auto_commit_ms=1_000)
    core = reader.core
    reader.batches[T0].append(batch_of(0, b"a", b"b"))
    reader.fetch()
    core.take(1, 0)
    core.take(1, 500)
    assert not core._open_commits
    core.take(1, 1_000)
    ((pending, positions),) = core._open_commits
    assert positions == {T0: 2, T1: 0}
    core.take(1, 2_000)
    assert len(core._open_commits) == 1, "one at a time"
    pending.settle(None, UsageError("refused"))
    core.take(1, 3_000)
    ((pending, positions),) = core._open_commits
    assert positions == {T0: 2, T1: 0}
    pending.settle(None, None)
    core.take(1, 4_000)
    assert not core._open_commits, "it stands"
    assert core.last_commit([T0, T1], 4_000) is None


def test_commits_that_are_done_are_forgotten() -> None:
    reader = Reader(group="g", auto_commit_ms=None)
    for offset in range(100):
        pending = reader.core.commit({T0: offset}, 0)
        assert pending is not None
        pending.settle(None, None)
    assert len(reader.core._open_commits) == 1


def test_what_cannot_be_read_names_its_place_and_stays() -> None:
    reader = Reader(value_deserializer="json", key_deserializer="str")
    reader.batches[T0].append(batch_of(0, b"1", b"{", b"3"))
    reader.fetch()
    (good,) = reader.core.take(500, 0)
    assert (good.value, good.value_size, good.key, good.key_size) == (1, 1, None, -1)
    for _ in range(2):
        reader.fetch()
        with pytest.raises(DeserializationError, match="t-0 at offset 1") as caught:
            reader.core.take(500, 0)
        assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("t", 0, 1)
    reader.core.seek(T0, 2)
    reader.fetch()
    assert [record.value for record in reader.core.take(500, 0)] == [3]


def test_a_wrong_checksum_names_its_place_and_is_never_delivered() -> None:
    reader = Reader()
    bad = batch_of(2, b"x", b"y")
    bad[-1] ^= 1
    reader.batches[T0] += [batch_of(0, b"a", b"b"), bad]
    for step in range(6):
        reader.now = step * 10_000.0
        reader.fetch()
    assert reader.offsets(reader.core.take(500, 0)) == [(0, 0), (0, 1)]
    with pytest.raises(CorruptRecordsError, match="t-0 at offset 2") as caught:
        reader.core.take(500, 0)
    assert (caught.value.topic, caught.value.partition, caught.value.offset) == ("t", 0, 2)
    assert reader.core.position(T0) == 2


def test_a_paused_partition_keeps_its_place_within_an_iteration() -> None:
    reader = Reader()
    reader.batches[T0].append(batch_of(0, b"a", b"b"))
    reader.batches[T1].append(batch_of(0, b"c"))
    reader.fetch()
    reader.core.iterate(reader.core.take(500, 0))
    reader.core.set_paused([T0], True)
    assert reader.core.next_record(0) is None
    reader.fetch()
    assert reader.offsets(reader.core.take(500, 0)) == [(1, 0)]
    reader.core.set_paused([T0], False)
    reader.fetch()
    assert reader.offsets(reader.core.take(500, 0)) == [(0, 1)]


@pytest.mark.parametrize(
    ("build", "setting", "told"),
    [
        (build_consumer, {"max_poll_interval_ms": 0}, "max_poll_interval_ms is a number from"),
        (build_consumer, {"max_poll_interval_ms": float("inf")}, "max_poll_interval_ms"),
        (
            build_consumer,
            {"max_wait_ms": "500"},
            "max_wait_ms is a number from 0 to [0-9]+, not '500'",
        ),
        (build_consumer, {"auto_commit_ms": -1}, "auto_commit_ms"),
        (build_consumer, {"buffer_bytes_max": float("nan")}, "buffer_bytes_max"),
        (build_consumer, {"assignors": ()}, "assignors is a tuple of names"),
        (build_consumer, {"assignors": "range"}, "assignors is a tuple of names"),
        (build_consumer, {"group": ""}, "group is a name"),
        (build_producer, {"linger_ms": -1}, "linger_ms is a number from 0 to [0-9]+, not -1"),
        (build_producer, {"buffer_memory": 0}, "buffer_memory"),
        (build_producer, {"batch_bytes": True}, "batch_bytes"),
        (build_producer, {"metadata_max_age_ms": 0}, "metadata_max_age_ms"),
        (build_producer, {"compression": "gzip", "compression_level": 10}, "from -1 to 9"),
        (build_producer, {"compression": "snappy", "compression_level": 1}, "nothing to"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(
    build: Any, setting: dict[str, Any], told: str
) -> None:
    arguments = ("h:1", (), setting) if build is build_consumer else ("h:1", setting)
    with pytest.raises(UsageError, match=told):
        build(*arguments)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delivery": "exactly"}, "at_most_once"),
        ({"delivery": "at_most_once"}, "group"),
        ({"delivery": "at_most_once", "group": "g", "auto_commit_ms": 100}, "auto_commit_ms"),
        ({"assignors": ("range", "cooperative-sticky")}, "mixed"),
        ({"isolation": "none"}, "isolation"),
        ({"heartbeat_interval_ms": 50_000}, "session_timeout_ms"),
        ({"reset": "now"}, "earliest"),
    ],
    ids=str,
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        consumer_options(**settings)


def test_commits_need_a_group() -> None:
    with pytest.raises(UsageError):
        Reader().core.commit(None, 0)
    with pytest.raises(UsageError):
        Reader().core.subscribe(["t"], 0)


def test_a_consumer_goes_back_to_where_its_group_or_its_reading_stood() -> None:
    reader = Reader(group="g", delivery="exactly_once")
    core = reader.core
    reader.batches[T0].append(batch_of(0, b"a", b"b", b"c", b"d"))
    reader.fetch()
    assert len(core.take(2, 0)) == 2
    who, places = core.for_transaction(None)
    assert (who.group, places[T0]) == ("g", CommittedOffset(2, 0))
    core.saved_by_transaction({T0: CommittedOffset(2, 0)})
    assert T0 not in core.for_transaction(None)[1], "it is saved"
    assert len(core.take(2, 0)) == 2
    core.rewind()
    assert core.position(T0) is None, "the group is asked"
    core.next_event(0.0)
    assert core._starting is not None
    core._starting.settle({T0: CommittedOffset(2)}, None)
    assert core.position(T0) == 2
    reader.fetch()
    assert core.take(2, 0)[0].value == b"c"
    core.rewind()
    core.next_event(0.0)
    core._starting.settle({}, None)  # the group has forgotten: where it was, or reading began
    assert core.position(T0) == 2


def test_what_was_let_go_unsaved_may_not_be_committed() -> None:
    """Its new reader begins before it: what was made of it would count twice."""
    reader = Reader(group="g", delivery="exactly_once")
    core = reader.core
    reader.batches[T0].append(batch_of(0, b"a"))
    reader.batches[T1].append(batch_of(0, b"b"))
    reader.fetch()
    core.take(500, 0)
    core._finish_all()
    core.assign({T1: None}, 0)
    with pytest.raises(MustAbortError, match="t-0"):
        core.for_transaction(None)
    core.rewind()
    assert core.for_transaction(None)[1] == {}
    assert core.fetcher.readers.keys() == {T1}


def test_who_commits_by_himself_is_no_part_of_a_transaction() -> None:
    with pytest.raises(UsageError, match="commits by itself"):
        Reader(group="g").core.for_transaction(None)
    with pytest.raises(UsageError, match="need a group"):
        Reader().core.for_transaction(None)


def test_a_position_behind_what_nobody_is_given_is_committed_too() -> None:
    """The end of a transaction comes later than its records: the lag is to become 0."""
    reader = Reader(group="g", isolation="read_committed", auto_commit_ms=None)
    reader.batches[T0].append(batch_of(0, b"a"))
    reader.fetch()
    assert len(reader.core.take(500, 0)) == 1
    assert reader.commit()[T0] == 1
    marker = bytearray(
        build_batch(
            [NewRecord(b"\0\0\0\1", b"\0" * 6, 0)],
            producer_id=1,
            producer_epoch=0,
            transactional=True,
            control=True,
        )
    )
    stamp(marker, 1, 0)
    reader.batches[T0].append(marker)
    reader.fetch()
    assert reader.core.take(500, 0) == []
    assert reader.commit()[T0] == 2
