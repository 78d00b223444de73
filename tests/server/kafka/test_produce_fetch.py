"""Produce and Fetch through the dispatcher: what clients are told, and when."""

from __future__ import annotations

import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import attrs
import pytest

from raftmq.errors import ErrorCode, NotLeaderError, RemoteProtocolError
from raftmq.log.verification import VerifyJob
from raftmq.partition.partition import Partition
from raftmq.partition.ports import DeleteResult
from raftmq.partition.produce_checks import InlineBudget
from raftmq.partition.settings import PartitionSettings
from raftmq.ports import DiskError, Runnable
from raftmq.promise import Promise
from raftmq.protocol import ApiKey
from raftmq.protocol.fetch import FetchPartitionResponse
from raftmq.protocol.produce import ProducePartitionResponse
from raftmq.records import Marker, NewRecord, build_batch, build_marker, parse_header
from raftmq.server.kafka.handlers.fetch import COLD_ROUNDS_MAX
from raftmq.server.kafka.leader_waits import WAIT_MS
from raftmq.types import (
    METADATA_GROUP,
    METADATA_TOPIC,
    METADATA_TOPIC_ID,
    Offset,
    RaftIndex,
    TopicPartition,
)
from tests.partition.fake_replica import FakeClock, FakeReplica
from tests.server.kafka.world import FakeSlot, World

PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 19)


def batch(count: int = 1, size: int = 10) -> bytearray:
    return build_batch([NewRecord(None, bytes(size))] * count, timestamp=1_000_000)


def only(world: World, version: int, slot: FakeSlot) -> ProducePartitionResponse:
    (topic,) = world.produced(version, slot).topics
    (row,) = topic.partitions
    return row


def fetched(world: World, version: int, slot: FakeSlot) -> FetchPartitionResponse:
    (topic,) = world.fetched(version, slot).topics
    (row,) = topic.partitions
    return row


def key_of(version: int, by_id_from: int, topic_id: UUID) -> str | UUID:
    return topic_id if version >= by_id_from else "t"


# ---- produce ----


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
def test_produce_is_answered_when_it_is_committed(version: int) -> None:
    world = World()
    key = key_of(version, 13, world.add_topic("t"))
    slot = world.produce(version, [(key, 0, batch(3))])
    assert slot.pieces is None
    world.replica("t").commit(3)
    row = only(world, version, slot)
    assert (row.error_code, row.base_offset, row.log_append_time) == (0, 0, -1)


def test_produce_to_several_partitions_is_answered_once() -> None:
    world = World()
    world.add_topic("a", 2)
    rows = [("a", 0, batch()), ("a", 1, batch()), ("b", 0, batch())]
    slot = world.produce(9, rows)  # type: ignore[arg-type]
    world.replica("a", 1).commit(1)
    assert slot.pieces is None
    world.replica("a", 0).commit(1)
    codes = [row.error_code for topic in world.produced(9, slot).topics for row in topic.partitions]
    assert codes == [0, 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION]


def test_acks_0_has_no_answer() -> None:
    world = World()
    world.add_topic("t")
    assert world.produce(9, [("t", 0, batch())], acks=0).pieces == ()
    assert world.replica("t").log_end_offset == 1
    with pytest.raises(RemoteProtocolError):
        world.produce(9, [("unknown", 0, batch())], acks=0)
    world.replica("t").follow(None)
    with pytest.raises(RemoteProtocolError, match="acks=0 failed"):
        world.produce(9, [("t", 0, batch())], acks=0)  # waits for no leader: it has no answer


