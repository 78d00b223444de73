"""The producer against a model of brokers that lose, repeat and refuse: no loss, no disorder.

The model keeps what Kafka's brokers keep of an idempotent producer (epoch, the last five batches)
and fails requests before or after the append. Whatever happens, an acknowledged record is in the
log, each record at most once, and the records of a partition in the order of sending.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from uuid import UUID

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.protocol.produce import (
    ProducePartitionResponse,
    ProduceResponse,
    ProduceTopicResponse,
    decode_produce_request,
)
from raftmq.protocol.wire import CurrentLeader, NodeEndpoint
from raftmq.records import BatchHeader, NewRecord, check_batch, read_records
from raftmq.types import TopicPartition
from raftmq_client.core.accumulator import Receipt
from raftmq_client.core.call import Call
from raftmq_client.core.metadata import (
    Broker,
    ClusterInfo,
    MetadataCore,
    PartitionInfo,
    TopicInfo,
)
from raftmq_client.core.partitioners import make_partitioner
from raftmq_client.core.produce_requests import PartitionState, ProducerOptions
from raftmq_client.core.producer import ProducerCore
from raftmq_client.errors import (
    ConnectionFailedError,
    ConnectionLostError,
    Outcome,
    RecordTooLargeError,
    TimedOutError,
    UsageError,
)

VERSION = 9


@define
class ModelLog:
    """One partition as a broker keeps it."""

    values: list[bytes] = field(factory=list)
    epoch: int = -1
    next_sequence: int = 0
    recent: deque[tuple[int, int, int]] = field(factory=lambda: deque(maxlen=5))

    def append(self, header: BatchHeader, values: list[bytes]) -> tuple[ErrorCode, int]:
        if header.producer_id < 0:
            self.values.extend(values)
            return ErrorCode.NONE, len(self.values) - len(values)
        if header.producer_epoch < self.epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH, -1
        if header.producer_epoch > self.epoch:
            if header.base_sequence != 0 and self.epoch >= 0:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            # Of a producer that it does not know, Kafka takes any sequence as the first (KIP-360).
            self.epoch, self.next_sequence = header.producer_epoch, header.base_sequence
            self.recent.clear()
        for sequence, count, offset in self.recent:
            if sequence == header.base_sequence and count == header.record_count:
                return ErrorCode.NONE, offset
        if header.base_sequence != self.next_sequence:
            return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
        offset = len(self.values)
        self.values.extend(values)
        self.next_sequence += header.record_count
        self.recent.append((header.base_sequence, header.record_count, offset))
        return ErrorCode.NONE, offset


class World:
    """A producer, a clock, and brokers that answer as the test says."""

    def __init__(self, partitions: int = 1, *, is_known: bool = False, **options: object) -> None:
        self.metadata = MetadataCore()
        self.metadata.apply(cluster(partitions), 0)
        self.now = 0.0
        settings: dict[str, object] = {"linger_ms": 0.0, "batch_bytes": 200}
        settings.update(options)
        self.core = ProducerCore(
            ProducerOptions(**settings),  # type: ignore[arg-type]
            self.metadata,
            make_partitioner("murmur2", random.Random(1)),
            lambda _node: 0.0,
        )
        self.logs = [ModelLog() for _ in range(partitions)]
        if is_known:  # as after a first acknowledgement
            for number, log in enumerate(self.logs):
                key = TopicPartition("t", number)
                self.core._partitions[key] = PartitionState(key, is_known=True)
                log.epoch = 0
        self.calls: deque[Call] = deque()

    def send(self, value: bytes, partition: int = 0) -> Receipt:
        record = NewRecord(None, value, 1)
        receipt: Receipt | None = self.core.append("t", record, partition, None)  # as drivers do
        if receipt is None:
            receipt, _ = self.core.send("t", record, partition, None, self.now)
        return receipt

    def step(self) -> None:
        """Collect due calls; metadata and producer ids are answered at once."""
        while True:
            calls = [*self.metadata.calls(self.now), *self.core.calls(self.now)]
            if not calls:
                return
            for call in calls:
                if call.api == ApiKey.INIT_PRODUCER_ID:
                    answer = Struct(error_code=0, producer_id=77, producer_epoch=0)
                    call.complete(answer, None, self.now)
                elif call.api == ApiKey.METADATA:
                    self.metadata.apply(cluster(len(self.logs)), self.now)
                    call.complete(None, ConnectionFailedError("answered by the test"), self.now)
                else:
                    call.sent = True
                    self.calls.append(call)

    def later(self, ms: float) -> None:
        self.now += ms
        self.step()

    def batches(self, call: Call) -> list[tuple[int, BatchHeader, list[bytes]]]:
        body = b"".join(bytes(piece) for piece in call.body(VERSION))
        request = decode_produce_request(VERSION, memoryview(body))
        found = []
        for topic in request.topics:
            for part in topic.partitions:
                assert part.records is not None
                values = [record.value or b"" for record in read_records(part.records)]
                found.append((part.index, check_batch(part.records), values))
        return found

    def serve(self, call: Call) -> None:
        """Append and answer, as a sound broker does."""
        self.answer(call, [(p, *self.logs[p].append(h, v)) for p, h, v in self.batches(call)])

    def answer(self, call: Call, results: list[tuple[int, ErrorCode, int]]) -> None:
        parts = [ProducePartitionResponse(p, code, offset) for p, code, offset in results]
        response = ProduceResponse([ProduceTopicResponse("t", None, parts)])
        call.complete(response, None, self.now)

    def refuse(self, call: Call, code: ErrorCode) -> None:
        self.answer(call, [(p, code, -1) for p, _, _ in self.batches(call)])

    def append_silently(self, call: Call) -> None:
        for partition, header, values in self.batches(call):
            self.logs[partition].append(header, values)

    def lose(self, call: Call) -> None:
        call.complete(None, ConnectionLostError("gone"), self.now)


def cluster(partitions: int, leader: int = 1, epoch: int = 1) -> ClusterInfo:
    parts = tuple(PartitionInfo("t", p, leader, epoch) for p in range(partitions))
    brokers = (Broker(1, "h", 1), Broker(2, "h", 2))
    return ClusterInfo("c", 1, brokers, (TopicInfo("t", UUID(int=5), False, parts),))


def test_records_are_batched_by_size_and_offsets_told() -> None:
    world = World(is_known=True)
    receipts = [world.send(b"%03d" % i) for i in range(20)]
    world.step()
    assert len(world.calls) > 1
    while world.calls:
        world.serve(world.calls.popleft())
        world.step()
    assert [receipt.result().offset for receipt in receipts] == list(range(20))
    assert world.core.pending == 0
    assert world.core.accumulator.size_bytes == 0


def test_a_batch_lingers_until_its_time_or_until_somebody_waits() -> None:
    world = World(is_known=True, linger_ms=50.0)
    receipt = world.send(b"x")
    world.step()
    assert not world.calls
    assert world.core.deadline() == 50.0
    assert world.core.hurry(receipt)
    world.step()
    assert len(world.calls) == 1
    world.send(b"y")
    world.later(49)
    assert len(world.calls) == 1
    world.later(1)
    assert len(world.calls) == 2


def test_a_lost_answer_is_asked_for_again_and_not_appended_twice() -> None:
    world = World()
    receipt = world.send(b"x")
    world.step()
    call = world.calls.popleft()
    world.append_silently(call)
    world.lose(call)
    assert not receipt.is_done
    world.later(100)
    world.serve(world.calls.popleft())
    assert receipt.result().offset == 0
    assert world.logs[0].values == [b"x"]


def test_after_a_failure_nothing_overtakes() -> None:
    world = World(is_known=True, batch_bytes=100, in_flight_max=5)
    receipts = [world.send(b"%d" % i) for i in range(10)]
    world.step()
    first, *rest = [world.calls.popleft() for _ in range(5)]
    world.refuse(first, ErrorCode.NOT_ENOUGH_REPLICAS)
    world.later(100)
    assert not world.calls, "batches behind the failed one are still unanswered"
    for call in rest:
        world.serve(call)  # out of order, refused
    world.later(100)
    while world.calls:
        world.serve(world.calls.popleft())
        world.later(1)
    assert [receipt.result().offset for receipt in receipts] == list(range(10))
    assert world.logs[0].values == [b"%d" % i for i in range(10)]


def test_a_refused_first_batch_is_not_overtaken_by_the_second() -> None:
    world = World(batch_bytes=100)
    for i in range(4):
        world.send(b"%d" % i)
    world.step()
    (first,) = world.calls
    world.calls.clear()
    world.refuse(first, ErrorCode.NOT_LEADER_OR_FOLLOWER)  # it has just begun to lead
    for _ in range(20):
        world.later(100)
        while world.calls:
            world.serve(world.calls.popleft())
    assert world.logs[0].values == [b"0", b"1", b"2", b"3"]
    for i in range(4, 9):
        world.send(b"%d" % i)
    world.step()
    assert len(world.calls) > 1, "from the first acknowledgement on there are several on their way"


def test_a_gap_that_is_final_is_closed_by_a_new_epoch() -> None:
    world = World(is_known=True, batch_bytes=100)
    bad, *good = [world.send(b"%d" % i) for i in range(6)]
    world.step()
    calls = [world.calls.popleft() for _ in range(len(world.calls))]
    assert bad.batch is not None
    gone = len(bad.batch.records)
    world.refuse(calls[0], ErrorCode.INVALID_RECORD)
    for call in calls[1:]:
        world.serve(call)
    for _ in range(20):
        world.later(1_000)
        while world.calls:
            world.serve(world.calls.popleft())
            world.step()
    assert bad.outcome is Outcome.FAILED
    assert [receipt.outcome for receipt in good] == [Outcome.OK] * 5
    assert world.logs[0].epoch == 1
    assert world.logs[0].values == [b"%d" % i for i in range(gone, 6)]


def test_a_batch_too_large_for_the_broker_is_split() -> None:
    world = World(batch_bytes=1000)
    receipts = [world.send(b"%02d" % i) for i in range(16)]
    world.step()
    for _ in range(30):
        world.later(100)
        while world.calls:
            call = world.calls.popleft()
            if any(header.record_count > 3 for _, header, _ in world.batches(call)):
                world.refuse(call, ErrorCode.MESSAGE_TOO_LARGE)
            else:
                world.serve(call)
    assert [receipt.result().offset for receipt in receipts] == list(range(16))
    assert world.logs[0].values == [b"%02d" % i for i in range(16)]


def test_receipts_are_compared_by_identity_and_tell_how_they_stand() -> None:
    world = World()
    one, other = world.send(b"x"), world.send(b"x")
    assert one != other
    assert len({one, other}) == 2
    assert repr(one) == "<Receipt pending>"
    one.fail(UsageError("closed"))
    assert repr(one) == "<Receipt FAILED>"


def test_receipts_know_their_place_and_are_told_once_after_a_batch_was_split() -> None:
    world = World(batch_bytes=1000)
    told: list[int] = []
    receipts = [world.send(b"%02d" % i) for i in range(16)]
    for number in (3, 12):
        receipts[number].listen(lambda receipt: told.append(receipt.result().offset))
    world.step()
    for _ in range(30):
        world.later(100)
        while world.calls:
            call = world.calls.popleft()
            if any(header.record_count > 5 for _, header, _ in world.batches(call)):
                world.refuse(call, ErrorCode.MESSAGE_TOO_LARGE)
            else:
                world.serve(call)
        for receipt in world.core.listeners.take():
            for listener in receipt.listeners or ():
                listener(receipt)
    assert sorted(told) == [3, 12]
    assert [receipt.place.offset for receipt in receipts if receipt.place] == list(range(16))


@pytest.mark.parametrize("is_split", [False, True])
def test_a_receipt_that_is_kept_does_not_keep_the_records(is_split: bool) -> None:
    world = World()
    values = [bytes([number]) * 30 for number in range(4)]
    before = [sys.getrefcount(value) for value in values]
    receipts = [world.send(value) for value in values]
    world.step()
    if is_split:
        world.refuse(world.calls.popleft(), ErrorCode.MESSAGE_TOO_LARGE)
        world.later(100)
    while world.calls:
        world.serve(world.calls.popleft())
        world.step()
    assert [receipt.result().offset for receipt in receipts] == [0, 1, 2, 3]
    assert [sys.getrefcount(value) for value in values] == before


def test_what_has_not_left_at_its_timeout_has_failed_and_never_leaves() -> None:
    """A call waits for its connection; its bytes are made when that stands."""
    world = World(partitions=2, delivery_timeout_ms=1_000, linger_ms=600.0)
    first = world.send(b"a")
    world.later(500)
    second = world.send(b"b", 1)
    world.core.hurry(second)
    world.core.hurry(first)
    world.step()
    (call,) = world.calls
    call.sent = False
    world.later(500)
    assert (first.outcome, second.outcome) == (Outcome.FAILED, None)
    assert [(p, values) for p, _, values in world.batches(call)] == [(1, [b"b"])]
    world.later(500)
    assert second.outcome is Outcome.FAILED
    assert call.is_done, "there is nothing left to say"


def test_a_settled_batch_takes_no_more_records() -> None:
    """The quick way of `append` must not put a record where nobody will send it."""
    world = World(linger_ms=1_000_000.0, delivery_timeout_ms=100.0)
    first = world.send(b"a")
    world.later(200)
    assert first.outcome is Outcome.FAILED
    second = world.send(b"b")
    assert second.outcome is None
    world.core.hurry(second)
    world.step()
    world.serve(world.calls.popleft())
    assert second.result().offset == 0


def test_records_of_an_unknown_topic_are_not_overtaken() -> None:
    world = World(linger_ms=1_000_000.0)
    world.send(b"a")
    known = dict(world.metadata.topics)
    world.metadata.topics.clear()
    waiting = world.core.send("t", NewRecord(None, b"c", 1), 0, None, world.now)[0]
    world.metadata.topics.update(known)
    assert world.core.append("t", NewRecord(None, b"d", 1), 0, None) is None
    assert waiting.batch is None


@pytest.mark.parametrize(
    ("make", "outcome"),
    [
        pytest.param(lambda w, c: w.lose(c), Outcome.UNKNOWN, id="answer lost"),
        pytest.param(
            lambda w, c: c.complete(None, TimedOutError("slow", sent=True), w.now),
            Outcome.UNKNOWN,
            id="no answer",
        ),
        pytest.param(
            lambda w, c: w.refuse(c, ErrorCode.NOT_LEADER_OR_FOLLOWER),
            Outcome.UNKNOWN,
            id="a leader that stepped down may have appended",
        ),
        pytest.param(
            lambda w, c: c.complete(None, ConnectionFailedError("refused"), w.now),
            Outcome.FAILED,
            id="never left",
        ),
        pytest.param(
            lambda w, c: w.refuse(c, ErrorCode.NOT_ENOUGH_REPLICAS),
            Outcome.FAILED,
            id="refused before the append",
        ),
    ],
)
def test_the_delivery_timeout_says_unknown_only_if_it_must(make: object, outcome: Outcome) -> None:
    world = World(delivery_timeout_ms=5_000)
    receipt = world.send(b"x")
    world.step()
    for _ in range(60):
        while world.calls:
            make(world, world.calls.popleft())  # type: ignore[operator]
        world.later(100)
    assert receipt.outcome is outcome
    assert world.core.pending == 0
    with pytest.raises(TimedOutError):
        receipt.result()


def test_a_batch_in_flight_at_its_timeout_is_unknown_and_its_late_answer_ignored() -> None:
    world = World(delivery_timeout_ms=1_000)
    receipt = world.send(b"x")
    world.step()
    world.later(1_001)
    assert receipt.outcome is Outcome.UNKNOWN
    world.serve(world.calls.popleft())
    assert receipt.outcome is Outcome.UNKNOWN


def test_a_frozen_leader_is_left_for_its_successor() -> None:
    world = World()
    receipt = world.send(b"x")
    world.step()
    frozen = world.calls.popleft()
    assert frozen.node == 1
    world.metadata.apply(cluster(1, leader=2, epoch=2), world.now)
    world.later(1)
    call = world.calls.popleft()
    assert call.node == 2
    world.serve(call)
    world.serve(frozen)  # thawed: the same sequence, appended once
    assert receipt.result().offset == 0
    assert world.logs[0].values == [b"x"]


def test_a_stalled_request_makes_the_client_ask_who_leads() -> None:
    world = World()
    world.send(b"x")
    world.step()
    before = world.metadata.version
    world.later(600)
    assert world.metadata.version > before


def test_without_sequences_one_batch_at_a_time_is_in_flight() -> None:
    world = World(acks=1, batch_bytes=100)
    for i in range(5):
        world.send(b"%d" % i)
    world.step()
    (call,) = world.calls
    ((_, header, _),) = world.batches(call)
    assert header.producer_id == -1
    assert header.base_sequence == -1


def test_acks_0_is_done_when_written() -> None:
    world = World(acks=0)
    receipt = world.send(b"x")
    world.step()
    call = world.calls.popleft()
    assert not call.expects_answer
    call.complete(None, None, world.now)
    assert receipt.result().offset == -1


def test_records_wait_for_metadata_and_go_out_in_order() -> None:
    world = World()
    world.metadata.topics.clear()
    receipts = [world.send(b"%d" % i) for i in range(3)]
    assert all(receipt.batch is None for receipt in receipts)
    world.metadata.apply(cluster(1), 0)
    world.later(1)
    world.serve(world.calls.popleft())
    assert world.logs[0].values == [b"0", b"1", b"2"]


def test_a_topic_that_never_appears_fails_its_records() -> None:
    world = World(delivery_timeout_ms=100)
    receipt, _ = world.core.send("nowhere", NewRecord(None, b"x", 1), None, None, 0)
    world.later(101)
    assert receipt.outcome is Outcome.FAILED
    assert world.core.accumulator.size_bytes == 0


def test_wrong_use_is_told() -> None:
    world = World(request_bytes_max=1_000)
    with pytest.raises(RecordTooLargeError):
        world.send(b"x" * 1_000)
    told: list[Receipt] = []
    refused, is_due = world.core.send("t", (None, b"x", 0, ()), 4, None, 0.0, told.append)
    assert is_due
    assert refused.outcome is None, "such a partition may be new"
    world.step()
    assert refused.outcome is Outcome.FAILED
    assert [receipt.outcome for receipt in world.core.listeners.take()] == [Outcome.FAILED]
    with pytest.raises(UsageError):
        World(acks=1, idempotent=True)


class Chaos:
    """Draws what happens to each request."""

    def __init__(self, world: World, draw: random.Random) -> None:
        self.world = world
        self.draw = draw

    def meet(self, call: Call) -> None:
        world, draw = self.world, self.draw
        fate = draw.random()
        if fate < 0.55:
            world.serve(call)
        elif fate < 0.65:
            world.append_silently(call)
            world.lose(call)
        elif fate < 0.75:
            world.lose(call)
        elif fate < 0.80:
            call.complete(None, ConnectionFailedError("refused"), world.now)
        elif fate < 0.88:
            world.refuse(call, ErrorCode.NOT_ENOUGH_REPLICAS)
        elif fate < 0.94:
            world.append_silently(call)
            world.refuse(call, ErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND)
        elif fate < 0.96:
            world.refuse(call, ErrorCode.INVALID_RECORD)
        else:
            world.append_silently(call)
            call.complete(None, TimedOutError("slow", sent=True), world.now)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_whatever_fails_no_record_is_lost_doubled_or_reordered(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        partitions=2,
        batch_bytes=draw.choice([90, 150, 400]),
        in_flight_max=draw.choice([1, 2, 5]),
        delivery_timeout_ms=draw.choice([3_000, 120_000]),
    )
    chaos = Chaos(world, draw)
    receipts: list[list[Receipt]] = [[], []]
    for i in range(80):
        receipts[i % 2].append(world.send(b"%04d" % i, i % 2))
        if draw.random() < 0.3:
            world.later(draw.choice([0, 1, 20, 300]))
        while world.calls and draw.random() < 0.5:
            chaos.meet(world.calls.popleft())  # in order, as a connection answers
    for _ in range(4_000):
        if world.core.pending == 0:
            break
        world.later(50)
        while world.calls:
            chaos.meet(world.calls.popleft())
    assert world.core.pending == 0
    for partition, log in enumerate(world.logs):
        assert log.values == sorted(set(log.values)), "doubled or reordered"
        for i, receipt in enumerate(receipts[partition]):
            value = b"%04d" % (2 * i + partition)
            if receipt.outcome is Outcome.OK:
                assert value in log.values
                offset = receipt.result().offset
                assert offset == -1 or log.values[offset] == value
            elif receipt.outcome is Outcome.FAILED:
                assert value not in log.values, "told as failed, but it stands in the log"


def test_a_batch_goes_on_at_the_leader_that_a_refusal_names() -> None:
    world = World()
    receipt = world.send(b"x")
    world.step()
    call = world.calls.popleft()
    part = ProducePartitionResponse(
        0, ErrorCode.NOT_LEADER_OR_FOLLOWER, current_leader=CurrentLeader(7, 9)
    )
    answer = ProduceResponse(
        [ProduceTopicResponse("t", None, [part])], node_endpoints=[NodeEndpoint(7, "new", 9, None)]
    )
    call.complete(answer, None, world.now)
    world.metadata.options.backoff_ms = 1e9  # nobody else tells
    world.metadata._not_before = 1e9
    world.later(100)
    assert world.calls.popleft().node == 7, "a broker that was not even known (KIP-951)"
    assert not receipt.is_done
