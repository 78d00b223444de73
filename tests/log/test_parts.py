"""The small parts of the log, each against the plainest thing that could do its work."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.log.bare_entries import BareEntries, encode_entry, read_slots
from raftmq.log.batch_reader import (
    BadBatch,
    Epochs,
    checked_batches,
    find_next_batch,
    walk_headers,
)
from raftmq.log.indexes import DamagedIndexError, OffsetIndex, SegmentSummary, TimeIndex
from raftmq.log.log_start import LogStart
from raftmq.log.model import BareEntry, LogConfig, LogEntry, NewerFormatError
from raftmq.log.recent import (
    COPIED_BYTES_MAX,
    OBJECT_BYTES,
    RecentBatch,
    RecentBatches,
    RecentBudget,
    kept,
)
from raftmq.log.segment import Damage, Ranges, VerifiedRanges
from raftmq.log.segments import retention_target
from raftmq.log.shared import FileCache, IndexCache
from raftmq.types import LeaderEpoch, Offset, RaftIndex
from tests.log.helpers import append, batch, elect, flush, open_log, sim_disk

ANY = Epochs((0,), (1,))


# --- ranges --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "cut"]), st.integers(0, 40), st.integers(0, 12)),
        max_size=40,
    )
)
def test_ranges_against_a_set(steps: list[tuple[str, int, int]]) -> None:
    ranges = Ranges()
    plain: set[int] = set()
    for verb, start, width in steps:
        if verb == "add":
            ranges.add(start, start + width)
            plain |= set(range(start, start + width))
        else:
            ranges.cut(start)
            plain = {p for p in plain if p < start}
        for position in range(55):
            end = position
            while end in plain:
                end += 1
            assert ranges.end_from(position) == end


def test_verified_bytes_lapse_after_two_rotations() -> None:
    verified = VerifiedRanges()
    verified.add(0, 10)
    verified.rotate()
    verified.add(10, 20)
    assert verified.end_from(3) == 20
    verified.cut(15)
    assert verified.end_from(3) == 15
    verified.rotate()
    assert verified.end_from(3) == 3
    assert verified.end_from(12) == 15
    verified.clear()
    assert verified.end_from(12) == 12


# --- recent batches ------------------------------------------------------------------------------


def recent(base: int, count: int = 1, size: int = 10, position: int = 0) -> RecentBatch:
    entry = LogEntry(RaftIndex(base), RaftIndex(base + count), LeaderEpoch(1), 0, b"")
    return RecentBatch(entry, base, base + count, position, 0, size)


def test_the_budget_holds_over_all_logs() -> None:
    budget = RecentBudget(10_000)
    logs = [RecentBatches(budget, 1 << 30) for _ in range(3)]
    random = Random(1)
    ends = [0, 0, 0]
    for _ in range(3000):
        number = random.randrange(3)
        if random.random() < 0.05:
            ends[number] = random.randrange(max(0, ends[number] - 3), ends[number] + 1)
            logs[number].truncate(ends[number])
        else:
            logs[number].add(recent(ends[number], 1, random.randrange(1, 30)))
            ends[number] += 1
        assert budget.used_bytes <= 10_000
        kept = [item for log in logs for item in log._batches if item is not None]
        assert budget.used_bytes == sum(item.size + OBJECT_BYTES for item in kept)
        assert len(kept) > 3 or number + sum(ends) < 30
        for log, end in zip(logs, ends, strict=True):
            offsets = [o for o in range(max(0, end - 40), end) if log.find(o) is not None]
            assert offsets == list(range(end - len(log), end)), "contiguous up to the end"
    for log in logs:
        log.clear()
    assert budget.used_bytes == 0
    logs[0].evict_oldest()


def test_a_log_keeps_what_it_may_and_its_newest() -> None:
    budget = RecentBudget(100_000)
    log = RecentBatches(budget, 5 * (OBJECT_BYTES + 10))
    for base in range(100):
        log.add(recent(base))
        assert len(log) == min(base + 1, 5)
        assert log.find(base) is not None
    assert budget.used_bytes == 5 * (OBJECT_BYTES + 10)


def test_logs_that_went_are_forgotten() -> None:
    """Below the budget nothing is evicted, so nobody else lets go of them."""
    budget = RecentBudget(1 << 30)
    live = RecentBatches(budget, 1 << 30)
    live.add(recent(0))
    for _ in range(2_000):
        gone = RecentBatches(budget, 1 << 30)
        for base in range(10):
            gone.add(recent(base))
        gone.clear()
    assert len(budget._tokens) < 10_000
    assert live.find(0) is not None
    budget.bytes_max = 1
    budget.charge(live, 0)
    assert len(live) == 0, "it is still the oldest, and goes first"


def test_recent_batches_are_found() -> None:
    batches = RecentBatches(RecentBudget(), 1 << 30)
    for base in range(0, 30, 3):
        batches.add(recent(base, 3, 10, base // 3 * 10))
    slot = batches.find(7)
    assert slot is not None
    found = batches.at(slot)
    assert found is not None
    assert (found.base_offset, found.next_offset) == (6, 9)
    assert batches.find(30) is None
    assert batches.last_within(slot, 30, 1000, 0).base_offset == 27
    assert batches.last_within(slot, 16, 1000, 0).base_offset == 12
    assert batches.last_within(slot, 30, 45, 0).base_offset == 9
    for base in range(9, 30, 3):
        batches.place(base, base, 7)
    assert batches.last_within(slot, 30, 1000, 0).base_offset == 6
    batches.place(99, 0, 0)
    batches.drop_below(7)
    assert batches.find(5) is None
    assert batches.find(6) is not None


# --- indexes -------------------------------------------------------------------------------------


def indexes(random: Random) -> tuple[OffsetIndex, TimeIndex, list[tuple[int, int, int]]]:
    disk = sim_disk()
    disk.make_directories("d")
    files, cache = FileCache(disk, 1), IndexCache(100)
    offsets = OffsetIndex("d/i", 50, files, cache)
    times = TimeIndex("d/t", 50, files, cache)
    summary = SegmentSummary(50, 0, 0, -1, 50)
    pairs: list[tuple[int, int, int]] = []
    offset, position, stamp = 50, 0, 0
    for _ in range(random.randrange(0, 300)):
        offset += random.randrange(1, 5)
        position += random.randrange(61, 400)
        stamp += random.randrange(1, 9)
        pairs.append((offset, position, stamp))
        if offsets.append(offset, position) | times.append(stamp, offset):
            offsets.write(summary)
            times.write(summary)
            if random.random() < 0.5:
                offsets.open()
                times.open()
    return offsets, times, pairs


@pytest.mark.parametrize("seed", range(20))
def test_indexes_against_a_list(seed: int) -> None:
    random = Random(seed)
    offsets, times, pairs = indexes(random)
    for round_number in range(3):
        for _ in range(50):
            offset = random.randrange(50, 1000)
            below = [(o, p) for o, p, _ in pairs if o <= offset]
            assert offsets.floor(offset) == (below[-1] if below else (50, 0))
            position = random.randrange(0, 60_000)
            below = [(o, p) for o, p, _ in pairs if p <= position]
            assert offsets.floor_position(position) == (below[-1] if below else (50, 0))
            stamp = random.randrange(0, 1500)
            starts = [o for o, _, t in pairs if t < stamp]
            assert times.start_for(stamp) == (starts[-1] if starts else 50)
            known = [(t, o) for o, _, t in pairs if o <= offset]
            assert times.greatest_before(offset) == (known[-1] if known else None)
        cut = random.randrange(50, 1000) if round_number else 10_000
        offsets.cut(cut)
        times.cut(cut)
        pairs = [pair for pair in pairs if pair[0] < cut]
        assert (offsets.count, times.count) == (len(pairs), len(pairs))


def test_an_index_that_cannot_be_used() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    files, cache = FileCache(disk, 8), IndexCache()
    index = OffsetIndex("d/i", 0, files, cache)
    with pytest.raises(DamagedIndexError):
        index.open()
    index.append(5, 100)
    index.write(SegmentSummary(0, 0, 0, 0, 0))
    assert index.pairs() == [(5, 100)]
    index.remove()
    assert not disk.exists("d/i")
    with pytest.raises(DamagedIndexError):
        index.floor(9)


def test_the_index_cache_is_bounded() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    files, cache = FileCache(disk, 2), IndexCache(1000)
    summary = SegmentSummary(0, 0, 0, 0, 0)
    made = [OffsetIndex(f"d/{n}", 0, files, cache) for n in range(10)]
    for index in made:
        for number in range(50):
            index.append(number + 1, number * 100)
        index.write(summary)
    for _ in range(2):
        for index in made:
            assert index.floor(30) == (30, 2900)
            assert cache.used_bytes <= 1000
            assert len(files) <= 2


# --- batches -------------------------------------------------------------------------------------


def test_checked_batches_of_any_chunk_size() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    file = disk.open("d/f", create=True)
    sizes = [0, 10, 500, 3000, 1]
    data = [batch(n, 1, size=size) for n, size in enumerate(sizes)]
    whole = b"".join(data)
    file.pwrite(whole, 0)
    for chunk in (61, 62, 100, 1000, 1 << 20):
        found = list(checked_batches(file, 0, len(whole), 0, ANY, chunk=chunk))
        assert [bytes(b.data) for b in found] == data
    headers = list(walk_headers(file, 0, len(whole), 0))
    assert [h.base_offset for _, h in headers] == [0, 1, 2, 3, 4]
    for end, is_short in ((30, True), (len(data[0]) + 70, True)):
        with pytest.raises(BadBatch) as caught:
            list(checked_batches(file, 0, end, 0, ANY))
        assert caught.value.is_short == is_short
        with pytest.raises(BadBatch):
            list(walk_headers(file, 0, end, 0))
    with pytest.raises(BadBatch):
        list(walk_headers(file, 0, len(whole), 1))
    with pytest.raises(BadBatch):  # the range is longer than the file
        list(checked_batches(file, 0, len(whole) + 999, 0, ANY))
    with pytest.raises(BadBatch):
        list(walk_headers(file, 0, len(whole) + 9, 0))
    file.truncate(len(whole) - 1)
    with pytest.raises(BadBatch) as caught:
        list(checked_batches(file, 0, len(whole), 0, ANY, chunk=61))
    assert caught.value.is_short


def test_epochs() -> None:
    epochs = Epochs((10, 20, 20, 30), (3, 4, 5, 8))
    assert [epochs.at(o) for o in (0, 10, 19, 20, 29, 30, 99)] == [3, 3, 3, 5, 5, 8, 8]
    assert epochs.allows(5, 2)
    assert not epochs.allows(5, 4)
    assert epochs.allows(20, 5)
    assert not epochs.allows(20, 4)


def test_a_batch_is_found_wherever_it_begins() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    wanted = batch(7, 1, size=40)
    for lead in (0, 1, 60, 61, (1 << 20) - 70, (1 << 20) - 10, (1 << 20) + 5):
        file = disk.open(f"d/{lead}", create=True)
        file.pwrite(b"\x02" * min(lead, 2000), 0)
        file.pwrite(wanted, lead)
        end = lead + len(wanted)
        assert find_next_batch(file, 0, end, 5, 9, ANY) == (lead, 7)
        assert find_next_batch(file, 0, end, 8, 9, ANY) is None
        assert find_next_batch(file, 0, end - 1, 5, 9, ANY) is None
    assert find_next_batch(file, 0, end + 500, 5, 9, ANY) is not None, "the file is shorter"


# --- bare entries and log start ------------------------------------------------------------------


@given(st.binary(max_size=3000), st.integers(1, 200), st.integers(0, 1 << 40))
def test_bare_entries_round_trip(payload: bytes, kind: int, index: int) -> None:
    entry = BareEntry(RaftIndex(index), LeaderEpoch(9), Offset(index // 2), kind, payload)
    data = encode_entry(entry)
    found = read_slots(data + bytes(1024))
    assert [slot.entry for slot in found.slots] == [entry]
    assert found.end == len(data)
    assert not found.is_tail_bad
    assert read_slots(data[:-600]).slots == [] or read_slots(data[:-600]).slots[0].entry == entry


def test_closing_bare_entries_twice() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    entries = BareEntries(disk, "d", 1000)
    entries.read()
    entries.close()
    entries.close()


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 100),
    st.integers(0, 100),
    st.binary(max_size=100),
    st.binary(max_size=2000),
)
def test_log_start_round_trip(base: int, more: int, bare: int, voters: bytes, state: bytes) -> None:
    start = LogStart(
        Offset(base + more), RaftIndex(base + bare), LeaderEpoch(3), voters, state, Offset(base)
    )
    data = start.encode()
    assert LogStart.decode(data) == start
    assert LogStart.decode(memoryview(data)) == start


def test_wrong_log_starts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = LogStart(Offset(5), RaftIndex(6), LeaderEpoch(1), b"abc", b"def").encode()
    for cut in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            LogStart.decode(data[:cut])
    for position in range(len(data)):
        wrong = bytearray(data)
        wrong[position] ^= 4
        with pytest.raises(RemoteProtocolError):
            LogStart.decode(wrong)
    from crc32c import crc32c

    from raftmq.log import log_start

    for at, value in ((8, 1 << 40), (16, 9), (32, 77)):
        wrong = bytearray(data)
        size = 4 if at == 32 else 8
        wrong[at : at + size] = (-value if at == 8 else value).to_bytes(size, "big", signed=True)
        wrong[-4:] = crc32c(wrong[:-4]).to_bytes(4, "big")
        with pytest.raises(RemoteProtocolError):
            LogStart.decode(wrong)
    monkeypatch.setattr(log_start, "VERSION", 0)
    with pytest.raises(NewerFormatError):
        LogStart.decode(data)


# --- files, retention, damage --------------------------------------------------------------------


def test_the_file_cache_forgets_the_least_recently_used() -> None:
    disk = sim_disk()
    disk.make_directories("d")
    for name in "abc":
        disk.open(f"d/{name}", create=True).close()
    files = FileCache(disk, 2)
    first = files.get("d/a")
    files.get("d/b")
    assert files.get("d/a") is first
    files.get("d/c")
    assert len(files) == 2
    assert files.get("d/a") is first
    assert disk.open_files == 2
    files.forget("d/a")
    files.forget("d/zzz")
    assert files.get("d/a") is not first
    with pytest.raises(FileNotFoundError):
        files.get("d/q")


class FakeSegment:
    def __init__(self, base_offset: int, end_offset: int, size: int, max_timestamp: int) -> None:
        self.base_offset = base_offset
        self.end_offset = end_offset
        self.size = size
        self.max_timestamp = max_timestamp
        self.created_ms = 90
        self.damages: list[Damage] = []


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(-1, 100)), max_size=8),
    st.integers(-1, 100),
    st.integers(-1, 300),
    st.integers(0, 80),
    st.integers(0, 20),
)
def test_retention_by_rule(
    shapes: list[tuple[int, int]], age: int, kept_bytes: int, below: int, start: int
) -> None:
    segments = [
        FakeSegment(10 * n, 10 * n + 10, size, stamp) for n, (size, stamp) in enumerate(shapes)
    ]
    config = LogConfig(retention_ms=age, retention_bytes=kept_bytes)
    target = retention_target(segments, config, 100, below, start)
    gone = [s for s in segments if target is not None and s.end_offset <= target]
    assert target is None or (start < target <= below and len(gone) < len(segments))
    left = sum(s.size for s in segments)
    for at, segment in enumerate(gone):
        left -= segment.size
        newest = next((s.max_timestamp for s in segments[at:-1] if s.max_timestamp >= 0), 90)
        assert (age >= 0 and 100 - newest > age) or (0 <= kept_bytes <= left)


def test_records_without_timestamps_are_as_old_as_what_comes_after_them() -> None:
    segments = [FakeSegment(10 * n, 10 * n + 10, 1, -1) for n in range(3)]
    for now_ms, target in ((140, None), (141, 20)):
        config = LogConfig(retention_ms=50)
        assert retention_target(segments, config, now_ms, 100, 0) == target
    segments[-1].created_ms = 0  # it ends in damage, say
    assert retention_target(segments, config, 10**6, 100, 0) is None


def test_damage_that_contains_damage() -> None:
    disk = sim_disk()
    log = open_log(disk)
    elect(log, 1)
    flush(log)
    for _ in range(5):
        append(log, 1)
    segment = log._segments.all[0]
    segment.mark_damaged(Damage(1, 2, 89, 178))
    segment.mark_damaged(Damage(3, 4, 267, 356))
    assert log.damaged == [(1, 2), (3, 4)]
    segment.mark_damaged(Damage(0, 2, 0, 178))
    assert log.damaged == [(0, 2), (3, 4)]


@pytest.mark.parametrize("size", [1, COPIED_BYTES_MAX, COPIED_BYTES_MAX + 1])
def test_a_small_batch_does_not_keep_the_frame_it_came_in(size: int) -> None:
    frame = bytearray(size + 100)
    batch = memoryview(frame)[50 : 50 + size]
    is_view = kept(batch) is batch
    assert is_view == (size > COPIED_BYTES_MAX)
    assert bytes(kept(batch)) == bytes(batch)
