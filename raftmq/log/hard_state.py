"""The hard state of all Raft groups of a node: one small checksummed journal.

A vote, a term, "this storage takes part in that group" must be durable before anything that depends
on them is sent; one file for all groups makes a thousand elections a handful of fsyncs. Lazy
records (claimed flushed end, high watermark) reach the page cache and ride with the next flush.

Each record is a whole state of one group and fits one sector, so the newest sound one counts. Each
also says up to which sequence the journal was flushed when it was written. So a bad or missing
record at or below that sequence was durable once, and nobody knows of which group it was: then
`damaged` is set and no state is given out, since any may be older than what was promised. Bad bytes
above it, at the end, are writes that were never promised.

Room is kept allocated, so that votes work on a full disk. A full file is rewritten under another
name, synced and renamed, all in a flush job. After a failed fsync the node stops.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final
from uuid import UUID

from attrs import define, frozen
from crc32c import crc32c

from raftmq.log.flush import FlushJob
from raftmq.log.model import NewerFormatError
from raftmq.ports import Disk, DiskError, DiskFullError, File
from raftmq.types import NodeId, RaftGroupId, ReplicaId, StorageId, TopicId

VERSION: Final = 1
RECORD_SIZE: Final = 128
HEADER_SIZE: Final = 512
_MAGIC: Final = b"RMQJ"
# File header, twice, 256 bytes each: magic 4s, version uint16, is_damaged uint8, spare byte, first
# sequence uint64, count of records that were written with the header uint32, crc uint32.
_HEADER: Final = struct.Struct(">4sHBxQI")
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
_EMPTY: Final = bytes(RECORD_SIZE)
assert _RECORD.size <= _CRC_POSITION


@frozen(slots=True)
class JournalConfig:
    """Sizes of the journal.

    Attributes:
        size_max: rewritten when it would grow beyond this, or four times its live records.
        reserve_bytes: allocated beyond that, for votes while the disk is full.
    """

    size_max: int = 4 << 20
    reserve_bytes: int = 256 * 1024


@frozen(slots=True)
class GroupState:
    """What one group must not forget.

    Attributes:
        term: the current Raft term.
        vote: who got this replica's vote in it.
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
        """The same with another claim; every flush makes one, and `evolve` is slow."""
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


@frozen(slots=True)
class _Record:
    sequence: int
    flushed_sequence: int
    group: RaftGroupId
    state: GroupState | None


def _decode(data: bytes) -> _Record | None:
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
    if flags & _FORGOTTEN:
        return _Record(sequence, flushed_sequence, group, None)
    vote = ReplicaId(NodeId(vote_node), StorageId(vote_storage))
    state = GroupState(
        term=term,
        vote=vote if flags & _HAS_VOTE else None,
        bootstrapped=StorageId(bootstrapped) if flags & _HAS_BOOTSTRAPPED else None,
        flushed_end=flushed_end,
        cut_floor=cut_floor,
        commit_end=commit_end,
    )
    return _Record(sequence, flushed_sequence, group, state)


