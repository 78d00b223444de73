"""The journal of hard states: votes stay, lazy records ride along, damage is noticed."""

from __future__ import annotations

from itertools import product
from random import Random
from uuid import UUID

import attrs
import pytest

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from raftmq.log import journal as journal_file
from raftmq.log.journal import (
    RECORD_SIZE,
    TWICE,
    GroupState,
    HardStateJournal,
    JournalConfig,
)
from raftmq.log.model import FlushJob, NewerFormatError
from raftmq.ports import Disk, DiskError, DiskFullError
from raftmq.types import NodeId, RaftGroupId, ReplicaId, StorageId, TopicId
from tests.log.conftest import Place
from tests.log.helpers import flush_journal, sim_disk
from tests.log.test_disk_full import until_full

SMALL = JournalConfig(size_max=8192, reserve_bytes=2048)
PATH = "data/state.journal"


def group(number: int) -> RaftGroupId:
    return RaftGroupId(TopicId(UUID(int=7)), number, 3)


def state(term: int, **more: int) -> GroupState:
    vote = ReplicaId(NodeId(2), StorageId(1 << 63))
    return GroupState(term=term, vote=vote, bootstrapped=StorageId(5), **more)


def start(disk: Disk | None = None, config: JournalConfig = SMALL) -> HardStateJournal:
    if disk is None:
        disk = sim_disk()
    disk.make_directories("data")
    return HardStateJournal.open(disk, PATH, config=config)


def lose(disk: SimDisk) -> None:
    disk.crash(Random(0), CrashOdds(lose=1, names=1))


def test_round_trip(place: Place) -> None:
    path = f"{place.root}/state.journal"
    journal = HardStateJournal.open(place.disk, path)
    assert journal.get(group(1)) is None
    states = {
        group(1): GroupState(),
        group(2): state(9, flushed_end=1 << 40, cut_floor=17, commit_end=12),
        group(3): GroupState(term=1 << 50, bootstrapped=StorageId((1 << 64) - 1)),
    }
    for key, value in states.items():
        journal.put(key, value)
    journal.put(group(4), state(1))
    journal.forget(group(4))
    assert list(journal.groups()) == list(states)
    flush_journal(journal)
    journal.close()
    for _ in range(3):
        journal = HardStateJournal.open(place.disk, path)
        assert not journal.damaged
        assert {key: journal.get(key) for key in journal.groups()} == states
        journal.close()


def test_a_promise_waits_for_its_flush() -> None:
    disk = sim_disk()
    journal = start(disk)
    assert journal.flush_job() is None
    first = journal.put(group(1), state(1))
    job = journal.flush_job()
    assert job is not None
    assert journal.flush_job() is None
    assert journal.flushed_sequence < first
    job.run()
    second = journal.put(group(1), state(2))
    assert journal.complete(job) == first
    assert journal.flushed_sequence < second
    lose(disk)
    known = start(disk).get(group(1))
    assert known is not None
    assert known.term == 1


def test_a_lazy_record_asks_for_no_flush_of_its_own() -> None:
    disk = sim_disk()
    journal = start(disk)
    journal.put(group(1), state(1), lazy=True)
    assert journal.flush_job() is None
    journal.put(group(2), state(1))
    flush_journal(journal)
    lose(disk)
    assert start(disk).get(group(1)) == state(1)


def test_flush_now() -> None:
    disk = sim_disk()
    journal = start(disk)
    sequence = journal.put(group(1), state(3))
    syncs = disk.counters.fdatasyncs
    assert journal.flush_now() == sequence
    assert journal.flush_now() == sequence
    assert disk.counters.fdatasyncs == syncs + 1
    assert journal.flush_job() is None
    lose(disk)
    assert start(disk).get(group(1)) == state(3)


def test_flushed_and_lost_unflushed_records_in_any_order_are_no_damage() -> None:
    for seed in range(40):
        disk = sim_disk()
        journal = start(disk)
        for term in range(1, 12):
            journal.put(group(term % 4), state(term))
            if term == 5:
                flush_journal(journal)
        disk.crash(Random(seed), CrashOdds(lose=0, prefix=0, torn=0.5, sectors=0.5))
        journal = start(disk)
        assert not journal.damaged
        known = journal.get(group(1))
        assert known is not None
        assert known.term >= 5