class OtherThread:
    """Workers that work when told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []
        self.inline = InlineBudget(FakeClock())

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))

    def work(self) -> None:
        job, done = self.jobs.pop(0)
        job.run()
        done(None)


def test_acks_0_to_a_topic_with_its_own_compression_has_no_answer_either() -> None:
    world = World()
    world.add_topic("t", **{"compression.type": "gzip"})
    partition, workers = world.partition("t"), OtherThread()
    partition._opening._workers = workers
    slot = world.produce(9, [("t", 0, batch(size=5_000))], acks=0)
    assert slot.pieces is None
    workers.work()
    assert slot.pieces == ()
    assert world.replica("t").log_end_offset == 1
    refused = world.produce(9, [("t", 0, batch(size=5_000))], acks=0)
    assert refused.pieces is None
    world.replica("t").follow(None)
    workers.work()
    assert refused.is_failed, "a closed connection is the only way to say so"


@pytest.mark.parametrize(
    ("acks", "transactional_id", "error"),
    [
        (2, None, ErrorCode.INVALID_REQUIRED_ACKS),
        (-1, "x", ErrorCode.INVALID_TXN_STATE),
    ],
)
def test_refused_produces(acks: int, transactional_id: str | None, error: ErrorCode) -> None:
    world = World()
    world.add_topic("t")
    slot = world.produce(9, [("t", 0, batch())], acks=acks, transactional_id=transactional_id)
    assert only(world, 9, slot).error_code == error
    assert world.replica("t").log_end_offset == 0


def test_old_versions_are_refused_politely() -> None:
    """Announced from v0 so that librdkafka compresses, served from v3 (KAFKA-18659)."""
    world = World()
    world.add_topic("t")
    body = struct.pack(">hii", 1, 1000, 1) + b"\0\1t" + struct.pack(">iiii", 1, 0, 3, 0)[:-1]
    slot = world.begin(ApiKey.PRODUCE, 2, body)
    assert struct.pack(">h", ErrorCode.UNSUPPORTED_VERSION) in slot.data


def test_a_moved_leader_is_named() -> None:
    world = World()
    topic_id = world.add_topic("t")
    world.replica("t").follow()
    world.lead(topic_id, 0, 2, 6)
    response = world.produced(10, world.produce(10, [("t", 0, batch())]))
    row = response.topics[0].partitions[0]
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert row.current_leader is not None
    assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == (2, 6)
    assert [(node.node_id, node.host) for node in response.node_endpoints] == [(2, "host2")]


@pytest.mark.parametrize("api", ["produce", "fetch"])
def test_a_node_that_does_not_lead_never_names_itself(api: str) -> None:
    world = World()
    world.add_topic("t")
    world.replica("t").follow(None)
    if api == "produce":
        slot = world.produce(10, [("t", 0, batch())])
        world.bench.sleep(WAIT_MS)
        row: Any = world.produced(10, slot).topics[0].partitions[0]
    else:
        slot = world.fetch(12, [("t", 0, 0)])
        world.bench.sleep(WAIT_MS)
        row = world.fetched(12, slot).topics[0].partitions[0]
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert row.current_leader is None


def test_a_producer_learns_who_leads_as_soon_as_that_is_known() -> None:
    world = World()
    topic_id = world.add_topic("t")
    before = world.produce(10, [("t", 0, batch())])
    world.replica("t").is_handing_over = True
    world.replica("t").follow(None)
    after = world.produce(10, [("t", 0, batch())])
    assert before.pieces is None, "told the old leader once more it would wait for its own timer"
    assert after.pieces is None
    world.lead(topic_id, 0, 2, 6)
    for slot in (before, after):
        row = world.produced(10, slot).topics[0].partitions[0]
        assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert row.current_leader is not None
        assert row.current_leader.leader_id == 2


@pytest.mark.parametrize(
    ("version", "key", "index", "error"),
    [
        (9, "unknown", 0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (9, "t", 7, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (13, UUID(int=1234), 0, ErrorCode.UNKNOWN_TOPIC_ID),
        (13, UUID(int=0), 0, ErrorCode.UNKNOWN_TOPIC_ID),
    ],
)
def test_unknown_partitions(version: int, key: str | UUID, index: int, error: ErrorCode) -> None:
    world = World()
    world.add_topic("t")
    assert only(world, version, world.produce(version, [(key, index, batch())])).error_code == error
    assert fetched(world, version, world.fetch(version, [(key, index, 0)])).error_code == error


# ---- fetch ----


def filled(count: int = 3, commit: int | None = None) -> tuple[World, UUID]:
    world = World()
    topic_id = world.add_topic("t")
    for _ in range(count):
        world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(count if commit is None else commit)
    return world, topic_id


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_fetch_gives_stored_batches(version: int) -> None:
    world, topic_id = filled(3, 2)
    key = key_of(version, 13, topic_id)
    row = fetched(world, version, world.fetch(version, [(key, 0, 0)]))
    assert (row.error_code, row.high_watermark, row.last_stable_offset) == (0, 2, 2)
    stored = b"".join(data for _, data in world.replica("t").log.batches[:2])
    assert row.records is not None
    assert b"".join(bytes(piece) for piece in row.records) == stored


def test_fetch_waits_for_the_high_watermark() -> None:
    world, _ = filled()
    slot = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    world.produce(9, [("t", 0, batch())], acks=1)
    assert slot.pieces is None
    assert world.broker.metrics.parked_fetches == 1
    world.replica("t").commit(4)
    assert fetched(world, 12, slot).high_watermark == 4
    assert world.broker.metrics.parked_fetches == 0
    assert len(world.partition("t").fetches) == 0
    assert world.connection.on_close == {}


def test_fetch_waits_no_longer_than_told() -> None:
    world, _ = filled()
    slot = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    world.bench.sleep(499)
    assert slot.pieces is None
    world.bench.sleep(2)
    assert fetched(world, 12, slot).error_code == 0
    assert len(world.partition("t").fetches) == 0


def test_no_more_fetches_wait_than_may() -> None:
    world, _ = filled()
    world.broker.config = attrs.evolve(world.broker.config, parked_fetches_max=2)
    slots = [world.fetch(12, [("t", 0, 3)], max_wait_ms=500) for _ in range(3)]
    assert [slot.pieces is None for slot in slots] == [True, True, False]
    assert not fetched(world, 12, slots[2]).records
    world.bench.sleep(521)
    assert fetched(world, 12, slots[0]).error_code == ErrorCode.NONE
    assert world.fetch(12, [("t", 0, 3)], max_wait_ms=500).pieces is None


def test_a_poller_may_repeat_itself() -> None:
    world, _ = filled()
    first = world.fetch(12, [("t", 0, 3)], max_wait_ms=0, session_epoch=-1)
    again = world.fetch(12, [("t", 0, 3)], max_wait_ms=0, session_epoch=-1)
    assert world.body(ApiKey.FETCH, 12, first) == world.body(ApiKey.FETCH, 12, again)
    assert fetched(world, 12, world.fetch(12, [("t", 0, 0)], session_epoch=-1)).records


def test_min_bytes_are_counted_over_partitions() -> None:
    world = World()
    world.add_topic("t", 2)
    size = len(batch())
    slot = world.fetch(
        12, [("t", 0, 0), ("t", 1, 0)], max_wait_ms=500, min_bytes=3 * size, session_epoch=-1
    )
    for index, end in ((0, 1), (1, 1), (0, 2)):
        assert slot.pieces is None
        world.produce(9, [("t", index, batch())], acks=1)
        world.replica("t", index).commit(end)
    (topic,) = world.fetched(12, slot).topics
    assert [len(bytes(row.records[0])) for row in topic.partitions if row.records] == [
        2 * size,
        size,
    ]


def test_a_hang_up_unparks() -> None:
    world, _ = filled()
    world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    (abandon,) = world.connection.on_close.values()
    abandon()
    assert len(world.partition("t").fetches) == 0
    assert world.broker.metrics.parked_fetches == 0
    assert len(world.bench.deadlines) == 0


def test_lost_leadership_ends_the_wait() -> None:
    world, topic_id = filled()
    slot = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    world.lead(topic_id, 0, 3, 6)
    world.replica("t").follow(None)
    row = fetched(world, 12, slot)
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert row.current_leader is not None
    assert row.current_leader.leader_id == 3


@pytest.mark.parametrize(
    ("version", "error"), [(10, ErrorCode.NOT_LEADER_OR_FOLLOWER), (11, ErrorCode.NONE)]
)
def test_followers_serve_clients_that_know_of_it(version: int, error: ErrorCode) -> None:
    world, topic_id = filled()
    world.replica("t").follow()
    world.lead(topic_id, 0, 2, 6)
    row = fetched(world, version, world.fetch(version, [("t", 0, 0)]))
    assert row.error_code == error


def test_a_fetch_learns_who_leads_as_soon_as_that_is_known() -> None:
    world, topic_id = filled()
    parked = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    world.replica("t").follow(None)
    late = world.fetch(10, [("t", 0, 0)])
    assert parked.pieces is None, "nobody leads yet: a client would back off"
    assert late.pieces is None
    world.lead(topic_id, 0, 3, 6)
    row = fetched(world, 12, parked)
    assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert row.current_leader is not None
    assert row.current_leader.leader_id == 3
    assert fetched(world, 10, late).error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER


@pytest.mark.parametrize("is_leader", [True, False])
def test_an_offset_is_out_of_range_only_for_who_is_known_to_lead(is_leader: bool) -> None:
    """A leader that was replaced and does not know lacks what its successor has."""
    world, _ = filled()
    barrier = world.replica("t").barrier = Promise()
    slot = world.fetch(12, [("t", 0, 9)])
    assert slot.pieces is None
    if is_leader:
        barrier.resolve(RaftIndex(1))
        assert fetched(world, 12, slot).error_code == ErrorCode.OFFSET_OUT_OF_RANGE
    else:
        barrier.fail(NotLeaderError())
        row = fetched(world, 12, slot)
        assert row.error_code == ErrorCode.NOT_LEADER_OR_FOLLOWER
        assert row.current_leader is not None


def test_what_lies_before_the_log_is_out_of_range_at_once() -> None:
    """The start of a log is committed: nobody has what came before it."""
    world, _ = filled()
    world.replica("t").barrier = Promise()
    row = fetched(world, 12, world.fetch(12, [("t", 0, -3)]))
    assert row.error_code == ErrorCode.OFFSET_OUT_OF_RANGE


def test_a_client_may_leave_before_that_is_known() -> None:
    world, _ = filled()
    barrier = world.replica("t").barrier = Promise()
    world.fetch(12, [("t", 0, 9)])
    (abandon,) = world.connection.on_close.values()
    abandon()
    barrier.fail(NotLeaderError())
    assert world.broker.metrics.parked_fetches == 0


def test_a_client_that_hangs_up_waits_for_no_leader() -> None:
    world, topic_id = filled()
    world.replica("t").follow(None)
    world.fetch(10, [("t", 0, 0)])
    (abandon,) = world.connection.on_close.values()
    abandon()
    world.lead(topic_id, 0, 3, 6)
    assert world.broker.metrics.parked_fetches == 0


def test_a_node_that_leaves_answers_parked_fetches() -> None:
    world, _ = filled()
    parked = world.fetch(12, [("t", 0, 3)], max_wait_ms=500)
    world.partition("t").stop_waiting()
    row = fetched(world, 12, parked)
    assert row.error_code == ErrorCode.NONE
    assert not row.records


def test_the_closest_replica_is_named() -> None:
    world, _ = filled()
    near = fetched(world, 11, world.fetch(11, [("t", 0, 0)], rack_id="rack2"))
    assert (near.preferred_read_replica, list(near.records or ())) == (2, [])
    for rack in ("rack1", "elsewhere", ""):
        row = fetched(world, 11, world.fetch(11, [("t", 0, 0)], rack_id=rack))
        assert row.preferred_read_replica == -1
        assert row.records


def test_nobody_poses_as_a_replica() -> None:
    world, _ = filled()
    slot = world.fetch(12, [("t", 0, 0)], replica_id=2)
    assert world.fetched(12, slot).error_code == ErrorCode.INVALID_REQUEST


def test_max_bytes_bound_the_answer_but_not_its_first_batch() -> None:
    world, _ = filled()
    size = len(batch())
    one = fetched(world, 12, world.fetch(12, [("t", 0, 0)], max_bytes=1))
    assert [len(bytes(piece)) for piece in one.records or ()] == [size]
    two = fetched(world, 12, world.fetch(12, [("t", 0, 0)], max_bytes=2 * size + 1))
    assert [len(bytes(piece)) for piece in two.records or ()] == [2 * size]


def test_a_session_over_the_wire() -> None:
    world, _ = filled()
    full = world.fetched(12, world.fetch(12, [("t", 0, 3)], max_wait_ms=0, session_epoch=0))
    assert full.session_id
    again = {"session_id": full.session_id, "max_wait_ms": 0}
    assert world.fetched(12, world.fetch(12, [], session_epoch=1, **again)).topics == []
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(4)
    news = world.fetched(12, world.fetch(12, [], session_epoch=2, **again))
    assert [row.partition for topic in news.topics for row in topic.partitions] == [0]
    stale = world.fetched(12, world.fetch(12, [], session_epoch=2, **again))
    assert stale.error_code == ErrorCode.INVALID_FETCH_SESSION_EPOCH


# ---- readers of committed records ----


def transactional(world: World, sequence: int) -> None:
    """A batch of a transaction gets into the log."""
    data = build_batch(
        [NewRecord(None, b"t")],
        producer_id=7,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )
    world.replica("t").append(data, parse_header(data))


def aborted(world: World) -> None:
    data = build_marker(Marker(is_commit=False), producer_id=7, producer_epoch=0, timestamp=1)
    world.replica("t").append(data, parse_header(data))


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_committed_records_wait_for_the_end_of_a_transaction(version: int) -> None:
    world = World()
    key = key_of(version, 13, world.add_topic("t"))
    transactional(world, 0)
    world.replica("t").commit(1)
    rows = [(key, 0, 0)]
    now = fetched(world, version, world.fetch(version, rows, isolation_level=1, max_wait_ms=0))
    assert (now.high_watermark, now.last_stable_offset) == (1, 0)
    assert not now.records
    other = fetched(world, version, world.fetch(version, rows, max_wait_ms=0))
    assert (other.high_watermark, other.last_stable_offset) == (1, 0)
    assert (len(other.records or ()), other.aborted_transactions) == (1, None)
    parked = world.fetch(version, rows, isolation_level=1, max_wait_ms=500)
    aborted(world)
    assert parked.pieces is None
    world.replica("t").commit(2)
    row = fetched(world, version, parked)
    assert (row.high_watermark, row.last_stable_offset) == (2, 2)
    assert [(a.producer_id, a.first_offset) for a in row.aborted_transactions or ()] == [(7, 0)]
    assert row.records


def test_committed_records_are_not_looked_for_at_each_append(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    world.add_topic("t")
    transactional(world, 0)
    world.replica("t").commit(1)
    parked = world.fetch(12, [("t", 0, 0)], isolation_level=1, max_wait_ms=500)
    reads = 0
    read = Partition.read

    def counting(partition: Partition, *args: Any, **kwargs: Any) -> Any:
        nonlocal reads
        reads += 1
        return read(partition, *args, **kwargs)

    monkeypatch.setattr(Partition, "read", counting)
    for number in range(2, 12):
        world.produce(9, [("t", 0, batch())], acks=1)
        world.replica("t").commit(number)
    assert (parked.pieces, reads) == (None, 0)
    world.bench.sleep(501)
    row = fetched(world, 12, parked)
    assert (row.high_watermark, row.last_stable_offset, reads) == (11, 0, 1)


def test_a_reader_at_the_last_stable_offset_stays_with_the_leader() -> None:
    world, _ = filled()
    transactional(world, 0)
    world.produce(9, [("t", 0, batch())], acks=1)
    world.replica("t").commit(5)
    far: dict[str, Any] = {"rack_id": "rack2", "isolation_level": 1, "max_wait_ms": 0}
    assert fetched(world, 11, world.fetch(11, [("t", 0, 0)], **far)).preferred_read_replica == 2
    at_end = fetched(world, 11, world.fetch(11, [("t", 0, 3)], **far))
    assert at_end.preferred_read_replica == -1


# ---- cold bytes ----


class FakeJob:
    """A check that a test runs by hand."""

    def __init__(self) -> None:
        self.is_run = False

    def run(self) -> None:
        self.is_run = True


class FakeCheck(FakeJob, VerifyJob):
    """A check of bytes among these."""


def cold(world: World) -> tuple[FakeJob, list[Promise[Any]]]:
    """The partition's bytes need a check; workers start when the test says so."""
    job = FakeCheck()
    started: list[Promise[Any]] = []

    def submit(work: Callable[[], Any]) -> Promise[Any]:
        work()
        started.append(Promise())
        return started[-1]

    world.broker.workers = SimpleNamespace(submit=submit)  # type: ignore[assignment]
    world.partition("t")._opened_end = Offset(1 << 40)
    log = world.replica("t").log
    log.job = job
    return job, started


