"""Producer checkpoints: fewer headers read, never another answer; a cache that may be lost."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from time import thread_time
from typing import Any

import pytest
from attrs import define, field

from jepsen_like.disk import CrashOdds, SimDisk
from raftmq.errors import ErrorCode, KafkaError
from raftmq.log.log_start import LogStart
from raftmq.log.model import DamagedError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.partition.producer_state import (
    BYTES_MAX,
    FILE_NAME,
    PIECE_BYTES,
    PRODUCERS_KEPT,
    TURN_LOOKED_AT,
    Accept,
    Duplicate,
    ProducerCheckpoints,
    ProducerStateTable,
)
from raftmq.partition.producers import (
    CHECKPOINT_BATCHES,
    COPY_BATCHES,
    TURNS,
    BehindRefusedError,
    PartitionProducers,
)
from raftmq.ports import DiskError, DiskFullError, TooManyFilesError
from raftmq.records import (
    TRANSACTIONAL,
    BatchHeader,
    Marker,
    NewRecord,
    build_batch,
    parse_header,
)
from raftmq.types import LeaderEpoch, Offset
from tests.log.helpers import BIG, elect, flush, open_log, segment, sim_disk
from tests.partition.fake_replica import FakeAborted, FakeClock

_TEMPLATE = parse_header(
    build_batch([NewRecord(None, b"")], producer_id=1, producer_epoch=0, base_sequence=0)
)


def header(offset: int) -> BatchHeader:
    return _TEMPLATE._replace(base_offset=offset, producer_id=offset % 3, base_sequence=offset // 3)


@define
class Log:
    """Headers alone; counts how many were read."""

    log_start: LogStart = field(factory=LogStart)
    rows: list[BatchHeader] = field(factory=list)
    reads: int = 0
    checks: int = 0
    fails_in: int = 0
    """So many calls from now one finds no descriptor."""
    aborted: FakeAborted = field(factory=FakeAborted)
    markers: dict[int, Marker] = field(factory=dict)

    def marker(self, offset: Offset) -> Marker:
        return self.markers[offset]

    @property
    def log_end_offset(self) -> Offset:
        return Offset(self.rows[-1].next_offset) if self.rows else Offset(0)

    def headers(self, start: Offset, end: Offset) -> Iterator[BatchHeader]:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise TooManyFilesError("no descriptor is left")
        for row in self.rows[start:end]:
            self.reads += 1
            yield row

    def check_stored(self, offset: Offset) -> None:
        self.checks += 1


def truth(end: int) -> bytes:
    table = ProducerStateTable()
    for offset in range(end):
        table.append(header(offset))
    return table.encode()


def make(disk: SimDisk | None = None) -> ProducerCheckpoints:
    if disk is None:
        return ProducerCheckpoints()
    disk.make_directories("p")
    return ProducerCheckpoints(disk, "p")


def filled(
    disk: SimDisk | None = None, count: int = 2 * CHECKPOINT_BATCHES + 100
) -> tuple[PartitionProducers, Log]:
    log = Log()
    producers = PartitionProducers(make(disk), FakeClock())
    producers.attach(log)
    for offset in range(count):
        log.rows.append(header(offset))
        producers.appended(header(offset))
        if offset % 50 == 49:
            producers.committed(Offset(offset - 20), Offset(offset - 20))
    return producers, log


@pytest.mark.parametrize("offset", [0, 17, CHECKPOINT_BATCHES, 2 * CHECKPOINT_BATCHES + 55])
def test_states_of_the_past_are_exact_and_cheap(offset: int) -> None:
    producers, log = filled()
    assert producers.state_at(Offset(offset)) == truth(offset)
    assert log.reads <= CHECKPOINT_BATCHES


def test_truncation_goes_back_exactly() -> None:
    producers, log = filled()
    end = 2 * CHECKPOINT_BATCHES + 90
    del log.rows[end:]
    producers.truncated()
    assert producers.table.encode() == truth(end)
    assert log.reads <= CHECKPOINT_BATCHES


def test_what_is_not_committed_is_no_checkpoint() -> None:
    log = Log()
    checkpoints = make()
    producers = PartitionProducers(checkpoints, FakeClock())
    producers.attach(log)
    for offset in range(CHECKPOINT_BATCHES + 5):
        log.rows.append(header(offset))
        producers.appended(header(offset))
    assert len(checkpoints) == 0
    del log.rows[CHECKPOINT_BATCHES - 1 :]
    producers.truncated()
    producers.committed(Offset(CHECKPOINT_BATCHES + 5), Offset(CHECKPOINT_BATCHES + 5))
    assert len(checkpoints) == 0, "that future was truncated"


@pytest.mark.parametrize("harm", ["none", "lost", "cut", "flipped", "another version"])
def test_a_restart_reads_little_and_trusts_nothing(harm: str) -> None:
    disk = SimDisk(Random(1))
    _, log = filled(disk)
    path = f"p/{FILE_NAME}"
    if harm == "lost":
        disk.remove(path)
    elif harm != "none":
        file = disk.open(path)
        if harm == "cut":
            file.truncate(file.size() - 5)
        elif harm == "flipped":
            file.pwrite(b"\xff", 40)
        else:
            file.pwrite(b"\xff\xff", 4)
        file.close()
    again = PartitionProducers(make(disk), FakeClock())
    log.reads = 0
    again.attach(log)
    assert again.current().encode() == truth(len(log.rows))
    least = {"none": 100, "cut": CHECKPOINT_BATCHES + 100}.get(harm, len(log.rows))
    assert log.reads == least


def test_a_log_that_lost_its_end_ignores_later_checkpoints() -> None:
    disk = SimDisk(Random(1))
    _, log = filled(disk)
    del log.rows[CHECKPOINT_BATCHES + 7 :]
    again = PartitionProducers(make(disk), FakeClock())
    again.attach(log)
    assert again.current().encode() == truth(CHECKPOINT_BATCHES + 7)


def test_checkpoints_below_the_log_start_go() -> None:
    disk = SimDisk(Random(1))
    producers, log = filled(disk)
    start = CHECKPOINT_BATCHES + 10
    log.log_start = LogStart(offset=Offset(start), index=start, state=truth(start))  # type: ignore[arg-type]
    assert producers.state_at(Offset(start)) == truth(start)
    again = PartitionProducers(make(disk), FakeClock())
    again.attach(log)
    assert again.current().encode() == truth(len(log.rows))


def test_checkpoints_are_bounded_and_survive_thinning() -> None:
    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    size = BYTES_MAX // 10
    for i in range(1, 41):
        checkpoints.add(Offset(i), bytes([i]) * size)
    checkpoints.add(Offset(3), b"late")
    again = make(disk)
    again.load()
    assert len(again) == len(checkpoints) <= 11
    assert again.best(Offset(99), Offset(0)) == (40, bytes([40]) * size)
    assert again.best(Offset(99), Offset(41)) is None
    low = again.best(Offset(20), Offset(0))
    assert low is None or low[0] <= 20


def test_a_large_checkpoint_is_written_in_pieces() -> None:
    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    states = [bytes([number]) * size for number, size in enumerate((100, 3 * PIECE_BYTES, 50), 1)]
    kept: list[int] = []
    for number, state in enumerate(states, 1):
        written = disk.counters.bytes_written
        checkpoints.add(Offset(number), state)
        assert disk.counters.bytes_written - written <= PIECE_BYTES
        again = make(disk)
        again.load()
        kept.append(len(again))
    assert kept == [1, 1, 1], "the second one is not there as a whole"
    for _ in range(3):
        written = disk.counters.bytes_written
        checkpoints.write_on()
        assert disk.counters.bytes_written - written <= PIECE_BYTES
    again = make(disk)
    again.load()
    assert again.best(Offset(9), Offset(0)) == (3, states[2])
    assert len(again) == 3


def test_a_piece_that_finds_no_room_is_the_last() -> None:
    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    checkpoints.add(Offset(1), b"x" * 3 * PIECE_BYTES)
    disk.capacity_bytes = disk.used_bytes()
    checkpoints.write_on()
    disk.capacity_bytes = None
    writes = disk.counters.writes
    checkpoints.write_on()
    assert disk.counters.writes == writes
    checkpoints.add(Offset(2), b"y")
    while disk.counters.writes > writes:
        writes = disk.counters.writes
        checkpoints.write_on()
    again = make(disk)
    again.load()
    assert len(again) == 2, "written anew"


def test_a_full_disk_is_no_reason_to_stop() -> None:
    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    disk.capacity_bytes = 0
    checkpoints.add(Offset(1), b"x" * 100)
    assert checkpoints.best(Offset(5), Offset(0)) == (1, b"x" * 100)


def produced(offset: int, producer_id: int, sequence: int) -> bytes:
    return bytes(
        build_batch(
            [NewRecord(None, b"v" * 40)],
            base_offset=offset,
            leader_epoch=1,
            producer_id=producer_id,
            producer_epoch=3,
            base_sequence=sequence,
        )
    )


def twenty_batches() -> tuple[SimDisk, ReplicatedLog, list[bytes], PartitionProducers]:
    """Of two producers, in a log that is closed, and what is known of them."""
    disk = sim_disk()
    log = open_log(disk, BIG)
    elect(log, 1)
    batches = [produced(n, 40 + n % 2, n // 2) for n in range(20)]
    for batch in batches:
        log.append_batch(batch)
    flush(log)
    log.close()
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    return disk, log, batches, producers


@pytest.mark.parametrize("number", [0, 1, 8, 18, 19])
@pytest.mark.parametrize(
    ("byte", "bit"),
    [
        pytest.param(22, 4, id="transactional"),
        pytest.param(37, 0, id="far from now"),
        pytest.param(50, 7, id="id"),
        pytest.param(43, 7, id="no id"),
        (52, 7),
        (56, 7),
    ],
)
def test_what_a_header_says_of_a_producer_is_not_believed_unchecked(
    number: int, byte: int, bit: int
) -> None:
    """Replay reads headers alone; a flipped bit there makes another producer, epoch or sequence, a
    transaction that nobody ends, or a time at which all others have been idle for long."""
    disk, log, batches, before = twenty_batches()
    disk.flip(segment(), number * len(batches[0]) + byte, bit)
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.damaged == [], "its indexes vouch for a closed segment"
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    with pytest.raises(DamagedError):
        producers.current()
    assert log.damaged == [(number, number + 1)]
    log.repair(Offset(number), [batches[number]])
    assert producers.current().encode() == before.current().encode()


def test_the_first_batch_of_a_transaction_is_not_taken_for_another() -> None:
    """Readers of committed records would be given it, though the transaction was aborted."""
    table = ProducerStateTable()
    table.append(parse_header(produced(0, 40, 0))._replace(attributes=TRANSACTIONAL))
    table.end(header(1)._replace(producer_id=40, producer_epoch=3, attributes=0x30))
    begins = parse_header(produced(2, 40, 1))._replace(attributes=TRANSACTIONAL)
    known = ProducerStateTable.decode(table.encode())
    for each in (table, known):
        assert not each.expects(begins._replace(attributes=0))
    assert table.expects(begins)
    assert not known.expects(begins), "the encoded state does not say how it wrote"
    known.append(begins)
    assert known.expects(begins._replace(base_offset=3, base_sequence=2))


@pytest.mark.parametrize("number", [2, 7, 19])
def test_what_was_read_off_a_damaged_batch_is_read_again(number: int) -> None:
    """The timestamp of a header was a little off: nothing is surprising about that, but replicas
    knew different producers after the damage had been found and repaired."""
    disk, log, batches, sound = twenty_batches()
    disk.flip(segment(), number * len(batches[0]) + 42, 3)
    log = open_log(disk, BIG, claimed=log.flushed_end)
    producers = PartitionProducers(make(disk), FakeClock())
    producers.attach(log)
    assert producers.current().encode() != sound.current().encode()
    state = producers.table.encode()
    producers._checkpoints.add(Offset(20), state)
    log.scrub(1 << 20)
    assert log.damaged == [(number, number + 1)]
    producers.doubt(Offset(number))
    with pytest.raises(DamagedError):
        producers.work_on()
    log.repair(Offset(number), [batches[number]])
    assert isinstance(producers.judge(parse_header(batches[19]), LeaderEpoch(1)), Duplicate)
    assert producers.table.encode() == state, "in use until the other one is read"
    again = PartitionProducers(make(disk), FakeClock())
    again.attach(log)
    for each in (producers, again):
        while each.work_on():
            pass
        assert each.table.encode() == sound.table.encode()
        assert each.state_at(Offset(20)) == sound.state_at(Offset(20))


def test_a_doubtful_table_goes_on_and_leaves_no_traces() -> None:
    producers, log = filled(count=COPY_BATCHES + 10)
    producers.table._greatest_timestamp = 77
    producers.doubt(Offset(5))
    for offset in range(COPY_BATCHES + 10, 2 * COPY_BATCHES + 10):
        log.rows.append(header(offset))
        producers.appended(header(offset))
    assert producers.table.encode() != truth(2 * COPY_BATCHES + 10), "until it was read again"
    assert producers.state_at(Offset(2 * COPY_BATCHES)) is None, "it takes a while"
    assert producers.state_at(Offset(2 * COPY_BATCHES)) == truth(2 * COPY_BATCHES)
    while producers.work_on():
        pass
    assert producers.table.encode() == truth(2 * COPY_BATCHES + 10)
    log.rows.append(header(2 * COPY_BATCHES + 10))
    producers.appended(log.rows[-1])
    assert producers.table.encode() == truth(2 * COPY_BATCHES + 11)


@pytest.mark.parametrize("is_doubted", [True, False])
def test_what_the_device_failed_to_read_is_read_once_more(is_doubted: bool) -> None:
    producers, log = filled(count=3 * COPY_BATCHES - 1)
    log.fails_in = 3
    if is_doubted:
        producers.doubt(Offset(5))
        with pytest.raises(DiskError):
            work_to_the_end(producers)
    else:
        log.rows.pop()
        with pytest.raises(DiskError):
            producers.truncated()
    work_to_the_end(producers)
    assert producers.table.encode() == truth(len(log.rows))


def work_to_the_end(producers: PartitionProducers) -> None:
    while producers.work_on():
        pass


def test_a_turn_reads_no_more_than_a_mebibyte_to_check_it() -> None:
    log = Log()
    for offset in range(100):  # each the first of its producer
        log.rows.append(header(offset)._replace(producer_id=offset, batch_length=256 << 10))
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    assert log.checks <= TURNS * 4
    work_to_the_end(producers)
    assert (log.checks, len(producers.table)) == (100, 100)


def test_checkpoints_that_are_doubted_do_not_come_back() -> None:
    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    for offset in (10, 20, 30):
        checkpoints.add(Offset(offset), b"x" * offset)
    checkpoints.drop_above(Offset(10))
    assert checkpoints.best(Offset(99), Offset(0)) == (10, b"x" * 10)
    disk.crash(Random(1))
    again = make(disk)
    again.load()
    assert len(again) == 0
    checkpoints.add(Offset(25), b"y")
    again.load()
    assert again.best(Offset(99), Offset(0)) == (25, b"y")
    assert len(again) == 2


@pytest.mark.parametrize("failing", ["remove", "sync_directory"])
def test_what_could_not_be_dropped_is_dropped_at_the_next_try(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_disk: SimDisk, path: str) -> None:
        raise DiskFullError(f"no space left: {path}")

    disk = SimDisk(Random(1))
    checkpoints = make(disk)
    for offset in (10, 20):
        checkpoints.add(Offset(offset), b"x" * offset)
    file = disk.open(f"p/{FILE_NAME}")
    file.fdatasync()
    file.close()
    disk.sync_directory("p")
    with monkeypatch.context() as patch:
        patch.setattr(SimDisk, failing, refuse)
        with pytest.raises(DiskError):
            checkpoints.drop_above(Offset(10))
    checkpoints.drop_above(Offset(10))
    assert checkpoints.best(Offset(99), Offset(0)) == (10, b"x" * 10)
    disk.crash(Random(1), CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=1))
    again = make(disk)
    again.load()
    assert len(again) == 0


def test_a_file_that_could_not_be_read_is_dropped_too() -> None:
    disk = SimDisk(Random(1))
    make(disk).add(Offset(20), b"x")
    disk.fail_when(lambda operation, _: operation == "read")
    checkpoints = make(disk)
    checkpoints.load()
    disk.fail_when(None)
    assert len(checkpoints) == 0
    checkpoints.drop_above(Offset(10))
    again = make(disk)
    again.load()
    assert len(again) == 0


def test_a_file_without_anything_to_drop_stays() -> None:
    disk = SimDisk(Random(1))
    make(disk).add(Offset(10), b"x")
    checkpoints = make(disk)
    checkpoints.load()
    checkpoints.drop_above(Offset(10))
    again = make(disk)
    again.load()
    assert again.best(Offset(99), Offset(0)) == (10, b"x")


def test_little_is_checked_of_what_is_as_it_should_be() -> None:
    producers, log = filled(count=300)
    producers.truncated()
    assert log.checks == 3, "the first batch of each producer"


@pytest.fixture
def no_collections() -> Iterator[None]:
    """The collector's time is measured elsewhere, and a node's has other settings."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("no_collections")