def test_every_flipped_bit_in_what_was_flushed_is_noticed() -> None:
    disk = sim_disk()
    journal = start(disk)
    for number in range(3):
        journal.put(group(number), state(number + 1))
        flush_journal(journal)
    journal.put(group(0), state(8), lazy=True)  # says how far the journal was flushed
    content = disk.content(PATH)
    for slot, at in product(range(3), range(RECORD_SIZE)):
        disk.overwrite(PATH, content)
        for position in TWICE.positions(slot):
            disk.flip(PATH, position + at, at % 8)
        opened = start(disk)
        assert opened.damaged, (slot, at)
        assert not list(opened.groups()), "whose record was lost, nobody knows"
        assert start(disk).damaged, "kept over a restart"
        opened = start(disk)
        opened.accept_damage()
        opened.accept_damage()
        flush_journal(opened)
        assert not start(disk).damaged


def test_the_header_is_there_twice() -> None:
    disk = sim_disk()
    journal = start(disk)
    journal.put(group(1), state(1))
    journal.close()
    content = disk.content(PATH)
    for positions, is_damaged in (
        ((0,), False),
        ((0, 257), False),
        ((513, 770), False),
        ((0, 257, 513, 770), True),
    ):
        disk.overwrite(PATH, content)
        for position in positions:
            disk.flip(PATH, position)
        journal = start(disk)
        assert journal.damaged == is_damaged
        assert journal.get(group(1)) == (None if is_damaged else state(1))
    disk.overwrite(PATH, b"")
    assert start(disk).damaged


def test_a_lost_file_is_damage_where_replicas_were() -> None:
    disk = sim_disk()
    disk.make_directories("data")
    assert not HardStateJournal.open(disk, PATH).damaged
    disk.remove(PATH)
    assert HardStateJournal.open(disk, PATH, is_expected=True).damaged
    assert start(disk).damaged, "kept over a restart"


def test_damage_forgets_what_was_promised_before_and_nothing_later() -> None:
    for capacity in (None, 0):
        disk = sim_disk()
        journal = start(disk)
        journal.put(group(1), state(1))
        flush_journal(journal)
        journal.put(group(1), state(2))
        flush_journal(journal)
        journal.put(group(2), state(7), lazy=True)
        for position in TWICE.positions(1):  # term 2, and whatever was voted in it
            disk.flip(PATH, position)
        disk.capacity_bytes = None if capacity is None else disk.used_bytes()
        journal = start(disk)
        assert journal.damaged
        assert journal.get(group(1)) is None, "term 1 is not what was promised last"
        journal.put(group(1), state(5))
        flush_journal(journal)
        journal = start(disk)
        assert journal.damaged
        assert list(journal.groups()) == [group(1)]
        assert journal.get(group(1)) == state(5)


def test_a_newer_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = sim_disk()
    start(disk).close()
    monkeypatch.setattr(journal_file, "VERSION", 0)
    with pytest.raises(NewerFormatError):
        start(disk)


def test_a_full_file_is_rewritten() -> None:
    disk = sim_disk()
    journal = start(disk)
    renames = disk.counters.renames
    for term in range(1, 200):
        journal.put(group(term % 5), state(term), lazy=term % 2 == 0)
        flush_journal(journal)
    assert disk.counters.renames > renames + 3
    assert disk.files()[PATH] < 16_000
    assert disk.list("data") == ["state.journal"]
    flush_journal(journal)
    lose(disk)
    journal = start(disk)
    terms = [s.term for s in map(journal.get, journal.groups()) if s is not None]
    assert sorted(terms) == [195, 196, 197, 198, 199]


def rewriting(disk: SimDisk) -> tuple[HardStateJournal, FlushJob]:
    """A journal of many votes, and the job that puts a new file in place of its old one."""
    journal = start(disk)
    for term in range(1, 40):
        journal.put(group(term % 3), state(term))
    job = journal.flush_job()
    assert job is not None
    assert job.rename is not None
    return journal, job


