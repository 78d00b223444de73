"""Opening a log after something happened: what is cut, what is damage, what is mended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from raftmq.log.model import DamagedError
from raftmq.records import NewRecord, build_batch
from raftmq.runtime.disk import RealDisk
from raftmq.types import Offset, RaftIndex
from tests.log.helpers import (
    BIG,
    FOLDER,
    SMALL,
    append,
    batch,
    filled,
    flush,
    model_of,
    open_log,
    readable,
    segment,
    sim_disk,
    span_bytes,
)

# --- folders and names ---------------------------------------------------------------------------


class SyncsNoted(RealDisk):
    """Notes which folders are synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync_directory(self, path: str) -> None:
        super().sync_directory(path)
        self.synced.append(path)


def test_a_folder_that_another_process_made_is_made_durable(tmp_path: Path) -> None:
    """It may have died before it was; the log's own names are durable then under no name."""
    folder = str(tmp_path / "a-0")
    for is_made in (False, True):
        if is_made:
            Path(folder).mkdir()
        disk = SyncsNoted()
        open_log(disk, folder=folder).close()
        assert disk.synced.count(str(tmp_path)) == 1
        assert disk.synced[-1] == folder
        disk.synced.clear()
        open_log(disk, folder=folder).close()
        assert disk.synced == [folder], "one sync opens it again"
        shutil.rmtree(folder)


# --- torn tails ----------------------------------------------------------------------------------


def test_torn_tails_of_every_length_are_cut() -> None:
    disk = sim_disk()
    log = filled(disk, 4, BIG)
    whole = disk.content(segment())
    model = model_of(log)
    sizes = [len(e.payload) for e in model.entries[1:]]
    for size in range(len(whole) - sizes[-1], len(whole)):
        disk.overwrite(segment(), whole[:size])
        opened = open_log(disk, BIG, claimed=7)
        assert opened.log_end_offset == 6
        assert opened.recovery.cut == (size > len(whole) - sizes[-1])
        assert opened.recovery.cut_claimed_end == 0, "a short file cannot have been synced whole"
        assert opened.damaged == []
        append(opened, 1)
        flush(opened)
        assert open_log(disk, BIG, claimed=opened.flushed_end).log_end_offset == 7


