"""The bare entries of a log (elections, memberships, log-start moves), beside the segments.

They take no Kafka offset, so they never lie inside a segment. Each stores its own position twice
over (index and base offset), so a missing one shows as a step in `index - base offset`. Each record
is written twice, in different sectors: one bad sector or a torn write of one copy loses nothing.
Room for coming entries is kept allocated, so that an election works on a full disk.

Invariants: indexes ascend; base offsets and epochs never fall; `index - base_offset` grows by one
from entry to entry. An entry must be flushed before a later batch reaches a segment (the log's
duty); the epoch history is derived from here and never stored.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import Final

from attrs import define
from crc32c import crc32c

from raftmq.log.batch_reader import Epochs, is_zero
from raftmq.log.log_start import LogStart
from raftmq.log.model import BareEntry, NewerFormatError
from raftmq.ports import Disk, DiskFullError, File, replacing
from raftmq.types import LeaderEpoch, Offset, RaftIndex

# magic 4s, version uint8, kind uint8, 2 spare bytes, payload size uint32, leader epoch int32,
# index int64, base offset int64; then the payload; then crc of all before it uint32; zeros up to
# the end of the sector. Then the same once more.
_RECORD: Final = struct.Struct(">4sBB2xIiqq")
_CRC: Final = struct.Struct(">I")
_MAGIC: Final = b"RMQB"
VERSION: Final = 1
SECTOR: Final = 512
_COMPACT_AT: Final = 64 * 1024


def encode_entry(entry: BareEntry) -> bytes:
    """One slot: both copies."""
    head = _RECORD.pack(
        _MAGIC,
        VERSION,
        entry.kind,
        len(entry.payload),
        entry.leader_epoch,
        entry.index,
        entry.base_offset,
    )
    data = head + entry.payload
    data += _CRC.pack(crc32c(data))
    padded = data + bytes(-len(data) % SECTOR)
    return padded + padded


def decode_copy(data: bytes, at: int) -> tuple[BareEntry, int] | None:
    """The record at `at` and its padded size; None when there is no sound one.

    Raises:
        NewerFormatError: of a newer raftmq.
    """
    if len(data) < at + _RECORD.size + _CRC.size:
        return None
    magic, version, kind, size, epoch, index, base_offset = _RECORD.unpack_from(data, at)
    end = at + _RECORD.size + size
    if magic != _MAGIC or len(data) < end + _CRC.size:
        return None
    if crc32c(data[at:end]) != _CRC.unpack_from(data, end)[0]:
        return None
    if version > VERSION:
        raise NewerFormatError(f"bare.entries has format {version}, known is {VERSION}")
    entry = BareEntry(
        index=RaftIndex(index),
        leader_epoch=LeaderEpoch(epoch),
        base_offset=Offset(base_offset),
        kind=kind,
        payload=data[at + _RECORD.size : end],
    )
    used = end + _CRC.size - at
    return entry, used + -used % SECTOR


@define(slots=True)
class Slot:
    """An entry as found in the file; `is_whole` when both copies are sound."""

    entry: BareEntry
    position: int
    size: int
    is_whole: bool


@define(slots=True)
class Found:
    """All a file held: `is_tail_bad` when bytes other than zeros follow the last slot."""

    slots: list[Slot]
    end: int
    is_tail_bad: bool


def read_slots(data: bytes) -> Found:
    """Find every entry of which one copy is sound."""
    slots: list[Slot] = []
    position = 0
    while position < len(data):
        first = decode_copy(data, position)
        if first is not None:
            entry, padded = first
            second = decode_copy(data, position + padded)
            is_whole = second is not None and second[0] == entry
            slots.append(Slot(entry, position, 2 * padded, is_whole))
            position += 2 * padded
            continue
        if is_zero(data[position:]):
            break
        at = position + SECTOR
        while at < len(data) and decode_copy(data, at) is None:
            at += SECTOR
        later = decode_copy(data, at)
        if later is None:
            return Found(slots, position, True)
        entry, padded = later
        again = decode_copy(data, at + padded)
        if at == position + padded and (again is None or again[0] != entry):
            slots.append(Slot(entry, position, 2 * padded, False))  # its second copy
            position += 2 * padded
        else:
            position = at  # a whole slot is lost; a step in the indexes will show it
    return Found(slots, position, False)


class BareEntries:
    """The entries at or above the log start, in memory and in the file."""

    def __init__(self, disk: Disk, folder: str, reserve_bytes: int) -> None:
        self._disk = disk
        self._path = f"{folder}/bare.entries"
        self._reserve_bytes = reserve_bytes
        self._file: File | None = None
        self._end = 0  # where the next slot goes
        self._allocated = 0
        self._positions: list[int] = []
        self._start = LogStart()
        self._epochs: Epochs | None = None
        self.entries: list[BareEntry] = []
        self.indexes: list[int] = []
        self.offsets: list[int] = []
        self.dropped = 0  # entries that were dropped at the front: flush jobs count these, too
        self.is_new = False  # `read` made the file, whose name is not durable then

    # --- opening ----------------------------------------------------------------------------

    def read(self) -> Found:
        """What the file holds; makes it when absent.

        Raises:
            NewerFormatError: of a newer raftmq.
            DiskError: the device failed.
        """
        try:
            self._file = self._disk.open(self._path)
        except FileNotFoundError:
            self._file = self._disk.open(self._path, create=True)
            self.is_new = True
        size = self._file.size()
        found = read_slots(self._file.pread(size, 0))
        self._end = found.end
        self._allocated = size
        return found

    def load(self, slots: list[Slot], log_start: LogStart) -> None:
        """Take over what recovery accepted, a run of slots as `read` found them."""
        self.rebase(log_start)
        for slot in slots:
            self._remember(slot.entry, slot.position)
        if slots:
            self._end = slots[-1].position + slots[-1].size
        self._reserve()

    def rebase(self, log_start: LogStart) -> None:
        """The log begins at `log_start` now; entries below it are forgotten."""
        self._start = log_start
        count = bisect_left(self.indexes, log_start.index)
        if count:
            del self.entries[:count], self.indexes[:count], self.offsets[:count]
            del self._positions[:count]
            self.dropped += count
        self._epochs = None

    # --- lookups ----------------------------------------------------------------------------

    def count_below(self, index: int) -> int:
        """How many entries have an index below `index`."""
        return bisect_left(self.indexes, index)

    def count_before(self, offset: int) -> int:
        """How many entries have a base offset below `offset`."""
        return bisect_left(self.offsets, offset)

    def count_up_to(self, offset: int) -> int:
        """How many entries have a base offset not above `offset`."""
        return bisect_right(self.offsets, offset)

    def epochs(self) -> Epochs:
        """The epoch in force from each offset on."""
        if self._epochs is None:
            starts = [int(self._start.base_offset)]
            epochs = [int(self._start.previous_epoch)]
            for entry in self.entries:
                if entry.leader_epoch != epochs[-1]:
                    starts.append(entry.base_offset)
                    epochs.append(entry.leader_epoch)
            self._epochs = Epochs(tuple(starts), tuple(epochs))
        return self._epochs

    @property
    def last_epoch(self) -> int:
        """The epoch of the last entry, or the one before the log start."""
        return self.entries[-1].leader_epoch if self.entries else self._start.previous_epoch

    # --- changes ----------------------------------------------------------------------------

    @property
    def file(self) -> File:
        """The open file."""
        assert self._file is not None
        return self._file

    def append(self, entry: BareEntry) -> None:
        """Write an entry to the page cache, into room that was reserved.

        Raises:
            DiskFullError: the disk is full and the reserve used up; nothing changed.
        """
        slot = encode_entry(entry)
        try:
            self.file.pwrite(slot, self._end)
        except DiskFullError:
            self.file.truncate(self._end)
            self._allocated = self._end
            raise
        self._remember(entry, self._end)
        self._end += len(slot)
        self._epochs = None
        if self._allocated < self._end + self._reserve_bytes // 2:
            self._reserve()

    def write_again(self, start: RaftIndex) -> None:
        """Write the entries at or above `start` once more, in place, so that the next sync covers
        them whatever became of earlier ones.

        Raises:
            DiskError: the device failed.
        """
        for number in range(self.count_below(start), len(self.entries)):
            self.file.pwrite(encode_entry(self.entries[number]), self._positions[number])

    def truncate(self, end: RaftIndex) -> None:
        """Drop entries at or above `end`; durable on return.

        Raises:
            DiskError: the device failed.
        """
        count = self.count_below(end)
        if count < len(self.entries):
            self._end = self._positions[count]
            del self.entries[count:], self.indexes[count:], self.offsets[count:]
            del self._positions[count:]
            self._epochs = None
        self.wipe_tail()

    def wipe_tail(self) -> None:
        """Zero the file behind the last entry; durable on return."""
        if self._allocated > self._end:
            self.file.pwrite(bytes(self._allocated - self._end), self._end)
        self.file.fdatasync()

    def compact(self, *, now: bool = False) -> None:
        """Rewrite the file without what lies below the log start, once that is worth it.

        Raises:
            DiskError: the old file is still in place.
        """
        first = self._positions[0] if self._positions else self._end
        if not now and first < _COMPACT_AT:
            return
        positions: list[int] = []
        slots: list[bytes] = []
        end = 0
        for entry in self.entries:
            slots.append(encode_entry(entry))
            positions.append(end)
            end += len(slots[-1])
        with replacing(self._disk, self._path) as file:
            if slots:
                file.pwrite(b"".join(slots), 0)
            allocated = self._allocate_room(file, end, must=not now)
        self._file = file
        self._positions = positions
        self._end = end
        self._allocated = allocated

    def _allocate_room(self, file: File, end: int, *, must: bool) -> int:
        """Reserve room behind `end`; unless `must`, do without it on a full disk."""
        try:
            file.allocate(end + self._reserve_bytes)
        except DiskFullError:
            if must:
                raise
            return end
        return end + self._reserve_bytes

    def clear(self, log_start: LogStart) -> None:
        """Drop everything and begin at `log_start`; durable on return, and needs no room."""
        self.dropped += len(self.entries)
        self.entries, self.indexes, self.offsets, self._positions = [], [], [], []
        self._end = 0
        self.rebase(log_start)
        self.wipe_tail()
        self._reserve()

    def close(self) -> None:
        """Let go of the file; a flush job under way keeps it open."""
        self._file = None

    def _remember(self, entry: BareEntry, position: int) -> None:
        self.entries.append(entry)
        self.indexes.append(entry.index)
        self.offsets.append(entry.base_offset)
        self._positions.append(position)
        self._epochs = None

    def _reserve(self) -> None:
        target = self._end + self._reserve_bytes
        if self._allocated >= target:
            return
        try:
            self.file.allocate(target)
            self._allocated = target
        except DiskFullError:
            return  # what is allocated already is the reserve; try again at the next entry