@pytest.mark.parametrize("is_renamed", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_a_vote_while_the_file_is_rewritten(now: bool, is_renamed: bool) -> None:
    """Until the new file has its name durably, the old one must hold what is promised."""
    disk = sim_disk()
    journal, job = rewriting(disk)
    journal.put(group(1), state(50))
    if now:
        journal.flush_now()
        journal.put(group(1), state(51))
        journal.flush_now()
    if is_renamed:
        job.run()
        journal.complete(job)
    lose(disk)
    journal = start(disk)
    assert not journal.damaged
    if now or is_renamed:
        known = journal.get(group(1))
        assert known is not None
        assert known.term == (51 if now else 50)


def test_many_groups_raise_the_limit() -> None:
    disk = sim_disk()
    journal = start(disk)
    for number in range(200):
        journal.put(group(number), state(number + 1))
    flush_journal(journal)
    assert len(list(start(disk).groups())) == 200


def test_votes_work_on_a_full_disk() -> None:
    disk = sim_disk()
    journal = start(disk)
    disk.capacity_bytes = disk.used_bytes()

    def vote(count: int) -> None:
        lazy = journal.put(group(1), state(count), lazy=True)
        assert journal.put(group(2), state(count)) >= lazy
        flush_journal(journal)

    size = until_full(vote)
    assert size >= 8192 // RECORD_SIZE // 2 // 2 + 2048 // RECORD_SIZE // 2 - 6
    with pytest.raises(DiskFullError):
        journal.put(group(3), state(1))
    assert journal.get(group(3)) is None
    before = journal.get(group(2))
    with pytest.raises(DiskFullError):
        journal.put(group(2), state(5000))
    assert journal.get(group(2)) == before
    disk.capacity_bytes = None
    journal.put(group(2), state(6000))
    flush_journal(journal)
    lose(disk)
    assert start(disk).get(group(2)) == state(6000)


def test_a_full_disk_after_a_process_died_while_it_renamed() -> None:
    """The new file has its name in the page cache alone, and votes go to it: with the old one they
    would be forgotten."""
    disk = sim_disk()
    journal, job = rewriting(disk)
    disk.crash_when(lambda verb, _: 0 if verb == "sync directory" else None)
    with pytest.raises(SimCrash):
        job.run()
    disk.end_process()
    disk.capacity_bytes = disk.used_bytes()
    journal = start(disk)
    journal.put(group(1), state(50))
    flush_journal(journal)
    lose(disk)
    assert start(disk).get(group(1)) == state(50)


def test_a_start_on_a_full_disk() -> None:
    disk = sim_disk()
    journal = start(disk)
    for term in range(1, 6):
        journal.put(group(term % 2), state(term))
        flush_journal(journal)
    journal.put(group(7), state(9))
    journal.put(group(8), state(9))
    content = disk.content(PATH)
    for garbage in (b"", b"?" * RECORD_SIZE, b"?" * 100):
        # The last but one was never flushed and did not reach the device.
        data = bytearray(content)
        for position in TWICE.positions(5):
            data[position : position + RECORD_SIZE] = bytes(RECORD_SIZE)
        data[position : position + len(garbage)] = garbage
        disk.overwrite(PATH, bytes(data))
        disk.capacity_bytes = disk.used_bytes()
        for _ in range(2):
            journal = start(disk)
            assert not journal.damaged
            assert journal.get(group(8)) == state(9)
            known = journal.get(group(1))
            assert known is not None
            journal.put(group(1), state(known.term + 1))
            flush_journal(journal)
            lose(disk)
        disk.capacity_bytes = None
        journal = start(disk)
        assert not journal.damaged
        assert journal.get(group(1)) == state(7)


def test_a_failed_flush_is_told() -> None:
    disk = sim_disk()
    journal = start(disk)
    journal.put(group(1), state(1))
    job = journal.flush_job()
    assert job is not None
    disk.fail_when(lambda verb, _path: verb == "fdatasync")
    with pytest.raises(DiskError):
        job.run()
    with pytest.raises(AssertionError):
        journal.complete(job)


def test_a_left_over_file_is_removed() -> None:
    disk = sim_disk()
    start(disk).close()
    disk.open(f"{PATH}.tmp", create=True).pwrite(b"x", 0)
    start(disk)
    assert disk.list("data") == ["state.journal"]


def test_another_claim_changes_nothing_else() -> None:
    every = {
        field.name: value
        for value, field in enumerate(attrs.fields(GroupState), start=1)  # no default's value
    }
    known = GroupState(**every)  # type: ignore[arg-type]
    claimed = known.claiming(100, 200)
    assert claimed == attrs.evolve(known, flushed_end=100, commit_end=200)