def test_a_hundred_thousand_producers_are_checkpointed_and_held_in_short_turns() -> None:
    """Beyond 2,000 producers there was no checkpoint: each truncation read all headers again."""
    count, written = 100_000, 101_500
    disk = SimDisk(Random(1))
    log = Log()
    producers = PartitionProducers(make(disk), FakeClock())
    producers.attach(log)
    watch = Turns()

    def row(offset: int) -> BatchHeader:
        return _TEMPLATE._replace(
            base_offset=offset, producer_id=offset % count, base_sequence=offset // count
        )

    for offset in range(written + 5_000):
        log.rows.append(row(offset))
        watch.run(partial(producers.appended, log.rows[-1]))
        end = Offset(max(0, offset - 20))
        watch.run(partial(producers.committed, end, end))
    log.reads = 0
    del log.rows[-10:]
    watch.run(producers.truncated)
    while not watch.run(producers.read_on):
        pass
    assert len(producers.table) == count
    assert log.reads <= COPY_BATCHES + 30
    end = len(log.rows)
    expected = producers.table.encode()
    log.reads = 0
    while (state := watch.run(partial(producers.state_at, Offset(end - 100)))) is None:
        pass
    assert log.reads <= 2 * COPY_BATCHES
    assert len(ProducerStateTable.decode(state)) == count
    again = PartitionProducers(make(disk), FakeClock())
    log.reads = 0
    watch.run(partial(again.attach, log))
    while not watch.run(again.read_on):
        pass
    assert 0 < log.reads < count // 2, "it began with a checkpoint"
    assert again.table.encode() == expected
    assert watch.longest_ms < 150, "the stall metric's limit is 37 on a machine of its own"


