"""Where the log begins: one small tuple, replaced atomically, and the intent of a change under way.

The tuple says what cannot be read from the log any more once its prefix is gone: the position, the
epoch of the entry before it, the voter set and the state of the state machine exactly there.
Encoded it is also what a leader sends to a follower that fell behind.

The file `log-start` wraps it with a truncation or reset that must be finished after a crash. It
holds the record twice, in different blocks, so that one bad block loses nothing. Each copy has room
to grow: on a full disk, where no second file fits, the next record is written over the copies, one
after the other, since moving the log start is what gives space back. The state may have grown much
since the last record, so room for it is kept beforehand (`reserve`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Final

from attrs import field, frozen
from crc32c import crc32c

from raftmq.errors import RemoteProtocolError
from raftmq.log.model import NewerFormatError, UnusableLogError
from raftmq.ports import Disk, DiskError, DiskFullError, replacing
from raftmq.types import Buffer, LeaderEpoch, Offset, RaftIndex

VERSION: Final = 1
_BLOCK: Final = 4096
# version uint8, 3 spare bytes, previous_epoch int32, offset int64, base_offset int64, index int64,
# size of configuration uint32, size of state uint32; then both; then crc of all before it uint32.
_TUPLE: Final = struct.Struct(">B3xiqqqII")
# magic 4s, version uint8, pending uint8, 2 spare bytes, truncated_end int64, size of the encoded
# tuple uint32; then the tuple; then crc of all before it uint32; zeros up to the middle of the
# file, and the same again.
_FILE: Final = struct.Struct(">4sBB2xqI")
_CRC: Final = struct.Struct(">I")
_MAGIC: Final = b"RMQL"
_SHRUNK: Final = 16
"""A file to come is smaller once so much more room is kept than is wanted."""


@frozen(slots=True)
class LogStart:
    """The beginning of a log.

    Attributes:
        offset: the log start offset that readers see; may lie inside a batch (DeleteRecords).
        index: the Raft index of the first kept entry, an entry boundary.
        previous_epoch: the leader epoch of the entry that ends at `index`; 0 if there was none.
        configuration: the encoded Raft configuration in force at `index`; opaque here.
        state: the state machine's state exactly at `index`; opaque here.
        base_offset: the offset at `index`; equals `offset` unless that lies inside a batch.
    """

    offset: Offset = Offset(0)
    index: RaftIndex = RaftIndex(0)
    previous_epoch: LeaderEpoch = LeaderEpoch(0)
    configuration: bytes = b""
    state: bytes = b""
    base_offset: Offset = field()

    @base_offset.default
    def _same_offset(self) -> Offset:
        return self.offset

    def __attrs_post_init__(self) -> None:
        assert 0 <= self.base_offset <= self.offset, "a log starts at or inside its first batch"
        assert self.base_offset <= self.index, "an index counts the bare entries before it"

    def encode(self) -> bytes:
        """As sent to followers and stored: versioned and checksummed."""
        data = b"".join(
            (
                _TUPLE.pack(
                    VERSION,
                    self.previous_epoch,
                    self.offset,
                    self.base_offset,
                    self.index,
                    len(self.configuration),
                    len(self.state),
                ),
                self.configuration,
                self.state,
            )
        )
        return data + _CRC.pack(crc32c(data))

    @classmethod
    def decode(cls, data: Buffer) -> LogStart:
        """Read what `encode` made.

        Raises:
            NewerFormatError: of a newer raftmq.
            RemoteProtocolError: anything else that is wrong with the bytes.
        """
        if len(data) < _TUPLE.size + _CRC.size:
            raise RemoteProtocolError(f"log start of {len(data)} bytes")
        version, epoch, offset, base, index, voters, state = _TUPLE.unpack_from(data)
        end = len(data) - _CRC.size
        if crc32c(memoryview(data)[:end]) != _CRC.unpack_from(data, end)[0]:
            raise RemoteProtocolError("checksum of the log start")
        if version > VERSION:
            raise NewerFormatError(f"log start has format {version}, known is {VERSION}")
        if _TUPLE.size + voters + state != end or not 0 <= base <= min(offset, index):
            raise RemoteProtocolError("log start contradicts itself")
        at = _TUPLE.size + voters
        return cls(
            offset=Offset(offset),
            index=RaftIndex(index),
            previous_epoch=LeaderEpoch(epoch),
            configuration=bytes(data[_TUPLE.size : at]),
            state=bytes(data[at:end]),
            base_offset=Offset(base),
        )


class Pending(IntEnum):
    """A change of several files that a crash may have interrupted."""

    NOTHING = 0
    TRUNCATE = 1  # down to `truncated_end`
    RESET = 2  # all segments and bare entries are to go


@contextmanager
def no_way_back(folder: str) -> Iterator[None]:
    """Make a full disk fatal while a pending change is on disk.

    Only opening the log again may finish such a change. If the log went on, that opening would
    carry the change out over what was appended since.
    """
    try:
        yield
    except DiskFullError as error:
        raise DiskError(f"{folder}: the disk is full in the middle of a change") from error


@frozen(slots=True)
class LocalStart:
    """Contents of the file `log-start`."""

    log_start: LogStart
    truncated_end: RaftIndex = RaftIndex(0)
    pending: Pending = Pending.NOTHING

    def encode(self) -> bytes:
        """Both copies, each with room for a record that is a quarter larger, in whole blocks."""
        data = self.record()
        return data.ljust(_in_blocks(len(data) + len(data) // 4), b"\0") * 2

    def record_bytes(self, state_bytes: int) -> int:
        """How large one copy would be with a state of that size, without what pads it."""
        tuple_bytes = _TUPLE.size + len(self.log_start.configuration) + state_bytes + _CRC.size
        return _FILE.size + tuple_bytes + _CRC.size

    def record(self) -> bytes:
        """One copy, without what pads it."""
        inner = self.log_start.encode()
        head = _FILE.pack(_MAGIC, VERSION, self.pending, self.truncated_end, len(inner))
        data = head + inner
        return data + _CRC.pack(crc32c(data))

    @classmethod
    def decode(cls, data: bytes) -> LocalStart | None:
        """Read the first sound copy; None when there is none.

        Raises:
            NewerFormatError: of a newer raftmq.
        """
        return _decode_copy(data, 0) or _decode_copy(data, len(data) // 2)


def _decode_copy(data: bytes, at: int) -> LocalStart | None:
    if len(data) < at + _FILE.size:
        return None
    magic, version, pending, truncated_end, size = _FILE.unpack_from(data, at)
    end = at + _FILE.size + size
    if magic != _MAGIC or len(data) < end + _CRC.size:
        return None
    if crc32c(data[at:end]) != _CRC.unpack_from(data, end)[0]:
        return None
    if version > VERSION:
        raise NewerFormatError(f"log-start has format {version}, known is {VERSION}")
    log_start = LogStart.decode(data[at + _FILE.size : end])
    return LocalStart(log_start, RaftIndex(truncated_end), Pending(pending))


def _in_blocks(size: int) -> int:
    return size + -size % _BLOCK


class LogStartFile:
    """Reads and replaces the file `log-start` of one folder."""

    __slots__ = ("_disk", "_folder", "_kept_bytes", "_local", "_path", "_room_bytes")

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._path = f"{folder}/log-start"
        self._local: LocalStart | None = None  # what the file says
        self._room_bytes = 0  # of one copy, in the file as it is
        self._kept_bytes = 0  # of one copy, in every file to come

    def read(self) -> LocalStart | None:
        """What the file says; None when it is absent.

        Raises:
            UnusableLogError: both copies are damaged.
            NewerFormatError: of a newer raftmq.
        """
        try:
            file = self._disk.open(self._path)
        except FileNotFoundError:
            return None
        try:
            data = file.pread(file.size(), 0)
        finally:
            file.close()
        local = LocalStart.decode(data)
        if local is None:
            raise UnusableLogError(f"{self._path}: both copies are damaged")
        self._local, self._room_bytes = local, len(data) // 2
        if data != local.record().ljust(len(data) // 2, b"\0") * 2:
            self.finish(local)  # one copy was damaged
        return local

    def reserve(self, state_bytes: int) -> None:
        """Have room for a record whose state has so many bytes, should the disk be full by then.

        The room is twice as large, so that a growing state needs a new file only now and then.

        Raises:
            DiskFullError: nothing changed.
            DiskError: the record, which is the same as before, may stand in the old or new file.
        """
        local = self._local
        assert local is not None, "a file is read or made before it is to grow"
        wanted_bytes = local.record_bytes(state_bytes)
        if wanted_bytes > self._room_bytes:
            kept_bytes, self._kept_bytes = self._kept_bytes, _in_blocks(2 * wanted_bytes)
            try:
                self._write_new(local)
            except DiskFullError:
                self._kept_bytes = kept_bytes
                raise
        elif self._kept_bytes > _SHRUNK * wanted_bytes:
            self._kept_bytes = _in_blocks(2 * wanted_bytes)

    def _write_new(self, local: LocalStart) -> None:
        data = local.encode()
        half = max(len(data) // 2, self._kept_bytes)
        with replacing(self._disk, self._path) as file:
            if half == len(data) // 2:
                file.pwrite(data, 0)
            else:  # most of it is never written
                file.allocate(2 * half)
                record = local.record()
                file.pwrite(record, 0)
                file.pwrite(record, half)
        file.close()
        self._local, self._room_bytes = local, half

    def replace(self, local: LocalStart) -> None:
        """Replace the file; durable on return, old or new at every moment.

        Raises:
            DiskFullError: the old one is still in place, and has no room for this record.
            DiskError: either of them may be in place.
        """
        try:
            self._write_new(local)
        except DiskFullError:
            if not self._write_over(local):
                raise

    def finish(self, local: LocalStart) -> None:
        """Note that the pending change is done: in place, since the disk may be full.

        One copy after the other, so that one is sound at every moment. Durable on return.

        Raises:
            DiskError: the change may count as pending still.
        """
        with no_way_back(self._folder):
            if not self._write_over(local):
                self._write_new(local)  # damage cut the file short

    def _write_over(self, local: LocalStart) -> bool:
        """Write over one copy after the other, so that one is sound at every moment; durable on
        return. False, and nothing changed, when there is no file or no room in it.

        Raises:
            DiskError: the first sound copy may be the old or the new record.
        """
        data = local.record()
        try:
            file = self._disk.open(self._path)
        except FileNotFoundError:
            return False
        try:
            half = file.size() // 2
            if len(data) > half:
                return False
            with no_way_back(self._folder):
                for at in (0, half):
                    file.pwrite(data.ljust(half, b"\0"), at)
                    file.fdatasync()
        finally:
            file.close()
        self._local, self._room_bytes = local, half
        return True