@pytest.mark.parametrize("reserve_bytes", [0, 4096])
@pytest.mark.parametrize("value", [b"x" * 40, bytes(40)], ids=["other bytes", "zeros at the end"])
def test_a_wrong_length_of_the_newest_batch_is_no_torn_write(
    reserve_bytes: int, value: bytes
) -> None:
    """It says to be longer than the file, or than the room that is allocated behind it; what it
    promised is remembered all the same."""
    disk, config = sim_disk(), attrs.evolve(BIG, segment_reserve_bytes=reserve_bytes)
    log = filled(disk, 4, config)
    data = build_batch(
        [NewRecord(None, value, 1), NewRecord(None, value, 1)], base_offset=8, leader_epoch=1
    )
    position = log.size_bytes
    log.append_batch(data)
    end = flush(log)
    content = disk.content(segment())
    for number in range(32):
        disk.overwrite(segment(), content)
        disk.flip(segment(), position + 8 + number // 8, number % 8)
        opened = open_log(disk, config, claimed=9)
        assert opened.recovery.cut_claimed_end in (end, end - 1), number
    # A write that was cut short says nothing.
    zeros = bytes(len(content) - position - len(data) // 2)
    disk.overwrite(segment(), content[: position + len(data) // 2] + zeros[:reserve_bytes])
    short = bytearray(disk.content(segment()))
    short[position + 8] = 1
    disk.overwrite(segment(), bytes(short))
    assert open_log(disk, config, claimed=9).recovery.cut_claimed_end == 0


def test_a_whole_but_wrong_last_batch_is_cut_and_its_claim_reported() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    whole = disk.content(segment())
    size = len(whole) // 4
    for position in range(3 * size, len(whole)):
        disk.overwrite(segment(), whole)
        disk.flip(segment(), position, position % 8)
        opened = open_log(disk, BIG, claimed=7)
        assert opened.recovery.cut
        # 9 is what the batch claimed; a broken header claims at least one record.
        assert opened.recovery.cut_claimed_end in (9, 8), position
        assert opened.log_end_offset == 6
        assert opened.recovery.claimed_end == 0


def test_zeros_at_the_end_claim_nothing() -> None:
    disk = sim_disk()
    filled(disk, 3, BIG)
    whole = disk.content(segment())
    disk.overwrite(segment(), whole + bytes(5000))
    log = open_log(disk, BIG, claimed=7)
    assert log.recovery.cut
    assert log.recovery.cut_claimed_end == 0
    assert disk.files()[segment()] == len(whole)


def test_a_reserve_is_no_tail() -> None:
    disk = sim_disk()
    config = attrs.evolve(BIG, segment_reserve_bytes=10_000)
    log = filled(disk, 3, config)
    assert disk.files()[segment()] >= 10_000
    size = log.size_bytes
    log = open_log(disk, config, claimed=log.flushed_end)
    assert not log.recovery.cut
    assert log.size_bytes == size
    for _ in range(100):
        append(log, 1, size=300)
        flush(log)
    assert disk.files()[segment()] >= log.size_bytes + 5000
    assert open_log(disk, config, claimed=log.flushed_end).log_end_offset == 106
    small = attrs.evolve(config, segment_bytes=8000)
    log = open_log(disk, small, claimed=log.flushed_end)
    append(log, 1)
    flush(log)
    assert disk.files()[segment()] == log._segments.all[0].size, "a closed segment has no reserve"


def test_below_the_claim_a_torn_tail_is_damage() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    whole = disk.content(segment())
    disk.overwrite(segment(), whole[:-5])
    log = open_log(disk, BIG, claimed=9)
    assert not log.recovery.cut
    assert log.recovery.damaged == [(6, 8)]
    assert log.recovery.claimed_end == 9
    assert (log.log_end_offset, log.end_index) == (8, 9)
    append(log, 1)
    flush(log)
    assert disk.content(segment()) == whole[:-5], "nothing is written behind damage"
    assert disk.exists(segment(8))
    with pytest.raises(DamagedError):
        log.entries(RaftIndex(7), 100)
    assert len(readable(log)) == 5
    log = open_log(disk, BIG, claimed=log.flushed_end)
    assert log.damaged == [(6, 8)]


def test_a_claim_in_the_middle_of_what_is_torn() -> None:
    """Bytes below the claim are damage, those above it are cut: here one batch spans both."""
    disk = sim_disk()
    filled(disk, 4, BIG)
    disk.overwrite(segment(), disk.content(segment())[:-5])
    log = open_log(disk, BIG, claimed=8)
    assert log.log_end_offset == 7
    assert log.damaged == [(6, 7)]


def test_damage_before_a_sound_batch_is_damage_whatever_the_claim() -> None:
    disk = sim_disk()
    filled(disk, 4, BIG)
    size = disk.files()[segment()] // 4
    disk.flip(segment(), size + 90)
    log = open_log(disk, BIG)
    assert log.damaged == [(2, 4)]
    assert log.recovery.claimed_end == 9
    assert sorted(readable(log)) == [0, 1, 5, 7]


@pytest.mark.slow
def test_every_flipped_byte_is_detected_and_never_served() -> None:
    disk = sim_disk()
    log = filled(disk, 3, attrs.evolve(SMALL, segment_bytes=300), size=9)
    model = model_of(log)
    payloads = {e.start: e.payload for e in model.entries}
    log.close()
    files = {path: disk.content(path) for path in disk.files(FOLDER)}
    for path, whole in files.items():
        for position in range(len(whole)):
            for other, content in files.items():
                disk.open(other, create=True)
                disk.overwrite(other, content)
            disk.flip(path, position, position % 8)
            opened = open_log(disk, log.config, claimed=7)
            found = readable(opened)
            assert all(payloads[start] == payload for start, payload in found.items())
            if path.endswith(".log"):
                assert opened.damaged != [], (path, position)
                assert len(found) == len(payloads) - 1
                start = opened.damaged[0][0]
                with pytest.raises(DamagedError):
                    opened.locate(start, 1 << 20, Offset(6))
                good = [e for e in model.entries[1:] if e.end - 1 <= start]
                spans = opened.locate(Offset(0), 1 << 20, Offset(6)) if good else []
                assert span_bytes(spans) == b"".join(e.payload for e in good)
            else:
                assert len(found) == len(payloads), (path, position)
                assert opened.damaged == []
            assert opened.log_end_offset == 6


def test_the_scrub_finds_what_recovery_trusts() -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    disk.flip(segment(), 300)
    log = open_log(disk, claimed=log.flushed_end)
    assert log.recovery.damaged == []
    found: list[tuple[Offset, Offset]] = []
    while not found:
        found = log.scrub(500)
    assert found == log.damaged
    assert log.recovery.claimed_end == 0
    log.close()
    log = open_log(disk, claimed=log.flushed_end)
    assert log.recovery.damaged == found, "what was found once is looked for at the next opening"


@pytest.mark.parametrize("end", ["closed", "power"])
@pytest.mark.parametrize("finder", ["scrub", "opening"])
def test_damage_in_the_last_segment_is_known_at_the_next_opening(finder: str, end: str) -> None:
    """Its index would let an opening begin near the end, behind what was found."""
    disk = sim_disk()
    log = filled(disk, 200, attrs.evolve(SMALL, segment_bytes=1 << 20))
    flushed = log.flushed_end
    log.close()
    disk.flip(segment(), 300)
    if finder == "opening":
        disk.remove(segment(suffix="index"))
    log = open_log(disk, log.config, claimed=flushed)
    while not log.damaged:
        log.scrub(5000)
    found = log.damaged
    if end == "closed":
        log.close()
    for _ in range(2):
        log = open_log(disk, log.config, claimed=flushed)
        assert log.recovery.damaged == found
        append(log, 1)
        flushed = flush(log)
    log.repair(found[0][0], [batch(2, 1, 2, 60, timestamp=1010)])
    log.close()
    log = open_log(disk, log.config, claimed=flushed)
    assert log.damaged == []
    assert log.recovery.scanned_bytes < disk.files()[segment()], "it is trusted again"


def test_where_there_is_damage_the_whole_segment_is_checked() -> None:
    """Else one opening would tell less than the next."""
    disk = sim_disk()
    log = filled(disk, 200, attrs.evolve(SMALL, segment_bytes=1 << 20))
    for each in log._segments.all:
        each.write_indexes(is_closed=False)
    disk.flip(segment(), 300)
    opened = open_log(disk, log.config, claimed=log.flushed_end)
    assert opened.recovery.scanned_bytes < 1000
    assert opened.damaged == []
    disk.flip(segment(), disk.files()[segment()] - 20)
    log = open_log(disk, log.config, claimed=log.flushed_end)
    assert log.damaged == [(2, 4), (398, 400)]


@pytest.mark.parametrize("reader", ["locate", "entries", "headers", "job"])
def test_reading_finds_damage_too(reader: str) -> None:
    disk = sim_disk()
    log = filled(disk, 20)
    log.close()
    position = 0 if reader == "headers" else 300
    disk.flip(segment(), position, 5)
    log = open_log(disk, claimed=log.flushed_end)
    start = Offset(2 if position else 0)
    if reader == "job":
        job = log.needs_verification(start, 1)
        assert job is not None
        job.run()
        assert log.checked(job) == [(start, start + 2)]
        with pytest.raises(DamagedError):
            log.needs_verification(start, 1)
    reads: dict[str, Callable[[], object]] = {
        "headers": lambda: list(log.headers(start, Offset(40))),
        "entries": lambda: log.entries(log.index_of(start), 100),
        "locate": lambda: log.locate(start, 100, Offset(40)),
    }
    with pytest.raises(DamagedError) as caught:
        reads.get(reader, reads["locate"])()
    assert (caught.value.start, caught.value.end) == (start, start + 2)
    assert log.damaged == [(start, start + 2)]


@pytest.mark.parametrize("number", [0, 3, 9])
@pytest.mark.parametrize(
    "byte",
    [
        pytest.param(7, id="base-offset"),
        pytest.param(10, id="length-far"),
        pytest.param(11, id="length-near"),
        pytest.param(16, id="magic"),
        pytest.param(23, id="last-offset-far"),
        pytest.param(26, id="last-offset-near"),
    ],
)
def test_a_header_that_is_wrong_of_its_reach_hides_nothing_behind_it(
    number: int, byte: int
) -> None:
    """Who reads headers alone reads all of them or is told: else the producers of what is behind
    would be unknown, and their next batches refused."""
    disk = sim_disk()
    log = filled(disk, 10, attrs.evolve(SMALL, segment_bytes=1 << 20))
    log.close()
    size = disk.files()[segment()] // 10
    disk.flip(segment(), number * size + byte, 2)
    log = open_log(disk, claimed=log.flushed_end)
    with pytest.raises(DamagedError) as caught:
        list(log.headers(Offset(0), log.log_end_offset))
    assert (caught.value.start, caught.value.end) == (2 * number, 2 * number + 2)
    assert log.damaged == [(2 * number, 2 * number + 2)]
    rest = log.headers(Offset(2 * number + 2), log.log_end_offset)
    assert [header.base_offset for header in rest] == list(range(2 * number + 2, 20, 2))


# --- indexes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
@pytest.mark.parametrize("harm", ["missing", "empty", "short", "header", "entry", "other"])
def test_damaged_indexes_are_rebuilt(suffix: str, harm: str) -> None:
    disk = sim_disk()
    config = attrs.evolve(SMALL, segment_bytes=8000)
    log = filled(disk, 100, config)
    model = model_of(log)
    bases = [s.base_offset for s in log._segments.all]
    assert len(bases) > 2
    log.close()
    for base in bases:
        path = segment(base, suffix)
        data = disk.content(path)
        if harm == "missing":
            disk.remove(path)
        elif harm == "other":
            disk.overwrite(path, disk.content(segment(bases[-1 if base == 0 else 0], suffix)))
        else:
            size = {"empty": 0, "short": len(data) - 1, "header": len(data), "entry": len(data)}
            disk.overwrite(path, data[: size[harm]])
            if harm in ("header", "entry"):
                disk.flip(path, 20 if harm == "header" else 70, 3)
    log = open_log(disk, config, claimed=log.flushed_end)
    model.check(log)
    for number in range(100):
        assert log.offset_for_timestamp(1000 + 10 * number, Offset(200)) == (
            1000 + 10 * number,
            2 * number,
            1,
        )
        expected = model.entries[number + 1].payload
        assert span_bytes(log.locate(Offset(2 * number), 1, Offset(200))) == expected
    for end in range(2, 200, 10):
        assert log.max_timestamp(Offset(end)) == (1000 + 5 * end - 9, end - 1, 1)


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_one_index_older_than_the_other_is_not_believed(suffix: str) -> None:
    """A crash can leave one file as it was at an earlier write; its checksums are right."""
    disk = sim_disk()
    log = filled(disk, 4, SMALL)
    active = log._segments.all[-1]
    active.write_indexes(is_closed=False)
    older = disk.content(segment(0, suffix))
    newest = log.log_end_offset
    append(log, 1, timestamp=90_000)
    for _ in range(4):
        append(log, 1, timestamp=5_000)
    active.write_indexes(is_closed=False)
    append(log, 1, timestamp=90_000)
    flush(log)
    disk.overwrite(segment(0, suffix), older)
    log = open_log(disk, claimed=log.flushed_end)
    assert log.max_timestamp(log.log_end_offset) == (90_000, newest, 1)
    assert log.offset_for_timestamp(80_000, log.log_end_offset) == (90_000, newest, 1)


def test_a_wrong_index_with_right_checksums_shows_nothing_wrong() -> None:
    """Say a device brought back an older index: pairs point into the middle of batches."""
    disk = sim_disk()
    log = filled(disk, 40, BIG)
    model = model_of(log)
    index = log._segments.all[0].offset_index
    for at in range(len(index._pending_values)):
        index._pending_values[at] += 7
    log._recent.clear()
    log._forget_positions()
    for offset in range(0, 80, 2):
        for end in range(offset + 2, 81, 6):
            data = span_bytes(log.locate(Offset(offset), 700, Offset(end)))
            whole = b"".join(e.payload for e in model.entries[1:] if offset < e.end - 1 <= end)
            assert whole.startswith(data)
            assert data
    model.check(log)
