"""Transactions against a model of a cluster: whatever is lost, a commit is never guessed.

A transaction that was told as committed is in the logs once, whole and in order, and its offsets
are the group's; one that was told as aborted leaves nothing that counts. Both protocols (KIP-890).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq.records import NewRecord
from raftmq.types import TopicPartition
from raftmq_client.core.accumulator import Receipt
from raftmq_client.core.call import Call
from raftmq_client.core.group_admin import CommittedOffset
from raftmq_client.core.group_requests import Identity
from raftmq_client.core.metadata import (
    Broker,
    ClusterInfo,
    MetadataCore,
    PartitionInfo,
    TopicInfo,
)
from raftmq_client.core.partitioners import make_partitioner
from raftmq_client.core.produce_requests import ProducerOptions
from raftmq_client.core.producer import ProducerCore
from raftmq_client.core.transaction_requests import TransactionHandle
from raftmq_client.core.transactions import Ending, OffsetCommit, State, TransactionCore
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    ConnectionFailedError,
    ConnectionLostError,
    FencedError,
    MustAbortError,
    Outcome,
    TransactionError,
    UsageError,
)
from tests.client.model_transactions import TOPIC, Cluster, Log, lose_after, lose_before

PARTITIONS = 2
Fate = Callable[[Cluster, Call, float], None]


def served(cluster: Cluster, call: Call, now: float) -> None:
    call.complete(cluster.serve(call), None, now)


class World:
    """One transactional producer, a clock, and a cluster that answers as the test says."""

    def __init__(self, protocol: int) -> None:
        self.cluster = Cluster([Log() for _ in range(PARTITIONS)])
        self.metadata = MetadataCore()
        self.now = 0.0
        self.calls: deque[Call] = deque()
        self.fates: dict[ApiKey, deque[Fate]] = {}
        self.transactions, self.core = self.producer(protocol)

    def producer(self, protocol: int) -> tuple[TransactionCore, ProducerCore]:
        transactions = TransactionCore("x", 60_000, self.metadata, lambda _name: protocol)
        options = ProducerOptions(linger_ms=0.0, batch_bytes=200, transactional_id="x")
        partitioner = make_partitioner("murmur2", random.Random(1))
        core = ProducerCore(options, self.metadata, partitioner, lambda _: 0.0, transactions)
        self.learn()
        return transactions, core

    def learn(self) -> None:
        parts = tuple(PartitionInfo(TOPIC, p, 1, 1) for p in range(PARTITIONS))
        topics = (TopicInfo(TOPIC, None, False, parts),)
        self.metadata.apply(ClusterInfo("c", 1, (Broker(1, "h", 1),), topics), self.now)

    def fate(self, api: ApiKey, *fates: Fate) -> None:
        """What the next requests of an API meet."""
        self.fates.setdefault(api, deque()).extend(fates)

    def refuse(self, api: ApiKey, *codes: ErrorCode) -> None:
        self.cluster.refusals.setdefault(api, deque()).extend(codes)

    def collect(self) -> None:
        for call in self.metadata.calls(self.now):
            self.learn()
            call.complete(None, ConnectionFailedError("answered by the test"), self.now)
        for call in self.core.calls(self.now):
            call.sent = True
            self.calls.append(call)

    def run(self, until: Callable[[], bool] | None = None, fate: Fate | None = None) -> None:
        """Serve what is asked until that holds, or nothing more is asked."""
        for _ in range(2_000):
            self.collect()
            if until is not None and until():
                return
            if not self.calls:
                if self.core.deadline() > self.now + 5_000:
                    break
                self.now = max(self.now + 1, self.core.deadline())
                continue
            call = self.calls.popleft()
            waiting = self.fates.get(ApiKey(call.api))
            chosen = waiting.popleft() if waiting else fate or served
            chosen(self.cluster, call, self.now)
        assert until is None, "it never came to that"

    def serve(self, count: int, fate: Fate) -> None:
        """Serve so many requests, if there are."""
        for _ in range(count):
            self.collect()
            if self.calls:
                fate(self.cluster, self.calls.popleft(), self.now)

    def begin(self) -> int:
        self.run(lambda: self.transactions.is_ready)
        self.transactions.check_begin()
        return self.transactions.begin(self.now)

    def send(self, value: bytes, partition: int = 0) -> Receipt:
        record = NewRecord(None, value, 1)
        receipt: Receipt | None = self.core.append(TOPIC, record, partition, None)
        if receipt is None:
            receipt, _ = self.core.send(TOPIC, record, partition, None, self.now)
        return receipt

    def offsets(self, offset: int, generation: int = 1) -> OffsetCommit:
        who = Identity("g", generation, "m")
        places = {TopicPartition("in", 0): CommittedOffset(offset)}
        commit = OffsetCommit(who, places, self.now + 30_000)
        self.transactions.commit_offsets(commit)
        return commit

    def end(self, *, commit: bool, fate: Fate | None = None) -> Ending:
        ending = self.core.end_transaction(commit=commit)
        self.run(lambda: ending.is_done, fate)
        return ending

    def visible(self, partition: int = 0) -> list[bytes]:
        entries = self.cluster.logs[partition].entries
        return [entry.value for entry in entries if entry.is_committed]

    def asked(self) -> list[ApiKey]:
        return [api for api, _ in self.cluster.seen]


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def both(world: World) -> int:
    return world.transactions.protocol


def test_a_commit_counts_and_an_abort_does_not(world: World) -> None:
    for number in range(4):
        world.begin()
        receipts = [world.send(b"%d" % number, p) for p in range(PARTITIONS)]
        world.end(commit=number % 2 == 0).result()
        if number % 2 == 0:
            assert all(receipt.outcome is Outcome.OK for receipt in receipts)
    for partition in range(PARTITIONS):
        assert world.visible(partition) == [b"0", b"2"]


def test_what_is_asked_in_which_protocol() -> None:
    for protocol, expected in (
        (1, [ApiKey.ADD_PARTITIONS_TO_TXN, ApiKey.PRODUCE, ApiKey.END_TXN]),
        (2, [ApiKey.PRODUCE, ApiKey.END_TXN]),
    ):
        world = World(protocol)
        world.begin()
        world.cluster.seen.clear()
        world.send(b"a")
        epoch = world.transactions.producer_epoch
        world.end(commit=True).result()
        assert world.asked() == expected
        versions = dict(world.cluster.seen)
        assert versions[ApiKey.PRODUCE] == (11, 12)[protocol - 1]
        assert versions[ApiKey.END_TXN] == (4, 5)[protocol - 1]
        assert world.transactions.producer_epoch == epoch + protocol - 1


def test_an_empty_transaction_asks_nothing(world: World) -> None:
    world.begin()
    world.cluster.seen.clear()
    world.end(commit=True).result()
    world.begin()
    world.end(commit=False).result()
    assert world.asked() == []


def test_offsets_are_the_groups_once_committed(world: World) -> None:
    world.begin()
    commit = world.offsets(5)
    world.run(lambda: commit.is_done)
    assert commit.error is None
    assert world.cluster.committed == {}
    world.end(commit=True).result()
    assert world.cluster.committed == {"g": {TopicPartition("in", 0): 5}}
    world.begin()
    world.offsets(9)
    world.send(b"x")
    world.end(commit=False).result()
    assert world.cluster.committed == {"g": {TopicPartition("in", 0): 5}}


def test_a_member_of_an_old_generation_must_abort(world: World) -> None:
    world.begin()
    world.send(b"x")
    commit = world.offsets(5, generation=7)
    world.run(lambda: commit.is_done)
    assert isinstance(commit.error, MustAbortError)
    with pytest.raises(MustAbortError, match="ILLEGAL_GENERATION"):
        world.core.end_transaction(commit=True)
    with pytest.raises(MustAbortError):
        world.send(b"y")
    world.end(commit=False).result()
    assert world.visible() == []
    world.begin()
    world.send(b"z")
    world.end(commit=True).result()
    assert world.visible() == [b"z"]


@pytest.mark.parametrize("fates", [(lose_before,), (lose_after,), (lose_before, lose_after) * 3])
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_without_an_answer_is_asked_for_again(
    world: World, fates: tuple[Fate, ...], commit: bool
) -> None:
    world.begin()
    world.send(b"a")
    world.run()
    world.fate(ApiKey.END_TXN, *fates)
    world.end(commit=commit).result()
    assert world.visible() == ([b"a"] if commit else [])
    world.begin()
    world.send(b"b")
    world.end(commit=True).result()
    assert world.visible() == ([b"a", b"b"] if commit else [b"b"])


@pytest.mark.parametrize("api", [ApiKey.END_TXN, ApiKey.TXN_OFFSET_COMMIT], ids=str)
def test_what_comes_late_reaches_no_later_transaction(world: World, api: ApiKey) -> None:
    """KAFKA-17754: its answer was given up, and it arrives when the next one is open."""
    late: list[Call] = []

    def delay(_cluster: Cluster, call: Call, now: float) -> None:
        late.append(call)
        call.complete(None, ConnectionLostError("gone"), now)

    world.begin()
    world.send(b"a")
    world.fate(api, delay)
    world.offsets(5)
    world.end(commit=True).result()
    world.begin()
    world.send(b"b")
    world.offsets(9)
    world.run()
    world.cluster.serve(late[0])
    assert world.visible() == [b"a"]
    world.end(commit=True).result()
    assert world.visible() == [b"a", b"b"]
    assert world.cluster.committed == {"g": {TopicPartition("in", 0): 9}}


def test_nobody_begins_while_a_commit_is_open_and_who_asks_again_hears(world: World) -> None:
    world.begin()
    world.send(b"a")
    world.run()
    ending = world.core.end_transaction(commit=True)
    with pytest.raises(UsageError, match="call its `commit` again"):
        world.transactions.check_begin()
    world.run(lambda: ApiKey.END_TXN in world.asked(), lose_after)
    with pytest.raises(UsageError, match="may stand already"):
        world.core.end_transaction(commit=False)
    assert world.core.end_transaction(commit=True) is ending
    world.run(lambda: ending.is_done)
    with pytest.raises(UsageError, match="nobody knows"):
        world.transactions.check_begin()
    ending.result()
    world.begin()


@pytest.mark.parametrize("at", ["open", "produced", "commit", "lost commit"])
def test_a_zombie_is_fenced(world: World, at: str) -> None:
    world.begin()
    world.send(b"a")
    if at != "open":
        world.run()
    if at == "lost commit":
        world.fate(ApiKey.END_TXN, lose_before)
    world.cluster.take_over()
    ending = world.core.end_transaction(commit=True)
    world.run(lambda: ending.is_done)
    with pytest.raises(FencedError) as caught:
        ending.result()
    assert caught.value.advice == "close"
    expected = Outcome.UNKNOWN if at == "lost commit" else Outcome.FAILED
    assert caught.value.outcome is expected
    assert world.visible() == []
    with pytest.raises(FencedError):
        world.send(b"b")
    with pytest.raises(FencedError):
        world.transactions.check_begin()
    epoch = world.cluster.epoch
    world.run()
    assert world.cluster.epoch == epoch, "a zombie fences nobody"


def test_a_transaction_that_took_too_long_is_to_be_done_again(world: World) -> None:
    world.begin()
    world.send(b"a")
    world.run()
    world.cluster.time_out()
    ending = world.core.end_transaction(commit=True)
    world.run(lambda: ending.is_done)
    with pytest.raises(MustAbortError) as caught:
        ending.result()
    assert caught.value.outcome is Outcome.FAILED
    world.end(commit=False).result()
    world.begin()
    world.send(b"a")
    world.end(commit=True).result()
    assert world.visible() == [b"a"]


def test_a_record_that_fails_dooms_the_transaction(world: World) -> None:
    world.begin()
    good = world.send(b"a", 1)
    world.run()
    world.refuse(ApiKey.PRODUCE, ErrorCode.INVALID_RECORD)
    bad = world.send(b"b", 0)
    world.run()
    assert good.outcome is Outcome.OK
    assert isinstance(bad.error, BrokerError)
    with pytest.raises(MustAbortError, match="INVALID_RECORD"):
        world.core.end_transaction(commit=True)
    world.end(commit=False).result()
    assert world.core.untold.take() is None, "the transaction has told it"
    world.begin()
    world.send(b"c", 1)
    world.end(commit=True).result()
    assert world.visible(1) == [b"c"]


def test_an_abort_does_not_wait_for_records_and_none_of_them_comes_later(world: World) -> None:
    world.begin()
    first = world.send(b"a")
    world.run(lambda: any(call.api == ApiKey.PRODUCE for call in world.calls))
    late = world.calls.popleft()
    second = world.send(b"b")
    world.end(commit=False).result()
    assert first.outcome is second.outcome is Outcome.FAILED
    world.begin()
    served(world.cluster, late, world.now)  # it was long on its way
    world.send(b"c")
    world.end(commit=True).result()
    assert world.visible() == [b"c"]


def test_the_transaction_before_is_waited_for(world: World) -> None:
    world.begin()
    api = ApiKey.ADD_PARTITIONS_TO_TXN if both(world) == 1 else ApiKey.PRODUCE
    world.refuse(api, *[ErrorCode.CONCURRENT_TRANSACTIONS] * 3)
    receipt = world.send(b"a")
    world.end(commit=True).result()
    assert receipt.outcome is Outcome.OK
    assert world.now < 200
    assert world.visible() == [b"a"]


def test_a_coordinator_that_moved_is_looked_up(world: World) -> None:
    world.begin()
    world.send(b"a")
    world.run()
    before = world.asked().count(ApiKey.FIND_COORDINATOR)
    world.refuse(ApiKey.END_TXN, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    world.end(commit=True).result()
    assert world.asked().count(ApiKey.FIND_COORDINATOR) == before + 1
    assert world.visible() == [b"a"]


@pytest.mark.parametrize(
    "code",
    [ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ErrorCode.INVALID_TRANSACTION_TIMEOUT],
)
def test_a_producer_that_may_not_is_over(world: World, code: ErrorCode) -> None:
    world.refuse(ApiKey.INIT_PRODUCER_ID, code)
    world.run(lambda: world.transactions.is_ready)
    with pytest.raises(TransactionError, match=code.name) as caught:
        world.transactions.check_begin()
    assert caught.value.advice == "close"


def test_what_needs_a_transaction_needs_one(world: World) -> None:
    with pytest.raises(UsageError, match="no transaction is open"):
        world.send(b"a")
    world.begin()
    with pytest.raises(UsageError, match="commit or abort it first"):
        world.transactions.check_begin()
    world.end(commit=True).result()
    with pytest.raises(UsageError, match="no transaction is open"):
        world.core.end_transaction(commit=False)


def test_a_detached_transaction_is_left_alone(world: World) -> None:
    world.begin()
    world.send(b"a")
    world.run()
    handle, left = world.transactions.detach(world.now)
    assert TransactionHandle.from_json(handle.to_json()) == handle
    assert (handle.producer_epoch, handle.is_empty) == (world.cluster.epoch, False)
    assert 0 < left <= 60_000
    assert world.transactions.state is State.DETACHED
    assert not world.core.abort_open()
    with pytest.raises(UsageError, match="another process"):
        world.transactions.check_begin()
    with pytest.raises(UsageError):
        world.send(b"b")
    world.run()
    assert world.cluster.state == "ongoing"
    with pytest.raises(UsageError, match="no handle"):
        TransactionHandle.from_json("{}")


@pytest.mark.parametrize("protocol", [1, 2])
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32), trouble=st.sampled_from([0.1, 0.3, 0.5]))
def test_whatever_is_lost_no_commit_is_guessed(protocol: int, seed: int, trouble: float) -> None:
    draw = random.Random(seed)
    world = World(protocol)

    def fate(cluster: Cluster, call: Call, now: float) -> None:
        if draw.random() > trouble:
            served(cluster, call, now)
        elif call.api != ApiKey.PRODUCE and draw.random() < 0.3:
            code = draw.choice([ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS])
            cluster.refusals.setdefault(ApiKey(call.api), deque()).append(code)
            served(cluster, call, now)
        else:
            draw.choice([lose_before, lose_after])(cluster, call, now)

    expected: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
    position = 0
    for number in range(6):
        world.run(lambda: world.transactions.is_ready, fate)
        world.transactions.check_begin()
        world.transactions.begin(world.now)
        sent: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        wants_commit = draw.random() < 0.7
        try:
            for item in range(draw.randrange(6)):
                partition = draw.randrange(PARTITIONS)
                value = b"%d.%d" % (number, item)
                world.send(value, partition)
                sent[partition].append(value)
                world.serve(draw.randrange(3), fate)
            if draw.random() < 0.5:
                world.offsets(number)
            if draw.random() < 0.15:
                world.serve(draw.randrange(4), fate)
                world.cluster.time_out()
            world.end(commit=wants_commit, fate=fate).result()
        except MustAbortError:
            wants_commit = False
            world.end(commit=False, fate=fate).result()
        if wants_commit:
            for have, more in zip(expected, sent, strict=True):
                have += more
            position = world.cluster.committed.get("g", {}).get(TopicPartition("in", 0), 0)
        else:
            committed = world.cluster.committed.get("g", {}).get(TopicPartition("in", 0), 0)
            assert committed == position
        assert [world.visible(p) for p in range(PARTITIONS)] == expected
    assert world.core.pending == 0
    assert world.core.accumulator.size_bytes == 0


def test_errors_say_what_to_do() -> None:
    for kind, advice in ((MustAbortError, "abort"), (FencedError, "close")):
        assert kind("x").advice == advice
        assert issubclass(kind, ClientError)