def test_cold_bytes_are_checked_by_a_worker_first() -> None:
    world, _ = filled()
    job, started = cold(world)
    slot = world.fetch(12, [("t", 0, 0)], max_wait_ms=500)
    assert (job.is_run, slot.pieces, world.replica("t").log.checks) == (True, None, 0)
    started[0].resolve(None)
    assert world.replica("t").log.checks == 1
    assert fetched(world, 12, slot).records


def test_what_is_not_in_memory_is_read_by_a_worker_round_by_round() -> None:
    world, _ = filled()
    check, started = cold(world)
    index, data = FakeJob(), FakeJob()
    log = world.replica("t").log
    log.cold_jobs = [index, data]
    slot = world.fetch(12, [("t", 0, 0)], max_wait_ms=500)
    for number, job in enumerate((index, data, check)):
        assert job.is_run
        assert slot.pieces is None
        started[number].resolve(None)
    assert fetched(world, 12, slot).records
    assert (log.checks, len(started)) == (1, 3)


def test_memory_so_short_that_bytes_leave_at_once_starves_nobody() -> None:
    world, _ = filled()
    _, started = cold(world)
    log = world.replica("t").log
    log.cold_jobs = [FakeJob() for _ in range(100)]
    slot = world.fetch(12, [("t", 0, 0)], max_wait_ms=500)
    for _ in range(COLD_ROUNDS_MAX):
        assert slot.pieces is None
        started[-1].resolve(None)
    assert fetched(world, 12, slot).records


