"""Producer state at chosen offsets, so that nobody has to replay a whole log for it.

A cache beside the log (`producers.snapshot`), never a source of truth: whatever is missing or
damaged is replayed from the log. Only states at *committed* offsets are kept; that prefix of a
group never changes, so a checkpoint is right on this replica for ever, also after a crash that took
the end of the log, and it needs no fsync. Bounded in bytes: when full, every other one goes. One
of many producers is written in pieces (`write_on`); until it is there as a whole it is a bad one.

Layout: "RQPC", version uint16; then per checkpoint: size uint32, offset int64, CRC-32C uint32 over
offset and data, data. A bad checkpoint ends the file.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections import deque
from typing import Final

from crc32c import crc32c

from raftmq.ports import Disk, DiskError
from raftmq.types import Offset

FILE_NAME: Final = "producers.snapshot"
BYTES_MAX: Final = 1 << 20
PIECE_BYTES: Final = 256 * 1024
"""So much is written at once: less than a millisecond."""
_HEADER: Final = struct.Struct(">4sH")
_MAGIC: Final = b"RQPC"
_VERSION: Final = 1
_RECORD: Final = struct.Struct(">IqI")
_OFFSET: Final = struct.Struct(">q")


class ProducerCheckpoints:
    """Encoded producer states by offset; on disk where a folder is given."""

    def __init__(self, disk: Disk | None = None, folder: str = "") -> None:
        self._disk = disk
        self._path = f"{folder}/{FILE_NAME}"
        self._offsets: list[Offset] = []
        self._states: list[bytes] = []
        self._bytes = 0
        self._position = 0  # where the next piece is written; 0: the file is to be written anew
        self._unwritten: deque[memoryview] = deque()

    def __len__(self) -> int:
        return len(self._offsets)

    def load(self) -> None:
        """Read what an earlier process kept; what cannot be read is as if it were absent."""
        if self._disk is None or not self._disk.exists(self._path):
            return
        try:
            file = self._disk.open(self._path)
            try:
                data = file.pread(file.size(), 0)
            finally:
                file.close()
        except (DiskError, FileNotFoundError):
            return  # a cache: the log has it all
        if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (_MAGIC, _VERSION):
            return
        position = _HEADER.size
        while position + _RECORD.size <= len(data):
            size, offset, crc = _RECORD.unpack_from(data, position)
            start = position + _RECORD.size
            state = data[start : start + size]
            if len(state) != size or crc != _sum(offset, state):
                break
            if self._offsets and offset <= self._offsets[-1]:
                break
            self._keep(Offset(offset), state)
            position = start + size
        self._position = position

    def best(self, at_most: Offset, at_least: Offset) -> tuple[Offset, bytes] | None:
        """The latest state at an offset within these bounds, both included."""
        i = bisect_right(self._offsets, at_most) - 1
        if i < 0 or self._offsets[i] < at_least:
            return None
        return self._offsets[i], self._states[i]

    def add(self, offset: Offset, state: bytes) -> None:
        """Keep the state at a committed offset."""
        if self._offsets and offset <= self._offsets[-1]:
            return
        self._keep(offset, state)
        if self._bytes > BYTES_MAX:
            # Far from the end a coarser grid will do; the newest one always stays.
            self._offsets = self._offsets[::-1][::2][::-1]
            self._states = self._states[::-1][::2][::-1]
            self._bytes = sum(map(len, self._states))
            self._begin_anew()
        self._plan_writes()
        self.write_on()

    def drop_below(self, offset: Offset) -> None:
        """Forget what lies below the log start."""
        count = bisect_right(self._offsets, offset - 1)
        if count:
            del self._offsets[:count]
            del self._states[:count]
            self._bytes = sum(map(len, self._states))
            self._begin_anew()  # with the next one

    def _keep(self, offset: Offset, state: bytes) -> None:
        self._offsets.append(offset)
        self._states.append(state)
        self._bytes += len(state)

    def write_on(self) -> None:
        """Write another piece of what is not in the file yet."""
        if not self._unwritten:
            return
        assert self._disk is not None, "nothing is planned without one"
        pieces: list[memoryview] = []
        left = PIECE_BYTES
        while self._unwritten and left:
            whole = self._unwritten.popleft()
            pieces.append(whole[:left])
            if len(whole) > left:
                self._unwritten.appendleft(whole[left:])
            left -= len(pieces[-1])
        try:
            file = self._disk.open(self._path, create=True)
            try:
                if not self._position:
                    file.truncate(0)
                file.pwritev(pieces, self._position)
            finally:
                file.close()
        except DiskError:
            # A full or failing disk: the log's own writes will say so; this cache can do without.
            self._begin_anew()
            return
        self._position += PIECE_BYTES - left

    def _plan_writes(self) -> None:
        if self._disk is None:
            return
        is_new = not self._position
        if is_new:
            self._unwritten.append(memoryview(_HEADER.pack(_MAGIC, _VERSION)))
        first = 0 if is_new else len(self._offsets) - 1
        for offset, state in zip(self._offsets[first:], self._states[first:], strict=True):
            head = _RECORD.pack(len(state), offset, _sum(offset, state))
            self._unwritten += [memoryview(head), memoryview(state)]

    def _begin_anew(self) -> None:
        self._position = 0
        self._unwritten.clear()


def _sum(offset: int, state: bytes) -> int:
    checksum: int = crc32c(state, crc32c(_OFFSET.pack(offset)))
    return checksum
