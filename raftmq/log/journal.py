"""The hard state of all Raft groups of a node: one small checksummed journal.

A vote, a term, "this storage takes part in that group" must be durable before anything that depends
on them is sent; one file for all groups makes a thousand elections a handful of fsyncs. Lazy
records (claimed flushed end, high watermark) reach the page cache and ride with the next flush.

Each record is a whole state of one group, so the newest sound one counts. It is written twice by
one write, into two sectors of one page; a sector reaches the device whole or not at all. So:

- One copy sound, the other not: the record counts. Either a flushed copy went bad, or a power loss
  kept half of a write that no promise rests on. Keeping a promise that was never made is harmless.
- Neither sound, and both hold something: no power loss leaves that, so it is damage.
- Neither sound, and one is empty: a write that no promise rests on, unless a later record says that
  the journal was flushed that far when it was written, or the header counts it: then it is damage.

After damage it is not known to which group the record belonged: `damaged` is set and no state is
given out, since any may be older than what was promised. The n-th record has the sequence of the
header plus n; one with another sequence does not count.

Room is kept allocated, so that votes work on a full disk. A full file is rewritten under another
name, synced and renamed, all in a flush job. After a failed fsync the node stops. Files of format
1, where each record is written once, keep that format until `write_twice`, so that a node can go
back to the version that wrote them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final
from uuid import UUID

from attrs import define, field, frozen
from crc32c import crc32c

from raftmq.log.model import FlushJob, NewerFormatError
from raftmq.ports import Disk, DiskError, DiskFullError, File
from raftmq.types import NodeId, RaftGroupId, ReplicaId, StorageId, TopicId

VERSION: Final = 2
RECORD_SIZE: Final = 128
SECTOR_SIZE: Final = 512
_MAGIC: Final = b"RMQJ"
# File header, twice in each of its sectors, 256 bytes each, so that a reader of format 1 finds and
# refuses it: magic 4s, version uint16, is_damaged uint8, spare byte, first sequence uint64, count
# of records that were written with the header uint32, crc uint32.
_HEADER: Final = struct.Struct(">4sHBxQI")
_HEADER_PITCH: Final = 256
# Record: flags uint8, 3 spare bytes, sequence uint64, flushed sequence uint64, topic id 16s,
# partition int32, creation epoch int64, term int64, vote node int32, vote storage uint64,
# bootstrapped storage uint64, flushed end int64, cut floor int64, commit end int64, zeros, and at
# the very end the crc of all before it uint32.
_RECORD: Final = struct.Struct(">B3xQQ16siqqiQQqqq")
_CRC: Final = struct.Struct(">I")
_CRC_POSITION: Final = RECORD_SIZE - _CRC.size
_HAS_VOTE: Final = 1
_HAS_BOOTSTRAPPED: Final = 2
_FORGOTTEN: Final = 4
_VOID: Final = 8  # takes the place of a record that was never flushed
_EMPTY: Final = bytes(RECORD_SIZE)
assert _RECORD.size <= _CRC_POSITION


@frozen(slots=True)
class Layout:
    """Where records stand in a file of one format.

    A file grows by cells: so many records one after the other, then the same again. A cell of
    format 2 is two sectors of one 4 KiB page, so it costs the device no more than one.

    Attributes:
        half_size: bytes of one copy of a cell's records.
    """

    version: int
    copies: int
    header_size: int
    half_size: int

    def image(self, records: bytes) -> bytes:
        """Bytes of whole cells for records that begin one."""
        size, copies = self.half_size, self.copies
        if 0 < len(records) <= size:
            return records.ljust(size, b"\0") * copies
        cells = (records[at : at + size] for at in range(0, len(records), size))
        return b"".join([cell.ljust(size, b"\0") * copies for cell in cells])

    def positions(self, slot: int) -> tuple[int, ...]:
        """Where the copies of the n-th record stand."""
        cell, at = divmod(slot * RECORD_SIZE, self.half_size)
        first = self.header_size + cell * self.half_size * self.copies + at
        return tuple(first + number * self.half_size for number in range(self.copies))

    def slots(self, data: bytes) -> Iterator[tuple[int, list[bytes]]]:
        """Number and copies of every place for a record that is not empty."""
        data = data.rstrip(b"\0")
        cells = -(-(len(data) - self.header_size) // (self.half_size * self.copies))
        for slot in range(cells * self.half_size // RECORD_SIZE):
            pieces = [
                data[at : at + RECORD_SIZE].ljust(RECORD_SIZE, b"\0") for at in self.positions(slot)
            ]
            if any(piece != _EMPTY for piece in pieces):
                yield slot, pieces


ONCE: Final = Layout(version=1, copies=1, header_size=SECTOR_SIZE, half_size=RECORD_SIZE)
TWICE: Final = Layout(version=2, copies=2, header_size=2 * SECTOR_SIZE, half_size=SECTOR_SIZE)
_LAYOUTS: Final = {layout.version: layout for layout in (ONCE, TWICE)}


@frozen(slots=True)
class JournalConfig:
    """Sizes of the journal.

    Attributes:
        size_max: rewritten when it would grow beyond this, or four times its live records.
        reserve_bytes: allocated beyond that, for votes while the disk is full.
    """

    size_max: int = 8 << 20
    reserve_bytes: int = 512 * 1024


@frozen(slots=True)
class GroupState:
    """The hard state of one group.

    Attributes:
        term: the current Raft term.
        vote: the replica that this one voted for in it.
        bootstrapped: the storage that takes part; None before the first promise.
        flushed_end: everything below this Raft index is known to be flushed (the claim that
            recovery starts from). Lower it durably before the log is truncated.
        cut_floor: votes are refused to logs that end below it; 0 means none.
        commit_end: a lower bound of the committed end.
    """

    term: int = 0
    vote: ReplicaId | None = None
    bootstrapped: StorageId | None = None
    flushed_end: int = 0
    cut_floor: int = 0
    commit_end: int = 0

    def claiming(self, flushed_end: int, commit_end: int) -> GroupState:
        """The same with another claim. Made at every flush, and `evolve` is slow."""
        return GroupState(
            self.term, self.vote, self.bootstrapped, flushed_end, self.cut_floor, commit_end
        )


def _encode(
    group: RaftGroupId, state: GroupState | None, sequence: int, flushed_sequence: int
) -> bytes:
    flags = 0
    known = state or GroupState()
    if state is None:
        flags |= _FORGOTTEN
    if known.vote is not None:
        flags |= _HAS_VOTE
    if known.bootstrapped is not None:
        flags |= _HAS_BOOTSTRAPPED
    vote = known.vote or ReplicaId(NodeId(0), StorageId(0))
    data = _RECORD.pack(
        flags,
        sequence,
        flushed_sequence,
        group.topic_id.bytes,
        group.partition,
        group.creation_epoch,
        known.term,
        vote.node_id,
        vote.storage_id,
        known.bootstrapped or 0,
        known.flushed_end,
        known.cut_floor,
        known.commit_end,
    ).ljust(_CRC_POSITION, b"\0")
    return data + _CRC.pack(crc32c(data))


def _encode_void(sequence: int) -> bytes:
    data = _RECORD.pack(_VOID, sequence, 0, bytes(16), 0, 0, 0, 0, 0, 0, 0, 0, 0)
    data = data.ljust(_CRC_POSITION, b"\0")
    return data + _CRC.pack(crc32c(data))


@frozen(slots=True)
class JournalRecord:
    """The state of a group; None where the group is forgotten or the record is void."""

    sequence: int
    flushed_sequence: int
    group: RaftGroupId
    state: GroupState | None
    is_void: bool = False


def decode_record(data: bytes) -> JournalRecord | None:
    """One copy of a record; None where it is not sound."""
    if crc32c(data[:_CRC_POSITION]) != _CRC.unpack_from(data, _CRC_POSITION)[0]:
        return None
    (
        flags,
        sequence,
        flushed_sequence,
        topic_id,
        partition,
        creation_epoch,
        term,
        vote_node,
        vote_storage,
        bootstrapped,
        flushed_end,
        cut_floor,
        commit_end,
    ) = _RECORD.unpack_from(data)
    group = RaftGroupId(TopicId(UUID(bytes=topic_id)), partition, creation_epoch)
    if flags & (_FORGOTTEN | _VOID):
        return JournalRecord(sequence, flushed_sequence, group, None, bool(flags & _VOID))
    vote = ReplicaId(NodeId(vote_node), StorageId(vote_storage))
    state = GroupState(
        term=term,
        vote=vote if flags & _HAS_VOTE else None,
        bootstrapped=StorageId(bootstrapped) if flags & _HAS_BOOTSTRAPPED else None,
        flushed_end=flushed_end,
        cut_floor=cut_floor,
        commit_end=commit_end,
    )
    return JournalRecord(sequence, flushed_sequence, group, state)


def _sound_copy(pieces: list[bytes], sequence: int | None) -> tuple[bytes, JournalRecord] | None:
    """The record of a place, from the first copy that is sound and belongs there."""
    for piece in pieces:
        record = decode_record(piece)
        if record is not None and sequence in (None, record.sequence):
            return piece, record
    return None


@frozen(slots=True)
class JournalHeader:
    """What a file says of itself.

    Attributes:
        first: records from this sequence on must be there, as far as they were flushed.
        count: how many records were written with the header.
        is_damaged: damage was found before.
    """

    layout: Layout
    first: int
    count: int
    is_damaged: bool


def _encode_header(layout: Layout, first: int, count: int, *, is_damaged: bool) -> bytes:
    data = _HEADER.pack(_MAGIC, layout.version, is_damaged, first, count)
    one = (data + _CRC.pack(crc32c(data))).ljust(_HEADER_PITCH, b"\0")
    return one * (layout.header_size // _HEADER_PITCH)


def decode_header(data: bytes) -> JournalHeader | None:
    """The newest of the copies, of which a power loss may have left some; None where none is sound.

    Raises:
        NewerFormatError: of a newer raftmq.
    """
    found: list[JournalHeader] = []
    for at in range(0, min(len(data), TWICE.header_size), _HEADER_PITCH):
        part, rest = data[at : at + _HEADER.size], data[at + _HEADER.size : at + _HEADER_PITCH]
        if not part.startswith(_MAGIC) or rest[: _CRC.size] != _CRC.pack(crc32c(part)):
            continue
        _, version, is_damaged, first, count = _HEADER.unpack(part)
        if version > VERSION:
            raise NewerFormatError(f"the journal has format {version}, known is {VERSION}")
        found.append(JournalHeader(_LAYOUTS[version], first, count, bool(is_damaged)))
    return max(found, key=lambda header: (header.first, header.is_damaged), default=None)


@define(slots=True)
class _RecordFile:
    """A file and what its last cell holds so far.

    Attributes:
        end: where the last cell ends.
        missing: records that a rewrite put into another file, and that this one lacks.
    """

    file: File
    layout: Layout
    end: int
    held: bytes
    missing: list[bytes] = field(factory=list)

    @classmethod
    def after(cls, file: File, layout: Layout, records: bytes) -> _RecordFile:
        """Go on behind records that are there."""
        cells, rest = divmod(len(records), layout.half_size)
        end = layout.header_size + (cells + (rest > 0)) * layout.half_size * layout.copies
        return cls(file, layout, end, records[len(records) - rest :])

    def append(self, records: bytes) -> None:
        """Write records at the end; the cell under way is written again as a whole.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal to the node.
        """
        layout = self.layout
        records = self.held + records
        image = layout.image(records)
        position = self.end
        if self.held:
            position -= layout.half_size * layout.copies
        try:
            self.file.pwrite(image, position)
        except DiskFullError:
            self.file.truncate(self.end)
            raise
        self.end = position + len(image)
        rest = len(records) % layout.half_size
        self.held = records[-rest:] if rest else b""


class HardStateJournal:
    """The opened journal.

    Attributes:
        damaged: a record that was durable once cannot be read, so the promises of all groups until
            then are lost. Kept over restarts until `accept_damage`.
        mended: records that were durable, and of which one copy was bad when the file was opened.
        flushed_sequence: every record up to this one is durable.
    """

    @classmethod
    def open(
        cls,
        disk: Disk,
        path: str,
        *,
        config: JournalConfig | None = None,
        is_expected: bool = False,
    ) -> HardStateJournal:
        """Read the journal, or begin one; the folder must exist.

        Args:
            is_expected: replicas kept their hard state here, so a missing file is a lost file.

        Raises:
            NewerFormatError: of a newer raftmq.
            DiskError: the device failed.
        """
        journal = cls(disk, path, config or JournalConfig())
        journal._load(is_expected)
        return journal

    def __init__(self, disk: Disk, path: str, config: JournalConfig) -> None:
        self._disk = disk
        self._path = path
        self._folder = path.rpartition("/")[0]
        self._config = config
        self._states: dict[RaftGroupId, GroupState] = {}
        self._file: _RecordFile | None = None
        self._old: _RecordFile | None = None  # what a rewrite replaces, while it is under way
        self._sequence = 0  # of the newest record
        self._must_flush = 0  # the newest record that is not lazy
        self._limit = config.size_max
        self._layout = TWICE  # of the next rewrite
        self._job: FlushJob | None = None
        self.flushed_sequence = 0
        self.damaged = False
        self.mended = 0

    # --- opening ----------------------------------------------------------------------------

    def _load(self, is_expected: bool) -> None:
        temporary = f"{self._path}.tmp"
        if self._disk.exists(temporary):
            self._disk.remove(temporary)
        try:
            file = self._disk.open(self._path)
        except FileNotFoundError:
            self.damaged = is_expected
            self._finish(self._begin_rewrite())
            return
        data = file.pread(file.size(), 0)
        header = decode_header(data)
        if header is not None:
            self._layout = header.layout
        records = self._replay(data, header)
        if records is None:
            self.damaged = True
            self._states.clear()
        # Rewritten, so that all that was read becomes durable and no torn bytes stay behind.
        try:
            self._finish(self._begin_rewrite())
        except DiskFullError:
            self._go_on_with(file, data, header, records)

    def _finish(self, job: FlushJob) -> None:
        job.run()
        self.complete(job)

    def _go_on_with(
        self,
        file: File,
        data: bytes,
        header: JournalHeader | None,
        records: dict[int, bytes] | None,
    ) -> None:
        """Use the file as it is, since there is no room for another."""
        self._disk.sync_directory(self._folder)  # a process that was killed may have renamed it
        if header is None or records is None:
            self._file = self._emptied(file, len(data))
        elif header.layout is ONCE:
            self._file = self._kept(file, data)
        else:
            self._file = self._repaired(file, data, header, records)
        self.flushed_sequence = self._must_flush = self._sequence
        self._limit = min(self._limit, file.size() - self._config.reserve_bytes)

    def _emptied(self, file: File, size: int) -> _RecordFile:
        """Durably drop all records of a damaged file."""
        # Without a header it stays damaged, whatever a crash leaves of the rest.
        layout = self._layout
        file.pwrite(bytes(layout.header_size), 0)
        file.fdatasync()
        file.pwrite(bytes(max(0, size - layout.header_size)), layout.header_size)
        file.fdatasync()
        file.pwrite(_encode_header(layout, self._sequence + 1, 0, is_damaged=True), 0)
        file.fdatasync()
        return _RecordFile.after(file, layout, b"")

    def _kept(self, file: File, data: bytes) -> _RecordFile:
        """Go on in format 1. Records that were not flushed may be gone, so the header says from
        which sequence on they must be there."""
        used = max(0, len(data.rstrip(b"\0")) - ONCE.header_size)
        header = _encode_header(ONCE, self._sequence + 1, 0, is_damaged=self.damaged)
        file.pwrite(header, 0)
        file.fdatasync()
        end = ONCE.header_size + -(-used // RECORD_SIZE) * RECORD_SIZE
        return _RecordFile(file, ONCE, end, b"")

    def _repaired(
        self, file: File, data: bytes, header: JournalHeader, records: dict[int, bytes]
    ) -> _RecordFile:
        """Make both copies of every record sound, where they lie: sound ones do not change."""
        sequences = range(header.first, self._sequence + 1)
        sound = b"".join([records.get(number) or _encode_void(number) for number in sequences])
        room = len(data) - TWICE.header_size
        image = TWICE.image(sound).ljust(len(data.rstrip(b"\0")) - TWICE.header_size, b"\0")[:room]
        head = _encode_header(TWICE, header.first, header.count, is_damaged=self.damaged)
        file.pwrite(head + image, 0)
        file.fdatasync()
        return _RecordFile.after(file, TWICE, sound)

    def _replay(self, data: bytes, header: JournalHeader | None) -> dict[int, bytes] | None:
        """Take over the states, and give the records by sequence; None when something that was
        durable is not there."""
        layout, first, count = TWICE, None, 0
        if header is not None:
            layout, first, count = header.layout, header.first, header.count
            self.damaged = header.is_damaged
        found: dict[int, bytes] = {}
        halved: list[int] = []
        flushed = count + (first or 1) - 1
        is_sound = header is not None  # written whole and synced before it got its name
        for slot, pieces in layout.slots(data):
            place = None if first is None or layout is ONCE else first + slot
            copy = _sound_copy(pieces, place)
            if copy is None:
                is_sound &= layout is ONCE or _EMPTY in pieces
                continue
            piece, record = copy
            found[record.sequence] = piece
            flushed = max(flushed, record.flushed_sequence)
            if any(other != piece for other in pieces):
                halved.append(record.sequence)
            if record.state is not None:
                self._states[record.group] = record.state
            elif not record.is_void:
                self._states.pop(record.group, None)
        self._sequence = max([flushed, *found], default=0)
        self.mended = sum(sequence <= flushed for sequence in halved)
        if not is_sound or any(n not in found for n in range(first or 1, flushed + 1)):
            return None
        return found

    # --- reading ----------------------------------------------------------------------------

    def get(self, group: RaftGroupId) -> GroupState | None:
        """The newest state of a group, flushed or not."""
        return self._states.get(group)

    def groups(self) -> Iterable[RaftGroupId]:
        """All groups that have a state."""
        return list(self._states)

    # --- writing ----------------------------------------------------------------------------

    def put(self, group: RaftGroupId, state: GroupState, *, lazy: bool = False) -> int:
        """Write a state; durable once `flushed_sequence` reaches the sequence returned.

        A lazy one asks for no flush of its own, and is dropped while only the reserve is left.

        Raises:
            DiskFullError: the disk is full and the reserve used up.
            DiskError: fatal to the node.
        """
        before = self._states.get(group)
        self._states[group] = state
        try:
            return self._write(group, state, lazy=lazy)
        except DiskError:
            if before is None:
                del self._states[group]
            else:
                self._states[group] = before
            raise

    def forget(self, group: RaftGroupId) -> int:
        """Drop a group that is deleted.

        Raises:
            DiskError: as `put`.
        """
        self._states.pop(group, None)
        return self._write(group, None, lazy=False)

    def _write(self, group: RaftGroupId, state: GroupState | None, *, lazy: bool) -> int:
        file = self._open_file()
        if lazy and file.end >= self._limit:
            return self._sequence  # the coming rewrite holds it; until then the rest is for votes
        sequence = self._sequence + 1
        record = _encode(group, state, sequence, self.flushed_sequence)
        file.append(record)
        self._sequence = sequence
        if self._old is not None:
            self._old.missing.append(record)
        if not lazy:
            self._must_flush = sequence
        return sequence

    # --- flushing ---------------------------------------------------------------------------

    def flush_job(self) -> FlushJob | None:
        """What must be synced now; None when nothing is due or a job is under way.

        When the file is full the job puts a rewritten one in its place.
        """
        if self._job is not None:
            return None
        file = self._open_file()
        if file.end >= self._limit:
            try:
                return self._begin_rewrite()
            except DiskFullError:
                pass  # go on in the reserve; the next job tries again
        if self._must_flush <= self.flushed_sequence:
            return None
        self._job = FlushJob(self._disk, (file.file,), sequence=self._sequence)
        return self._job

    def complete(self, job: FlushJob) -> int:
        """Take note that `job` ran; returns the new flushed sequence."""
        assert job.is_done, "a job completes after it ran"
        assert job is self._job, "a job completes once"
        self._job = None
        self._old = None
        self.flushed_sequence = max(self.flushed_sequence, job.sequence)
        return self.flushed_sequence

    def flush_now(self) -> int:
        """Make everything written durable before returning; for rare steps that cannot wait.

        Raises:
            DiskError: fatal to the node.
        """
        if self.flushed_sequence == self._sequence:
            return self.flushed_sequence
        if self._old is not None:
            # A rewritten file is on its way to its name; until that is durable, the old one counts.
            old = self._old
            old.append(b"".join(old.missing))
            old.missing.clear()
            old.file.fdatasync()
        self._open_file().file.fdatasync()
        self.flushed_sequence = self._sequence
        return self.flushed_sequence

    def close(self) -> None:
        """Flush and let go of the file."""
        self.flush_now()
        self._file = None

    def accept_damage(self) -> None:
        """All replicas of this node have fresh identities: `damaged` need not be kept.

        The next flush job makes it so.
        """
        if self.damaged:
            self.damaged = False
            self._limit = 0

    def write_twice(self) -> None:
        """From the next flush job on the file has format 2, which versions before it refuse."""
        if self._layout is not TWICE:
            self._layout = TWICE
            self._limit = 0

    # --- rewriting --------------------------------------------------------------------------

    def _open_file(self) -> _RecordFile:
        assert self._file is not None, "the journal is open"
        return self._file

    def _begin_rewrite(self) -> FlushJob:
        """Write the live states to a new file and go on there; the job gives it its name.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal to the node.
        """
        first = self._sequence + 1
        records = [
            _encode(group, state, first + number, self.flushed_sequence)
            for number, (group, state) in enumerate(self._states.items())
        ]
        data = b"".join(records)
        layout = self._layout
        header = _encode_header(layout, first, len(records), is_damaged=self.damaged)
        content = header + layout.image(data)
        limit = max(self._config.size_max, 4 * len(content))
        temporary = f"{self._path}.tmp"
        file = self._disk.open(temporary, create=True)
        try:
            file.truncate(0)
            file.allocate(limit + self._config.reserve_bytes)
            file.pwrite(content, 0)
        except DiskFullError:
            file.close()
            self._disk.remove(temporary)
            raise
        self._old = self._file
        if self._old is not None:
            self._old.missing = records
        self._file = _RecordFile.after(file, layout, data)
        self._limit = limit
        self._sequence += len(records)
        self._must_flush = self._sequence
        self._job = FlushJob(
            self._disk,
            (file,),
            (self._folder,),
            sequence=self._sequence,
            rename=(temporary, self._path),
        )
        return self._job