def test_a_client_may_leave_while_its_bytes_are_checked() -> None:
    world, _ = filled()
    _, started = cold(world)
    world.fetch(12, [("t", 0, 0)], max_wait_ms=500)
    (abandon,) = world.connection.on_close.values()
    abandon()
    started[0].fail(DiskError("the disk failed"))
    assert world.broker.metrics.parked_fetches == 0


def test_cold_bytes_may_turn_out_too_few() -> None:
    world, _ = filled()
    _, started = cold(world)
    slot = world.fetch(12, [("t", 0, 0)], max_wait_ms=500, min_bytes=1 << 20)
    started[0].resolve(None)
    assert slot.pieces is None
    assert world.broker.metrics.parked_fetches == 1
    world.bench.sleep(501)
    assert fetched(world, 12, slot).records


# ---- the metadata log ----


def test_the_metadata_log_is_read_and_never_written() -> None:
    world = World()
    log = Partition(
        TopicPartition(METADATA_TOPIC, 0),
        METADATA_GROUP,
        world.broker.node_id,
        settings=PartitionSettings(),
        deadlines=world.bench.deadlines,
        clock=world.bench.clock,
        on_broken_invariant=pytest.fail,
        is_internal=True,
    )
    replica = FakeReplica(log)
    log.attach(replica)
    world.registry.add_internal(log)
    replica.append(batch(2), parse_header(batch(2)))
    replica.commit(2)
    assert fetched(world, 12, world.fetch(12, [(METADATA_TOPIC, 0, 0)])).high_watermark == 2
    by_id = world.fetch(13, [(METADATA_TOPIC_ID, 0, 0)])
    assert fetched(world, 13, by_id).records
    refused = only(world, 9, world.produce(9, [(METADATA_TOPIC, 0, batch())]))
    assert refused.error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert log.delete_records(1, 10) == DeleteResult(ErrorCode.INVALID_TOPIC_EXCEPTION)
    assert list(world.registry) == []