def test_what_takes_long_to_read_back_refuses_and_then_is_exact() -> None:
    log = Log(rows=[header(offset) for offset in range(20_000)])
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    batch = header(20_000)
    with pytest.raises(KafkaError) as refused:
        producers.judge(batch, LeaderEpoch(1))
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert log.reads < 20_000, "not all in one turn"
    while not producers.read_on():
        pass
    verdict = producers.judge(batch, LeaderEpoch(1))
    assert isinstance(verdict, Accept)
    for offset in range(20_000, 20_010):
        log.rows.append(header(offset))
        producers.appended(header(offset))
    assert producers.current().encode() == truth(20_010)


def test_a_truncation_looks_at_many_producers_in_turns() -> None:
    """Nothing is judged before it is known whose batches are gone, and which of them come again."""
    count, per_turn = 20_000, TURN_LOOKED_AT
    log = Log()
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    for offset in range(count):
        log.rows.append(_TEMPLATE._replace(base_offset=offset, producer_id=offset))
        producers.appended(log.rows[-1])
    del log.rows[-10:]
    producers.truncated()
    log.reads = 0
    behind = _TEMPLATE._replace(base_offset=count, producer_id=count - 1, base_sequence=1)
    with pytest.raises(KafkaError) as refused:
        producers.judge(behind, LeaderEpoch(1))  # goes on by as many turns
    assert refused.value.code is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert not isinstance(refused.value, BehindRefusedError)
    turns = 2 * TURNS + 1
    while not producers.read_on(1):
        assert log.reads == 0 or turns * per_turn >= count, "first what is gone"
        turns += 1
    assert turns >= count // per_turn
    with pytest.raises(BehindRefusedError):
        producers.judge(behind, LeaderEpoch(1))
    for producer_id, sequence in ((count - 1, 0), (0, 1)):
        batch = _TEMPLATE._replace(producer_id=producer_id, base_sequence=sequence)
        assert isinstance(producers.judge(batch, LeaderEpoch(1)), Accept)


