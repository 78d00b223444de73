"""Each record of the journal is written twice: one bad copy forgets nothing, and files of format 1,
where there is one, are read."""

from __future__ import annotations

import struct
import zlib
from base64 import b85decode
from contextlib import suppress
from itertools import product
from random import Random

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk, SimFile
from raftmq.log.journal import (
    ONCE,
    RECORD_SIZE,
    SECTOR_SIZE,
    TWICE,
    GroupState,
    HardStateJournal,
    decode_header,
)
from raftmq.log.model import FlushJob
from raftmq.ports import DiskFullError
from raftmq.types import RaftGroupId
from tests.log.helpers import flush_journal, sim_disk
from tests.log.test_journal import PATH, group, lose, start, state

FORMAT_1 = zlib.decompress(
    b85decode(
        "c-jl{4fJAQWPkxMtDj}xGlmfYf=0OinHf<1js>tI$uT3TWokfG$4aW*fx+CFNcJ<~a0fe*95a$yT=ui0sb#@s|IQ;"
        "eub44|f{6(KGgHI=ue)^<k?d!|V?PTm!r$<-`4SdP{VYV-PZh9WW#ddF1KDu+gVgxvBsTsPPC8s?7zLwX6pVsVFb"
        "YP&C>RB!U=)mkQ7{Td0000s1r|~"
    )
)
"""A file as format 1 was written: group 1 in term 1, 2 in term 2, 1 in term 3, 4 in term 1, 4
forgotten, all flushed; then a lazy record of 2, which says so."""
CELL = 2 * SECTOR_SIZE
IN_A_CELL = SECTOR_SIZE // RECORD_SIZE
STATES_OF_FORMAT_1 = {
    group(1): state(3),
    group(2): state(2, flushed_end=9, cut_floor=3, commit_end=4),
}


def states(journal: HardStateJournal) -> dict[RaftGroupId, GroupState | None]:
    return {key: journal.get(key) for key in journal.groups()}


def layout_of(disk: SimDisk) -> object:
    header = decode_header(disk.content(PATH))
    return header and header.layout


def with_content(content: bytes) -> SimDisk:
    disk = sim_disk()
    disk.make_directories("data")
    disk.open(PATH, create=True).pwrite(content, 0)
    disk.sync_directory("data")
    disk.overwrite(PATH, content)
    return disk


def spoilt(content: bytes, position: int, piece: bytes) -> bytes:
    return content[:position] + piece + content[position + len(piece) :]


def voted() -> tuple[SimDisk, bytes]:
    """Some votes, each flushed alone; nothing says of the last that it was."""
    disk = sim_disk()
    journal = start(disk)
    for term in range(1, 7):
        journal.put(group(term % 2), state(term))
        flush_journal(journal)
    return disk, disk.content(PATH)


# --- damage ---------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_forgets_nothing() -> None:
    """Not in the newest record either, which looked like a write that a power loss cut short."""
    disk, content = voted()
    used = len(content.rstrip(b"\0"))
    for position in range(0, used, 7):
        disk.overwrite(PATH, content)
        disk.flip(PATH, position, position % 8)
        journal = start(disk)
        assert not journal.damaged, position
        assert states(journal) == {group(0): state(6), group(1): state(5)}, position


