"""Unsafe recovery of a lost majority and of damage: reported truly, done whole, repeatable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

import pytest
from attrs import evolve

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from raftmq.log.journal import GroupState, HardStateJournal, JournalConfig
from raftmq.log.log_start import LogStart
from raftmq.log.model import LogConfig, LogEntry
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.partition.producer_state import FILE_NAME, ProducerCheckpoints
from raftmq.partition.producers import PartitionProducers
from raftmq.ports import DiskError
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import SoftState
from raftmq.records import (
    BatchHeader,
    Marker,
    NewRecord,
    build_batch,
    build_marker,
    parse_header,
    read_records,
)
from raftmq.replication.opening import Opening, open_replica
from raftmq.replication.ports import ReplicaConfig
from raftmq.replication.replica import Replica
from raftmq.tools.unsafe_recovery import (
    TERM_STEP,
    Findings,
    GroupReport,
    OpenTransaction,
    Place,
    RecoveryRefusedError,
    Verdict,
    accept_loss,
    check_is_lost,
    recover_lost_majorities,
    report_groups,
    report_loss,
    surviving_configuration,
)
from raftmq.types import (
    METADATA_GROUP,
    NodeId,
    Offset,
    RaftGroupId,
    RaftIndex,
    ReplicaId,
    StorageId,
)
from tests.log.helpers import FakeClock, batch
from tests.replication.inline import InlineCatchUp
from tests.tools.lost_majority import (
    ME,
    TOPIC,
    fill_node,
    folder_of,
    group,
    partition_group,
    replica,
)


def open_journal(disk: SimDisk, *, is_expected: bool = False) -> HardStateJournal:
    """A small one, as it is written anew at every step."""
    config = JournalConfig(size_max=16 << 10, reserve_bytes=8 << 10)
    return HardStateJournal.open(disk, "data/state.journal", config=config, is_expected=is_expected)


def make_disk() -> SimDisk:
    disk = SimDisk(Random(1))
    disk.make_directories("data")
    journal = open_journal(disk)
    fill_node(disk, journal)
    journal.close()
    return disk


def place_of(disk: SimDisk) -> Place:
    journal = open_journal(disk, is_expected=True)
    return Place(disk=disk, path="data", node=ME, journal=journal, clock=FakeClock())


def survivors(*numbers: int) -> tuple[NodeId, ...]:
    return tuple(NodeId(n) for n in numbers)


def by_name(findings: Findings) -> dict[str, GroupReport]:
    return {report.name: report for report in findings.groups}


# ---- what is told ----


def test_the_account_is_true() -> None:
    findings = report_groups(place_of(make_disk()), survivors(1))
    reports = by_name(findings)
    assert list(reports) == ["__cluster_metadata", "t-0", "t-1", "t-3"]
    first = reports["t-0"]
    assert first.verdict is Verdict.RECOVERED
    assert (first.before, first.after) == (group("123"), group("1"))
    assert (first.log_start, first.log_end, first.flushed_end) == (0, 6, 6)
    assert first.high_watermark == 5, "the last known commit"
    assert reports["t-1"].verdict is Verdict.STAYS
    assert findings.metadata.after == group("1")
    assert findings.gone == ("t-2",)


def test_observers_that_survive_stay_and_majorities_are_left_alone() -> None:
    findings = report_groups(place_of(make_disk()), survivors(1, 4))
    reports = by_name(findings)
    assert findings.metadata.after == group("1", "4")
    assert reports["t-0"].after == group("1")
    assert reports["t-3"].verdict is Verdict.STAYS, "1 and 4 are two of its three"
    whole = report_groups(place_of(make_disk()), survivors(1, 2))
    with pytest.raises(RecoveryRefusedError, match="nodes 1,2 every group"):
        check_is_lost(whole, survivors(1, 2))
    with pytest.raises(RecoveryRefusedError, match="node 1 must be one"):
        report_groups(place_of(make_disk()), survivors(2))


def test_looking_changes_nothing() -> None:
    disk = make_disk()
    place = place_of(disk)
    report_groups(place, survivors(1))
    place.journal.close()
    place = place_of(disk)
    for index in (0, 1, 3):
        assert place.journal.get(partition_group(index)) == GroupState(
            term=4,
            vote=replica(2),
            bootstrapped=ME.storage_id,
            flushed_end=RaftIndex({0: 9, 1: 7, 3: 7}[index]),
            commit_end=RaftIndex({0: 8, 1: 6, 3: 6}[index]),
        )
    assert by_name(report_groups(place, survivors(1)))["t-0"].before == group("123")


def lengthen(disk: SimDisk, raft_group: RaftGroupId, folder: str) -> None:
    """Make a log longer than one index interval, and close it cleanly."""
    journal = open_journal(disk, is_expected=True)
    state = journal.get(raft_group)
    assert state is not None
    log = ReplicatedLog.open(
        disk,
        folder,
        LogConfig(),
        claimed_flushed_end=RaftIndex(state.flushed_end),
        clock=FakeClock(),
    )
    for _ in range(40):
        log.append_batch(batch(log.log_end_offset, 4, size=500))
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)
    log.close()
    journal.put(raft_group, evolve(state, flushed_end=log.flushed_end))
    journal.close()


def test_damage_that_was_told_is_told_again() -> None:
    """The first look makes a lost index anew; the next one finds it and may not trust it."""
    disk = make_disk()
    lengthen(disk, partition_group(0), folder_of(0))
    stem = f"{folder_of(0)}/{0:020d}"
    disk.flip(f"{stem}.log", 1_000)
    disk.remove(f"{stem}.index")
    told = by_name(report_groups(place_of(disk), survivors(1)))["t-0"].damaged
    assert len(told) == 1
    recover_unsafely(disk, 1)
    again = by_name(report_groups(place_of(disk), survivors(1)))["t-0"]
    assert (again.verdict, again.damaged) == (Verdict.STAYS, told)


def test_damage_of_the_metadata_is_told_where_its_indexes_hide_it() -> None:
    disk = make_disk()
    lengthen(disk, METADATA_GROUP, "data/meta")
    disk.flip(f"data/meta/{0:020d}.log", 100)
    disk.flip(f"data/meta/{0:020d}.log", 9_000)
    findings = report_groups(place_of(disk), survivors(1))
    assert findings.image is None
    assert len(findings.metadata.damaged) == 2
    again = report_groups(place_of(disk), survivors(1))
    assert again.metadata.damaged == findings.metadata.damaged


@pytest.mark.parametrize(
    ("before", "alive", "after"),
    [
        (group("123"), (1,), group("1")),
        (group("12345"), (1, 3), group("13")),
        (group("234", "1"), (1,), group("1")),
        (group("234", "15"), (1, 2, 5), group("2", "15")),
        (group("234"), (1,), None),
    ],
    ids=["one", "two", "a learner takes over", "learners stay", "nobody"],
)
def test_who_survives(
    before: Configuration, alive: tuple[int, ...], after: Configuration | None
) -> None:
    assert surviving_configuration(before, ME, survivors(*alive)) == after


def test_a_replica_under_a_new_storage_counts_once_as_it_is_now() -> None:
    now = ReplicaId(NodeId(1), StorageId(999))
    before = Configuration((replica(1), replica(2), replica(3)), (now,))
    assert surviving_configuration(before, now, survivors(1)) == Configuration((now,))


# ---- what is done ----


def recover_unsafely(disk: SimDisk, *alive: int) -> None:
    place = place_of(disk)
    recover_lost_majorities(place, report_groups(place, survivors(*alive)))
    place.journal.close()


def leads(disk: SimDisk, raft_group: RaftGroupId, folder: str) -> Replica:
    """Start the replica and let time pass: a group of one must lead and commit."""
    journal = open_journal(disk, is_expected=True)
    opening = Opening(
        node=ME,
        disk=disk,
        journal=journal,
        host=_Alone(),
        catch_up=InlineCatchUp(),
        clock=FakeClock(),
        random=Random(2),
    )
    started = open_replica(
        opening,
        raft_group,
        folder,
        initial=Configuration(),
        machine=Silent(),
        log_config=LogConfig(),
        config=ReplicaConfig(),
    )
    for _ in range(40):
        started.tick()
        started.drain()
        if (job := journal.flush_job()) is not None:
            job.run()
            journal.complete(job)
        if (flush := started.flush_job()) is not None:
            flush.run()
            started.flushed(flush)
        started.drain()
    return started


class Silent:
    """A state machine that remembers nothing."""

    def appended(self, entry: LogEntry) -> None:
        """Fine."""

    def truncated(self, end: RaftIndex) -> None:
        """Fine."""

    def committed(self, high_watermark: Offset, commit_end: RaftIndex) -> None:
        """Fine."""

    def role_changed(self, soft: SoftState) -> None:
        """Fine."""

    def progressed(self) -> None:
        """Fine."""

    def state_at(self, offset: Offset, index: RaftIndex) -> bytes:
        return b""

    def restore(self, log_start: LogStart) -> None:
        """Fine."""


class _Alone:
    """The node of a replica without peers, which the test drains itself."""

    def on_broken_invariant(self, reason: str) -> None:
        pytest.fail(reason)

    def send(self, group: RaftGroupId, message: object) -> None:
        """There are no peers."""

    def touch(self, group: RaftGroupId) -> None:
        """The test drains."""

    def journal_failed(self, error: DiskError) -> None:
        pytest.fail(str(error))


def values_of(log: ReplicatedLog) -> list[bytes]:
    entries = []
    index = log.log_start.index
    while index < log.end_index:
        for entry in log.entries(index, 1 << 20):
            index = entry.end
            if not entry.is_bare:
                entries += [bytes(r.value or b"") for r in read_records(entry.payload)]
    return entries


def test_the_survivor_leads_alone_with_all_it_had() -> None:
    disk = make_disk()
    recover_unsafely(disk, 1)
    for index in (0, 1, 3):
        started = leads(disk, partition_group(index), folder_of(index))
        assert started.is_writable
        assert started.voters == (ME,)
        assert started.high_watermark == 6
        assert values_of(started.log) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        if index != 1:
            assert started.leader_epoch > 4 + TERM_STEP, "above any that the lost can have had"
    again = report_groups(place_of(disk), survivors(1))
    assert not again.of(Verdict.RECOVERED)


def lose_journal(disk: SimDisk) -> None:
    disk.remove("data/state.journal")
    disk.sync_directory("data")


def test_the_only_one_left_goes_on_without_the_journal_it_lost() -> None:
    """Nobody is there who could admit it anew, and its logs are whole."""
    disk = make_disk()
    lose_journal(disk)
    recover_unsafely(disk, 1)
    for index in (0, 1, 3):
        started = leads(disk, partition_group(index), folder_of(index))
        assert started.is_writable
        assert started.voters == (started.self_id,)
        assert values_of(started.log) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        assert started.leader_epoch > 4 + TERM_STEP, "above any that it can have voted in"


def test_it_does_so_under_the_storage_that_a_start_gave_it_since() -> None:
    disk = make_disk()
    lose_journal(disk)
    started = leads(disk, partition_group(1), folder_of(1))
    assert not started.is_leader
    assert started.self_id != ME
    recover_unsafely(disk, 1)
    assert leads(disk, partition_group(1), folder_of(1)).is_writable


def test_others_admit_a_node_without_its_journal() -> None:
    disk = make_disk()
    lose_journal(disk)
    whole = report_groups(place_of(disk), survivors(1, 2))
    with pytest.raises(RecoveryRefusedError, match=r"start them instead; state\.journal"):
        check_is_lost(whole, survivors(1, 2))


def _dump(disk: SimDisk) -> list[object]:
    place = place_of(disk)
    findings = report_groups(place, survivors(1))
    place.journal.close()
    return [(a.name, a.verdict, a.before, a.log_end, a.damaged) for a in findings.groups]


FATES: list[Callable[[], CrashOdds]] = [
    lambda: CrashOdds(lose=1, names=1),
    lambda: CrashOdds(lose=0, prefix=0, torn=0, sectors=0, names=0),
    lambda: CrashOdds(lose=0.2, prefix=0.4, torn=0.4, sectors=0, names=0.5),
]


@pytest.mark.parametrize("fate", range(len(FATES)))
def test_power_fails_at_every_step_and_doing_it_again_does_the_rest(fate: int) -> None:
    whole = make_disk()
    recover_unsafely(whole, 1)
    expected = _dump(whole)
    steps = 0
    while True:
        disk = make_disk()
        place = place_of(disk)
        findings = report_groups(place, survivors(1))
        disk.crash_after(steps)
        is_done = False
        with suppress(SimCrash):
            recover_lost_majorities(place, findings)
            is_done = True
        disk.crash_after(None)
        disk.crash(Random(steps), FATES[fate]())
        recover_unsafely(disk, 1)
        assert _dump(disk) == expected, f"after {steps} operations"
        for index in (0, 3):
            state = place_of(disk).journal.get(partition_group(index))
            assert state is not None
            assert state.term >= 4 + TERM_STEP
        steps += 1
        if is_done:
            break
    assert steps > 20, "no crash point was met"


# ---- accepted loss ----


def _damage(disk: SimDisk, index: int) -> None:
    """Break the middle batch, which has offset 2 alone."""
    path = f"{folder_of(index)}/{0:020d}.log"
    first = parse_header(disk.content(path))
    disk.flip(path, first.size + 61, 3)


def test_a_damaged_partition_of_one_replica_goes_on_without() -> None:
    disk = make_disk()
    _damage(disk, 1)
    stuck = leads(disk, partition_group(1), folder_of(1))
    assert not stuck.is_leader, "suspended for good"
    disk.crash(Random(1))
    place = place_of(disk)
    loss = report_loss(place, "t", 1)
    assert (loss.damaged, loss.cut, loss.is_anew, loss.others) == (((2, 3),), None, False, ())
    accept_loss(place, loss)
    place.journal.close()
    started = leads(disk, partition_group(1), folder_of(1))
    assert started.is_writable
    assert started.high_watermark == 6, "offsets stay as they were"
    assert values_of(started.log) == [b"a", b"b", b"d", b"e", b"f"]
    with pytest.raises(RecoveryRefusedError, match="there is no loss to accept"):
        report_loss(place_of(disk), "t", 1)


def _append_transactions(disk: SimDisk) -> None:
    """One that ends at offset 7, and one that stays open from 8 on."""
    journal = open_journal(disk, is_expected=True)
    state = journal.get(partition_group(1))
    assert state is not None
    log = ReplicatedLog.open(
        disk,
        folder_of(1),
        LogConfig(),
        claimed_flushed_end=RaftIndex(state.flushed_end),
        clock=FakeClock(),
    )
    for offset, producer_id in ((6, 7), (8, 9)):
        written = build_batch(
            [NewRecord(None, b"x")],
            base_offset=offset,
            leader_epoch=4,
            timestamp=1000,
            producer_id=producer_id,
            producer_epoch=3,
            base_sequence=0,
            transactional=True,
        )
        log.append_batch(bytes(written))
        if producer_id == 7:
            end = build_marker(
                Marker(is_commit=True),
                producer_id=7,
                producer_epoch=4,
                timestamp=1000,
                base_offset=7,
                leader_epoch=4,
            )
            log.append_batch(bytes(end))
    while (job := log.flush_job()) is not None:
        job.run()
        log.complete(job)
    journal.put(partition_group(1), evolve(state, flushed_end=log.flushed_end))
    journal.flush_now()
    log.close()
    journal.close()


def test_a_transaction_that_lost_its_end_is_told_of() -> None:
    """Nobody ends it again: it would hold readers of committed records back for ever, unseen."""
    disk = make_disk()
    _append_transactions(disk)
    with pytest.raises(RecoveryRefusedError, match="there is no loss to accept"):
        report_loss(place_of(disk), "t", 1)
    path = f"{folder_of(1)}/{0:020d}.log"
    data = memoryview(bytes(disk.content(path)))
    position = next(p for p, header in positions_of(data) if header.is_control)
    disk.flip(path, position + 61, 3)
    place = place_of(disk)
    loss = report_loss(place, "t", 1)
    assert loss.damaged == ((7, 8),)
    assert loss.endless == (OpenTransaction(7, 3, Offset(6)),), "the other one may go on"
    accept_loss(place, loss)
    place.journal.close()
    assert leads(disk, partition_group(1), folder_of(1)).is_writable


def positions_of(data: memoryview) -> Iterator[tuple[int, BatchHeader]]:
    position = 0
    while position < len(data) and any(data[position : position + 61]):
        header = parse_header(data[position:])
        yield position, header
        position += header.size


def _keep_checkpoint(disk: SimDisk, index: int, offset: int, state: bytes = b"x") -> None:
    folder = folder_of(index)
    checkpoints = ProducerCheckpoints(disk, folder)
    checkpoints.load()
    checkpoints.add(Offset(offset), state)
    file = disk.open(f"{folder}/{FILE_NAME}")
    file.fdatasync()
    file.close()
    disk.sync_directory(folder)


def _checkpoint_above(disk: SimDisk, index: int, offset: int) -> tuple[Offset, bytes] | None:
    checkpoints = ProducerCheckpoints(disk, folder_of(index))
    checkpoints.load()
    return checkpoints.best(Offset(99), Offset(offset + 1))


def _producers_of(log: ReplicatedLog, checkpoints: ProducerCheckpoints) -> bytes:
    producers = PartitionProducers(checkpoints, FakeClock())
    producers.attach(log)
    return producers.current().encode()


def test_what_lost_batches_said_of_producers_is_forgotten() -> None:
    """Else this replica took a repeated batch for a duplicate, and one that fetched its log did
    not."""
    disk = make_disk()
    _append_transactions(disk)
    log = ReplicatedLog.open(disk, folder_of(1), LogConfig(), clock=FakeClock())
    known = _producers_of(log, ProducerCheckpoints())
    log.close()
    _keep_checkpoint(disk, 1, 9, known)
    path = f"{folder_of(1)}/{0:020d}.log"
    data = memoryview(bytes(disk.content(path)))
    position = [p for p, header in positions_of(data) if header.producer_id == 9][-1]
    disk.flip(path, position + 61, 3)
    place = place_of(disk)
    loss = report_loss(place, "t", 1)
    assert loss.damaged == ((8, 9),)
    accept_loss(place, loss)
    place.journal.close()
    log = ReplicatedLog.open(disk, folder_of(1), LogConfig(), clock=FakeClock())
    here = _producers_of(log, ProducerCheckpoints(disk, folder_of(1)))
    assert here == _producers_of(log, ProducerCheckpoints()), "as one that fetches this log"
    assert here != known
    log.close()


def test_lost_batches_are_forgotten_before_others_take_their_place() -> None:
    step, is_done = 1, False
    while not is_done:
        disk = make_disk()
        _damage(disk, 1)
        _keep_checkpoint(disk, 1, 6)
        place = place_of(disk)
        loss = report_loss(place, "t", 1)
        disk.crash_after(step)
        with suppress(SimCrash):
            accept_loss(place, loss)
            is_done = True
        disk.crash_after(None)
        disk.crash(Random(step))
        kept = _checkpoint_above(disk, 1, 2)
        try:
            report_loss(place_of(disk), "t", 1)
        except RecoveryRefusedError:
            assert kept is None, f"the loss was accepted: step {step}"
        step += 1
    assert step > 5, "no crash point was met"


def test_accepting_can_be_done_again_after_a_crash() -> None:
    for steps in range(60):
        disk = make_disk()
        _damage(disk, 1)
        place = place_of(disk)
        loss = report_loss(place, "t", 1)
        disk.crash_after(steps)
        with suppress(SimCrash):
            accept_loss(place, loss)
        disk.crash_after(None)
        disk.crash(Random(steps))
        place = place_of(disk)
        with suppress(RecoveryRefusedError):  # it was done
            accept_loss(place, report_loss(place, "t", 1))
        place.journal.close()
        started = leads(disk, partition_group(1), folder_of(1))
        assert started.is_writable
        assert values_of(started.log) == [b"a", b"b", b"d", b"e", b"f"]


def test_a_cut_tail_is_told_and_lifted() -> None:
    disk = make_disk()
    place = place_of(disk)
    state = place.journal.get(partition_group(0))
    assert state is not None
    place.journal.put(partition_group(0), evolve(state, cut_floor=12))
    _keep_checkpoint(disk, 0, 5)
    _keep_checkpoint(disk, 0, 8)
    loss = report_loss(place, "t", 0)
    assert loss.cut == (6, 9)
    assert loss.others == (2, 3)
    accept_loss(place, loss)
    lifted = place.journal.get(partition_group(0))
    assert lifted is not None
    assert lifted.cut_floor == 0
    assert _checkpoint_above(disk, 0, 6) is None, "other batches may take those offsets"


def test_a_survivor_forgets_producers_beyond_the_end_of_its_log() -> None:
    """Others had flushed more than its disk kept; what comes there now is something else."""
    disk = make_disk()
    _keep_checkpoint(disk, 0, 8)
    _keep_checkpoint(disk, 1, 6)
    place = place_of(disk)
    recover_lost_majorities(place, report_groups(place, survivors(1)))
    disk.crash(Random(1))
    assert _checkpoint_above(disk, 0, 6) is None
    assert _checkpoint_above(disk, 1, 5) == (6, b"x"), "its log holds all of that"


def test_a_lone_replica_that_lost_everything_begins_anew() -> None:
    disk = make_disk()
    disk.remove_tree(folder_of(1))
    disk.sync_directory(f"data/topics/t-{TOPIC}")
    journal = open_journal(disk, is_expected=True)
    opening = Opening(
        node=ME,
        disk=disk,
        journal=journal,
        host=_Alone(),
        catch_up=InlineCatchUp(),
        clock=FakeClock(),
        random=Random(5),
    )
    disk.make_directories(folder_of(1))
    lost = open_replica(
        opening,
        partition_group(1),
        folder_of(1),
        initial=group("1"),
        machine=Silent(),
        log_config=LogConfig(),
        config=ReplicaConfig(),
    )
    assert lost.self_id != ME
    journal.close()
    place = place_of(disk)
    loss = report_loss(place, "t", 1)
    assert loss.is_anew
    accept_loss(place, loss)
    place.journal.close()
    started = leads(disk, partition_group(1), folder_of(1))
    assert started.is_writable
    assert started.high_watermark == 0


@pytest.mark.parametrize(
    ("topic", "partition", "says"),
    [
        ("t", 0, "t-0 is whole here"),
        ("t", 2, "this node holds no t-2"),
        ("__cluster_metadata", 0, "is whole here"),
    ],
)
def test_what_is_no_loss_is_refused(topic: str, partition: int, says: str) -> None:
    with pytest.raises(RecoveryRefusedError, match=says):
        report_loss(place_of(make_disk()), topic, partition)


def test_metadata_leaves_nothing_out_while_others_have_it() -> None:
    disk = make_disk()
    path = f"data/meta/{0:020d}.log"
    disk.flip(path, parse_header(disk.content(path)).size + 61, 3)
    with pytest.raises(RecoveryRefusedError, match="metadata differs between nodes"):
        report_loss(place_of(disk), "__cluster_metadata", 0)
    findings = report_groups(place_of(disk), survivors(1))
    assert findings.image is None
    assert findings.metadata.verdict is Verdict.RECOVERED


def test_offsets_told_are_those_of_records() -> None:
    """The log's index counts bare entries too; an operator is told offsets."""
    findings = report_groups(place_of(make_disk()), survivors(1))
    assert by_name(findings)["t-0"].log_end == Offset(6)