def test_what_is_gone_is_noted_though_the_log_begins_anew_meanwhile() -> None:
    count = 20_000
    log = Log()
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    for offset in range(count):
        log.rows.append(_TEMPLATE._replace(base_offset=offset, producer_id=offset))
        producers.appended(log.rows[-1])
    del log.rows[-10:]
    producers.truncated()
    log.rows.clear()
    producers.restore(LogStart())
    assert len(producers.current()) == 0
    behind = _TEMPLATE._replace(producer_id=count - 1, base_sequence=1)
    with pytest.raises(BehindRefusedError):
        producers.judge(behind, LeaderEpoch(1))


def test_appends_and_truncations_while_it_is_read_back() -> None:
    log = Log(rows=[header(offset) for offset in range(12_000)])
    producers = PartitionProducers(make(), FakeClock())
    producers.attach(log)
    for offset in range(12_000, 12_040):
        log.rows.append(header(offset))
        producers.appended(header(offset))
    del log.rows[9_000:]
    producers.truncated()
    producers.appended(header(8_999))  # is read back, not added
    assert producers.current().encode() == truth(9_000)


def test_many_expire_at_once_without_looking_at_what_is_gone() -> None:
    """The first of a plain dict is behind the places of all that were taken out before it."""
    table = ProducerStateTable(expiration_ms=10)
    for offset in range(50_000):
        table.append(_TEMPLATE._replace(base_offset=offset, producer_id=offset, max_timestamp=1))
    last = _TEMPLATE._replace(base_offset=50_000, producer_id=7, max_timestamp=99)
    turns = Turns()
    turns.run(partial(table.append, last))
    assert len(table) == PRODUCERS_KEPT
    assert turns.longest_ms < 500


class Turns:
    """The longest of some calls, in time that this thread had a core."""

    longest_ms = 0.0

    def run(self, call: Callable[[], Any]) -> Any:
        gc.disable()  # a full collection looks at what all earlier tests left
        try:
            began = thread_time()
            result = call()
            self.longest_ms = max(self.longest_ms, (thread_time() - began) * 1e3)
        finally:
            gc.enable()
        return result