@pytest.mark.parametrize("piece", [bytes(SECTOR_SIZE), b"?" * SECTOR_SIZE], ids=["zeros", "other"])
@pytest.mark.parametrize("has_room", [True, False])
def test_any_bad_sector_forgets_nothing(piece: bytes, has_room: bool) -> None:
    disk, content = voted()
    for number in range(len(content.rstrip(b"\0")) // SECTOR_SIZE + 1):
        disk.overwrite(PATH, spoilt(content, number * SECTOR_SIZE, piece))
        disk.capacity_bytes = None if has_room else disk.used_bytes()
        journal = start(disk)
        assert not journal.damaged, number
        assert journal.mended == {2: 4, 3: 4, 4: 1, 5: 1}.get(number, 0), number
        assert states(journal) == {group(0): state(6), group(1): state(5)}, number
        lose(disk)
        # Both copies are there again: the other one may go.
        content_now = disk.content(PATH)
        for other in range(len(content_now.rstrip(b"\0")) // SECTOR_SIZE + 1):
            disk.overwrite(PATH, spoilt(content_now, other * SECTOR_SIZE, piece))
            journal = start(disk)
            assert not journal.damaged, (number, other)
            assert states(journal) == {group(0): state(6), group(1): state(5)}, (number, other)
            disk.overwrite(PATH, content_now)
        disk.capacity_bytes = None


@pytest.mark.parametrize(
    ("first", "second", "is_damaged"),
    [
        pytest.param(b"?", b"?", True, id="other bytes twice"),
        pytest.param(b"?", b"\0", False, id="as a torn write"),
        pytest.param(b"\0", b"?", False, id="as a write torn from behind"),
        pytest.param(b"\0", b"\0", False, id="as a lost write"),
    ],
)
def test_both_copies_of_the_newest_record_bad(
    first: bytes, second: bytes, is_damaged: bool
) -> None:
    disk, content = voted()
    for position, piece in zip(TWICE.positions(5), (first, second), strict=True):
        content = spoilt(content, position, piece * RECORD_SIZE)
    disk.overwrite(PATH, content)
    journal = start(disk)
    assert journal.damaged == is_damaged
    told = {} if is_damaged else {group(0): state(4), group(1): state(5)}
    assert states(journal) == told


def test_a_record_in_the_place_of_another_is_none() -> None:
    disk, content = voted()
    for here, there in zip(TWICE.positions(4), TWICE.positions(2), strict=True):
        content = spoilt(content, here, content[there : there + RECORD_SIZE])
    disk.overwrite(PATH, content)
    assert start(disk).damaged


def test_no_crash_hides_damage_on_a_full_disk() -> None:
    """The damaged file is emptied where it lies."""
    disk, content = voted()
    for position in TWICE.positions(1):
        content = spoilt(content, position, b"?" * RECORD_SIZE)
    for old in (content, spoilt(FORMAT_1, ONCE.positions(1)[0], b"?"), b"?" * len(content)):
        for step, seed in product(range(1, 20), range(6)):
            disk = with_content(old)
            disk.capacity_bytes = disk.used_bytes()
            disk.crash_after(step)
            with suppress(SimCrash):
                start(disk)
            disk.crash(Random(seed))
            journal = start(disk)
            assert journal.damaged
            assert not states(journal)


# --- torn writes ----------------------------------------------------------------------------


def test_what_a_flush_may_leave() -> None:
    """Any of the sectors of one flush may be old or new: what has a copy counts, what has none was
    never promised."""
    disk = sim_disk()
    journal = start(disk)
    for number in range(2):
        journal.put(group(number), state(1))
    flush_journal(journal)
    before = disk.content(PATH)
    for number in range(2, 7):
        journal.put(group(number), state(1))
    after = disk.content(PATH)
    first = TWICE.header_size // SECTOR_SIZE
    for kept in product((False, True), repeat=4):
        content = before
        for sector, is_new in enumerate(kept, start=first):
            at = sector * SECTOR_SIZE
            if is_new:
                content = spoilt(content, at, after[at : at + SECTOR_SIZE])
        for has_room in (True, False):
            disk = with_content(content)
            disk.capacity_bytes = None if has_room else disk.used_bytes()
            journal = start(disk)
            assert not journal.damaged
            whole = [kept[0] or kept[1]] * 2 + [kept[2] or kept[3]] * 3
            numbers = [0, 1, *(n for n, is_there in enumerate(whole, start=2) if is_there)]
            assert list(journal.groups()) == list(map(group, numbers))
            journal.put(group(9), state(2))
            journal.flush_now()
            lose(disk)
            assert list(start(disk).groups()) == list(map(group, [*numbers, 9]))


class Walk:
    """A journal, and the terms that were promised after a flush."""

    def __init__(self, disk: SimDisk) -> None:
        self.journal = start(disk)
        self.promised: dict[int, int] = {}
        self._terms: dict[int, int] = {}
        self._newest = 0
        self._job: FlushJob | None = None
        self._covered: dict[int, int] = {}

    def step(self, verb: str, number: int) -> None:
        journal, known = self.journal, self.journal.get(group(number)) or GroupState()
        if verb == "vote":
            self._newest = journal.put(group(number), state(known.term + 1))
            self._terms[number] = known.term + 1
        elif verb == "claim":
            claimed = known.claiming(known.flushed_end + 1, 0)
            self._newest = journal.put(group(number), claimed, lazy=True)
        elif verb == "flush now":
            journal.flush_now()
            self.promised = dict(self._terms)
        elif self._job is not None:
            self._job.run()
            journal.complete(self._job)
            self._job = None
            for key, term in self._covered.items():
                self.promised[key] = max(term, self.promised.get(key, 0))
        elif (job := journal.flush_job()) is not None:
            self._job, self._covered = job, dict(self._terms)


VERBS = st.sampled_from(("vote", "vote", "claim", "job", "job", "flush now"))
STEPS = st.lists(st.tuples(VERBS, st.integers(0, 3)), max_size=150)


@given(steps=STEPS, seed=st.integers(0, 1 << 32), has_room=st.booleans())
def test_no_power_loss_and_no_bad_copy_forgets_a_promise(
    steps: list[tuple[str, int]], seed: int, has_room: bool
) -> None:
    """Sectors of what was not synced are lost; then one copy of every cell may go bad."""
    disk, random = sim_disk(), Random(seed)
    walk = Walk(disk)
    for verb, number in steps:
        walk.step(verb, number)
    disk.crash(random, CrashOdds(lose=0, prefix=0.3, torn=0, sectors=0.6, names=0.5))
    content = disk.content(PATH)
    for at in range(0, len(content), CELL):
        if random.random() < 0.5:
            piece = random.choice((bytes(SECTOR_SIZE), random.randbytes(SECTOR_SIZE)))
            content = spoilt(content, at + random.choice((0, SECTOR_SIZE)), piece)
    disk.overwrite(PATH, content)
    disk.capacity_bytes = None if has_room else disk.used_bytes()
    for _ in range(2):
        journal = start(disk)
        assert not journal.damaged
        for number, term in walk.promised.items():
            found = journal.get(group(number))
            assert found is not None
            assert found.term >= term
            assert found.vote == state(term).vote
        lose(disk)


def test_a_write_that_is_refused_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a cell nothing grows; where files are copied on write it may be refused."""
    disk = sim_disk()
    journal = start(disk)
    journal.put(group(1), state(1))
    flush_journal(journal)

    def refuse(_file: object, _data: object, _position: int) -> None:
        raise DiskFullError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(SimFile, "pwrite", refuse)
        with pytest.raises(DiskFullError):
            journal.put(group(1), state(2))
    assert journal.get(group(1)) == state(1)
    journal.put(group(2), state(3))
    flush_journal(journal)
    lose(disk)
    assert states(start(disk)) == {group(1): state(1), group(2): state(3)}


@pytest.mark.parametrize("cut", range(0, CELL + 1, RECORD_SIZE // 2))
def test_a_file_that_ends_in_a_cell(cut: int) -> None:
    """The reserve was used up, and the size did not reach the device as a whole."""
    disk, content = voted()
    disk = with_content(content[: TWICE.header_size + 2 * CELL - cut])
    disk.capacity_bytes = disk.used_bytes()
    for _ in range(2):
        journal = start(disk)
        assert not journal.damaged
        known = journal.get(group(0))
        assert known is not None
        assert known.term == (6 if cut <= CELL - 2 * RECORD_SIZE else 4)


# --- format 1 -------------------------------------------------------------------------------


def test_format_1_stays_until_the_way_back_is_given_up() -> None:
    disk = with_content(FORMAT_1)
    for _ in range(2):
        journal = start(disk)
        assert not journal.damaged
        assert states(journal) == STATES_OF_FORMAT_1
        assert layout_of(disk) is ONCE
        lose(disk)
    journal = start(disk)
    journal.write_twice()
    flush_journal(journal)
    assert layout_of(disk) is TWICE
    lose(disk)
    journal = start(disk)
    assert (states(journal), layout_of(disk)) == (STATES_OF_FORMAT_1, TWICE)
    journal.write_twice()
    assert journal.flush_job() is None, "nothing is left to do"


def test_damage_in_format_1() -> None:
    """As ever: what a later record says was flushed must be there."""
    for slot, at in product(range(6), range(0, RECORD_SIZE, 5)):
        position = ONCE.positions(slot)[0] + at
        journal = start(with_content(spoilt(FORMAT_1, position, b"?")))
        assert journal.damaged == (slot < 5)
        if slot == 5:
            older = state(2, flushed_end=7, cut_floor=3, commit_end=4)
            assert states(journal) == STATES_OF_FORMAT_1 | {group(2): older}


@pytest.mark.parametrize("garbage", [b"", b"?" * RECORD_SIZE, b"?" * 100])
def test_format_1_on_a_full_disk(garbage: bytes) -> None:
    """It goes on as it is, until there is room."""
    last = ONCE.positions(6)[0]
    disk = with_content(spoilt(FORMAT_1, last, garbage))
    disk.capacity_bytes = disk.used_bytes()
    for term in (4, 5):
        journal = start(disk)
        assert layout_of(disk) is ONCE
        journal.put(group(1), state(term))
        flush_journal(journal)
        lose(disk)
    disk.capacity_bytes = None
    journal = start(disk)
    journal.write_twice()
    flush_journal(journal)
    assert states(journal) == STATES_OF_FORMAT_1 | {group(1): state(5)}
    assert layout_of(disk) is TWICE


@pytest.mark.parametrize("now", [False, True])
def test_format_1_is_rewritten_once_it_is_full(now: bool) -> None:
    """Until the new file has its name, the old one holds what is promised."""
    disk = with_content(FORMAT_1)
    disk.capacity_bytes = disk.used_bytes()
    journal = start(disk)
    disk.capacity_bytes = None
    journal.write_twice()
    job = None
    for term in range(4, 60):
        journal.put(group(1), state(term))
        job = journal.flush_job()
        assert job is not None
        if job.rename is not None:
            break
        job.run()
        journal.complete(job)
    assert job is not None
    for later in (100, 101):
        journal.put(group(1), state(later))
        if now:
            journal.flush_now()
    if not now:
        job.run()
        journal.complete(job)
    lose(disk)
    assert layout_of(disk) is (ONCE if now else TWICE)
    journal = start(disk)
    assert not journal.damaged
    known = journal.get(group(1))
    assert known is not None
    assert known.term == 101 if now else known.term > 3


def test_a_reader_of_format_1_refuses_format_2() -> None:
    """It looks for a header at 0 and at 256, and knows of the version before anything else."""
    _, content = voted()
    for at in (0, 256):
        magic, version = struct.unpack_from(">4sH", content, at)
        assert (magic, version) == (b"RMQJ", 2)
        assert struct.unpack_from(">I", content, at + 20)[0] == crc32c(content[at : at + 20])