def _encode_header(first_sequence: int, count: int, *, is_damaged: bool) -> bytes:
    data = _HEADER.pack(_MAGIC, VERSION, is_damaged, first_sequence, count)
    half = (data + _CRC.pack(crc32c(data))).ljust(HEADER_SIZE // 2, b"\0")
    return half + half


def decode_header(data: bytes) -> tuple[int, int, bool] | None:
    """First sequence, count of records that were written with it, whether damage was found before;
    None where neither copy is sound."""
    for at in (0, HEADER_SIZE // 2):
        if len(data) < at + _HEADER.size + _CRC.size:
            return None
        part = data[at : at + _HEADER.size]
        magic, version, is_damaged, first_sequence, count = _HEADER.unpack(part)
        if magic == _MAGIC and crc32c(part) == _CRC.unpack_from(data, at + _HEADER.size)[0]:
            if version > VERSION:
                raise NewerFormatError(f"the journal has format {version}, known is {VERSION}")
            return first_sequence, count, bool(is_damaged)
    return None


@define(slots=True)
class _OldFile:
    """The file that a rewrite replaces, and what it lacks while that is under way."""

    file: File
    position: int
    records: list[bytes]


class HardStateJournal:
    """The opened journal.

    Attributes:
        damaged: a record that was durable once cannot be read: what all groups promised until then
            is forgotten. Kept over restarts until `accept_damage`.
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
            is_expected: replicas have kept their hard state here, so that no file is a lost file.

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
        self._file: File | None = None
        self._position = 0
        self._old: _OldFile | None = None
        self._sequence = 0  # of the newest record
        self._must_flush = 0  # the newest record that is not lazy
        self._limit = config.size_max
        self._job: FlushJob | None = None
        self.flushed_sequence = 0
        self.damaged = False

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
        is_sound = self._replay(data, decode_header(data))
        if not is_sound:
            self.damaged = True
            self._states.clear()
        # Anew: whatever was read becomes durable, and no torn bytes stay behind.
        try:
            self._finish(self._begin_rewrite())
        except DiskFullError:
            self._go_on_with(file, data if is_sound else self._wiped(file, data))

    def _finish(self, job: FlushJob) -> None:
        job.run()
        self.complete(job)

    def _wiped(self, file: File, data: bytes) -> bytes:
        """Durably drop all records of a damaged file that cannot be replaced."""
        empty = data[:HEADER_SIZE] + bytes(max(0, len(data) - HEADER_SIZE))
        file.pwrite(empty, 0)
        file.fdatasync()
        return empty

    def _go_on_with(self, file: File, data: bytes) -> None:
        """Use the file as it is, since there is no room for another.

        The header says from which sequence on records must be there: unflushed ones may be gone.
        """
        used = len(data.rstrip(b"\0"))
        records = max(0, used - HEADER_SIZE + RECORD_SIZE - 1) // RECORD_SIZE
        self._position = HEADER_SIZE + RECORD_SIZE * records
        self._file = file
        file.pwrite(_encode_header(self._sequence + 1, 0, is_damaged=self.damaged), 0)
        file.fdatasync()
        self.flushed_sequence = self._must_flush = self._sequence

    def _replay(self, data: bytes, header: tuple[int, int, bool] | None) -> bool:
        """Take over the states; False when something that was durable is not there."""
        found: dict[int, _Record] = {}
        states: dict[RaftGroupId, GroupState] = self._states
        for position in range(HEADER_SIZE, len(data) - RECORD_SIZE + 1, RECORD_SIZE):
            piece = data[position : position + RECORD_SIZE]
            if piece == _EMPTY:
                continue
            record = _decode(piece)
            if record is None:
                continue
            found[record.sequence] = record
            if record.state is None:
                states.pop(record.group, None)
            else:
                states[record.group] = record.state
        flushed = max((r.flushed_sequence for r in found.values()), default=0)
        is_sound = header is not None  # written whole and synced before it got its name
        if header is not None:
            first, count, self.damaged = header
            flushed = max(flushed, first + count - 1)
            is_sound = all(sequence in found for sequence in range(first, flushed + 1))
        self._sequence = max([flushed, *found], default=0)
        return is_sound

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
        if lazy and self._position >= self._limit:
            return self._sequence  # the coming rewrite holds it; until then the rest is for votes
        file = self._open_file()
        sequence = self._sequence + 1
        record = _encode(group, state, sequence, self.flushed_sequence)
        try:
            file.pwrite(record, self._position)
        except DiskFullError:
            file.truncate(self._position)
            raise
        self._sequence = sequence
        self._position += RECORD_SIZE
        if self._old is not None:
            self._old.records.append(record)
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
        if self._position >= self._limit:
            try:
                return self._begin_rewrite()
            except DiskFullError:
                pass  # go on in the reserve; the next job tries again
        if self._must_flush <= self.flushed_sequence:
            return None
        self._job = FlushJob(self._disk, (self._open_file(),), sequence=self._sequence)
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
            old.file.pwrite(b"".join(old.records), old.position)
            old.position += RECORD_SIZE * len(old.records)
            old.records.clear()
            old.file.fdatasync()
        self._open_file().fdatasync()
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
            self._limit = self._position

    # --- rewriting --------------------------------------------------------------------------

    def _open_file(self) -> File:
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
        size = HEADER_SIZE + RECORD_SIZE * len(records)
        limit = max(self._config.size_max, 4 * size)
        temporary = f"{self._path}.tmp"
        file = self._disk.open(temporary, create=True)
        try:
            file.truncate(0)
            file.allocate(limit + self._config.reserve_bytes)
            header = _encode_header(first, len(records), is_damaged=self.damaged)
            file.pwrite(header + b"".join(records), 0)
        except DiskFullError:
            file.close()
            self._disk.remove(temporary)
            raise
        if self._file is not None:
            self._old = _OldFile(self._file, self._position, records)
        self._file = file
        self._position = size
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
