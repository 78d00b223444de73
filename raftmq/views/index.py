"""Where the matches of one partition of a view stand: one row for each batch that has any.

Fed with what a condition says of the committed batches of a log, in its order. Everything below
`examined_end` is known: a batch without a row there has nothing for readers of the view.

An index can be made again from its log, so it is written without promise: by blocks of rows, then
the header that counts them, and what a crash left out is examined again. It is checked when it is
loaded; what is damaged goes, with all behind it. What it says of a part of the log that is gone
would be believed of the part in its place, so a cut is durable when `truncate` returns.

Of full blocks only first offset and last match are held in memory, 16 bytes for a thousand rows,
beside the few that were read last; of the last block all rows. A look-up that may not wait for the
disk says which block it lacks (`AwayError`), which a worker reads. A file has a thousand blocks and
begins at the offset where the one before it ends; what falls below the log's start goes file by
file. No file is kept open.

File, named by the first offset that it covers: header of 80 bytes (magic 4s, version uint16, 2
spare bytes, identity 16s, covered start and end int64, start of the view int64, leader epoch of
the last batch int64, full blocks uint32, rows behind them uint32, CRC of the table uint32, 8 spare
bytes, CRC of all before it uint32), a table of room for 1,024 full blocks (base offset of the first
row and last match, int64 each), then blocks (CRC of what follows in it uint32, rows uint32, base
offsets int64 each, then for each row twice the distance to its last match, plus 1 if the batch
matches only in part, as uint32), all little-endian. A table that was lost is made again from the
blocks.

One thread at a time changes it; `save`, `save_start` and `remove_files` may run in another one than
look-ups and `pass_start` do.

Invariants: rows ascend and do not overlap; `start <= end <= examined_end`, but for a log that
starts beyond what was examined.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from attrs import define, field
from crc32c import crc32c

from raftmq.ports import Disk, DiskError, DiskFullError, File
from raftmq.types import Offset
from raftmq.views.batches import Judged, Kind

_HEADER: Final = struct.Struct("<4sH2x16sqqqqIII8x")
_CRC: Final = struct.Struct("<I")
_BLOCK_HEAD: Final = struct.Struct("<II")
_ENTRY: Final = struct.Struct("<qq")
HEADER_SIZE: Final = _HEADER.size + _CRC.size
MAGIC: Final = b"RMQV"
VERSION: Final = 1
ROWS_MAX: Final = 1024  # of a block
BLOCKS_MAX: Final = 1024  # of a file
BLOCKS_HELD: Final = 4  # in memory, of those that were read
ROW_BYTES: Final = 12
BLOCK_BYTES: Final = _BLOCK_HEAD.size + ROWS_MAX * ROW_BYTES
BLOCKS_POSITION: Final = HEADER_SIZE + BLOCKS_MAX * _ENTRY.size
IDENTITY_BYTES: Final = 16
SUFFIX: Final = ".rows"
assert HEADER_SIZE == 80


class Row(NamedTuple):
    """A batch that has matches, of which the last is at `last_match`."""

    base_offset: Offset
    last_match: Offset
    kind: Kind


class _DamagedError(Exception):
    """A file, or a block of it, that says nothing."""


class AwayError(Exception):
    """A look-up needs a block that is not in memory.

    Attributes:
        job: reads it; `take_block` then has it.
    """

    def __init__(self, job: BlockJob) -> None:
        super().__init__("a block of the index is not in memory")
        self.job = job


@define(slots=True, eq=False)
class _Rows:
    """The rows of one block, 12 bytes each."""

    bases: array[int] = field(factory=lambda: array("q"))
    codes: array[int] = field(factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.bases)

    def row(self, at: int) -> Row:
        base, code = self.bases[at], self.codes[at]
        kind = Kind.MIXED if code & 1 else Kind.WHOLE
        return Row(Offset(base), Offset(base + (code >> 1)), kind)

    def last_match(self, at: int) -> int:
        return self.bases[at] + (self.codes[at] >> 1)

    def append(self, base: int, judged: Judged) -> None:
        self.bases.append(base)
        self.codes.append(judged.last_match - base << 1 | (judged.kind is Kind.MIXED))

    def first_reaching(self, offset: int) -> int:
        """The number of the first row whose last match is not below `offset`."""
        at = bisect_left(self.bases, offset)
        return at - 1 if at and self.last_match(at - 1) >= offset else at

    def keep(self, count: int) -> None:
        del self.bases[count:]
        del self.codes[count:]

    def to_bytes(self) -> bytes:
        bases, codes = self.bases, self.codes
        if sys.byteorder == "big":  # pragma: no cover  # files are little-endian everywhere
            bases, codes = array("q", bases), array("I", codes)
            bases.byteswap()
            codes.byteswap()
        body = _BLOCK_HEAD.pack(0, len(bases))[_CRC.size :] + bases.tobytes() + codes.tobytes()
        return _CRC.pack(crc32c(body)) + body


def _parse_rows(block: bytes) -> _Rows:
    """The rows of a block.

    Raises:
        _DamagedError: they are not those that were written.
    """
    if len(block) < _BLOCK_HEAD.size:
        raise _DamagedError
    crc, count = _BLOCK_HEAD.unpack_from(block)
    middle = _BLOCK_HEAD.size + 8 * count
    end = middle + 4 * count
    if count > ROWS_MAX or end > len(block) or crc32c(block[_CRC.size : end]) != crc:
        raise _DamagedError
    rows = _Rows()
    rows.bases.frombytes(block[_BLOCK_HEAD.size : middle])
    rows.codes.frombytes(block[middle:end])
    if sys.byteorder == "big":  # pragma: no cover
        rows.bases.byteswap()
        rows.codes.byteswap()
    return rows


@define(slots=True, eq=False)
class _Part:
    """What one file covers: `firsts` and `lasts` have the first base offset and the last match of
    each full block, `rest` the rows behind them, more than a block while the disk refuses."""

    start: int
    end: int
    firsts: array[int] = field(factory=lambda: array("q"))
    lasts: array[int] = field(factory=lambda: array("q"))
    rest: _Rows = field(factory=_Rows)
    is_dirty: bool = False

    @property
    def name(self) -> str:
        return f"{self.start:020d}{SUFFIX}"

    @property
    def row_count(self) -> int:
        return len(self.firsts) * ROWS_MAX + len(self.rest)

    @property
    def last_match(self) -> int | None:
        rest = self.rest
        if len(rest):
            return rest.last_match(len(rest) - 1)
        return self.lasts[-1] if self.lasts else None

    def table(self) -> bytes:
        return b"".join(map(_ENTRY.pack, self.firsts, self.lasts))

    def add_full(self, rows: _Rows) -> None:
        self.firsts.append(rows.bases[0])
        self.lasts.append(rows.last_match(len(rows) - 1))

    def cut_damaged(self, at: int) -> None:
        """Block `at` says nothing: all from the last match before it on is to be examined again."""
        del self.firsts[at:]
        del self.lasts[at:]
        self.rest = _Rows()
        self.end = self.lasts[-1] + 1 if self.lasts else self.start
        self.is_dirty = True


@define(slots=True, eq=False)
class BlockJob:
    """Reads a full block; touches nothing that others use.

    Attributes:
        first: the base offset of its first row.
        cuts: how often the index had been cut when it was asked for.
        rows: what the block says, None where that is nothing.
    """

    index: ViewIndex
    part: _Part
    at: int
    first: int
    cuts: int
    rows: _Rows | None = None

    def run(self) -> None:
        """Read it.

        Raises:
            DiskError: the device failed.
        """
        try:
            self.rows = self.index._read_block(self.part, self.at, self.first)
        except _DamagedError:
            self.rows = None


class ViewIndex:
    """The index of one partition of one view, in a folder of its own."""

    def __init__(self, disk: Disk, folder: str, identity: bytes, log_start: Offset) -> None:
        """Takes over what its files say. The caller then cuts it to where its log ends.

        Args:
            disk: where it is.
            folder: made when something is written; nobody else has files there.
            identity: 16 bytes of the view; files of another one are not believed.
            log_start: where the log begins.

        Raises:
            DiskError: the device failed.
        """
        assert len(identity) == IDENTITY_BYTES
        self._disk = disk
        self._folder = folder
        self._identity = identity
        self._parts: list[_Part] = []
        self._start = 0
        self._blocks: deque[tuple[_Part, int, _Rows]] = deque(maxlen=BLOCKS_HELD)
        self._cuts = 0
        self.epoch = -1
        """The leader epoch of the batch before `examined_end`, as whoever adds has set it, -1 where
        that is not known: by it an index is told from one of another log."""
        self._load()
        if not self._parts:
            self._start = log_start
            self._parts.append(_Part(log_start, log_start, is_dirty=True))
        self.drop_before(log_start)

    @property
    def examined_end(self) -> Offset:
        """All below has been examined. It falls where a file turns out to be damaged."""
        return Offset(self._parts[-1].end)

    @property
    def end(self) -> Offset:
        """One past the last match; `start` where there is none."""
        for part in reversed(self._parts):
            if part.last_match is not None:
                return Offset(max(part.last_match + 1, self._start))
        return self.start

    @property
    def start(self) -> Offset:
        """One past the last match that is gone because the log starts behind it. Where that is not
        known, since the log started there before this index had come so far, the log's start."""
        return Offset(self._start)

    @property
    def row_count(self) -> int:
        """Batches that have matches; some of them may lie before the log's start."""
        return sum(part.row_count for part in self._parts)

    def add(self, base_offset: Offset, end_offset: Offset, judged: Judged) -> None:
        """Take in what was found of the next batch, `[base_offset, end_offset)`. It may begin
        before `examined_end`; if it begins behind it, there is nothing between."""
        part = self._parts[-1]
        assert end_offset > part.end, "batches are examined in their order"
        if judged.kind is not Kind.NONE and judged.last_match >= part.end:
            assert base_offset <= judged.last_match < end_offset, "a match lies in its batch"
            if part.row_count == ROWS_MAX * BLOCKS_MAX:
                part = _Part(part.end, part.end)
                self._parts.append(part)
            part.rest.append(base_offset, judged)
        part.end = end_offset
        part.is_dirty = True
        if len(part.rest) and len(part.rest) % ROWS_MAX == 0:
            self.save()

    def pass_to(self, offset: Offset) -> None:
        """Between `examined_end` and `offset` there is nothing for readers of the view."""
        part = self._parts[-1]
        if offset > part.end:
            part.end = offset
            part.is_dirty = True

    # ---- looking up ----

    def next_match(self, offset: Offset, *, may_wait: bool = True) -> Row | None:
        """The first batch whose last match is not below `offset`. None: no examined one has such.

        Raises:
            AwayError: it may not wait for the disk, and would have to.
            DiskError: the device failed.
        """
        while True:
            try:
                return self._next(offset, may_wait)
            except _DamagedError:
                continue  # what was damaged has been let go of

    def rows(self, start: Offset, end: Offset) -> Iterator[Row]:
        """All batches that have a match at or above `start` and begin below `end`.

        Raises:
            DiskError: the device failed.
        """
        row = self.next_match(start)
        while row is not None and row.base_offset < end:
            yield row
            row = self.next_match(Offset(row.last_match + 1))

    def _next(self, offset: int, may_wait: bool) -> Row | None:
        for part in self._parts[self._part_beyond(offset) :]:
            rest = part.rest  # looked at first: rows move from it to full blocks, never back
            at = bisect_left(part.lasts, offset)
            if at < len(part.lasts):
                rows = self._block(part, at, may_wait=may_wait)
                return rows.row(rows.first_reaching(offset))
            at = rest.first_reaching(offset)
            if at < len(rest):
                return rest.row(at)
        return None

    def _last_below(self, offset: int, may_wait: bool) -> int | None:
        """The last match of the last batch that begins below `offset` and has some."""
        for part in reversed(self._parts):
            at = bisect_left(part.rest.bases, offset)
            if at:
                return part.rest.last_match(at - 1)
            at = bisect_left(part.firsts, offset)
            if at and part.lasts[at - 1] < offset:
                return part.lasts[at - 1]
            if at:
                rows = self._block(part, at - 1, may_wait=may_wait)
                return rows.last_match(bisect_left(rows.bases, offset) - 1)
        return None

    def _part_beyond(self, offset: int) -> int:
        """The number of the first part that ends beyond `offset`, else of the last one."""
        return min(
            bisect_right(self._parts, offset, key=lambda part: part.end), len(self._parts) - 1
        )

    def _block(self, part: _Part, at: int, *, may_wait: bool = True) -> _Rows:
        """The rows of a full block.

        Raises:
            _DamagedError: it says nothing; it has been let go of, with all behind it.
            AwayError: it may not wait for it.
        """
        for held_part, held_at, rows in self._blocks:
            if held_part is part and held_at == at:
                return rows
        job = BlockJob(self, part, at, part.firsts[at], self._cuts)
        if not may_wait:
            raise AwayError(job)
        job.run()
        self.take_block(job)
        if job.rows is None:
            raise _DamagedError
        return job.rows

    def take_block(self, job: BlockJob) -> None:
        """Hold what a job read, or let go of a block that says nothing, with all behind it. What
        was cut since is not there any more."""
        part, at, rows = job.part, job.at, job.rows
        if job.cuts != self._cuts or part not in self._parts:
            return
        if rows is not None:
            self._blocks.append((part, at, rows))
            return
        self._forget(self._parts.index(part) + 1)
        self._let_go()
        part.cut_damaged(at)

    def _read_block(self, part: _Part, at: int, first: int) -> _Rows:
        """Raises:
        _DamagedError: it is not the block that was written.
        DiskError: the device failed.
        """
        rows = _parse_rows(self._pread(part, BLOCK_BYTES, BLOCKS_POSITION + at * BLOCK_BYTES))
        if len(rows) != ROWS_MAX or rows.bases[0] != first:
            raise _DamagedError
        return rows

    def _let_go(self) -> None:
        """Blocks are cut: those in memory, or on their way there, are not these any more."""
        self._blocks.clear()
        self._cuts += 1

    def _pread(self, part: _Part, size: int, position: int) -> bytes:
        try:
            file = self._disk.open(f"{self._folder}/{part.name}")
        except FileNotFoundError:
            return b""
        try:
            return file.pread(size, position)
        finally:
            file.close()

    # ---- what goes ----

    def drop_before(self, log_start: Offset) -> None:
        """The log starts there now: all that follows from it, in one go.

        Raises:
            DiskError: the device failed; what it says is sound, and it can be told again.
        """
        self.pass_start(log_start)
        if not self.has_below(log_start):
            return
        if log_start <= self.examined_end:
            try:
                self.save_start()
            except DiskFullError:
                return  # they go another time
        self.remove_files(self.let_go_before(log_start))

    def pass_start(self, log_start: Offset, *, may_wait: bool = True) -> None:
        """The log starts there now: find `start`. Nothing is written or removed.

        Raises:
            AwayError: it may not wait for the disk, and would have to.
            DiskError: the device failed.
        """
        gone_end = 0
        if log_start <= self.examined_end:
            gone_end = self._gone_before(log_start, may_wait)
        if log_start > self.examined_end:  # by now, for some of it may turn out to be damaged
            gone_end = log_start  # what was there is not known, or not any more
        self._start = max(self._start, gone_end)

    def has_below(self, log_start: Offset) -> bool:
        """True where whole files lie below, or all that was examined does."""
        return log_start > self.examined_end or self._part_beyond(log_start) > 0

    def save_start(self) -> None:
        """Write `start` durably: nothing else tells it once the files below are gone.

        Raises:
            DiskError: it is not written.
        """
        self._parts[-1].is_dirty = True
        self.save(is_durable=True)

    def let_go_before(self, log_start: Offset) -> list[str]:
        """Forget what has files of its own below; their names, for `remove_files`. `start` is found
        by then, and saved unless all that was examined lies below."""
        if log_start > self.examined_end:
            gone, self._parts = self._parts, [_Part(log_start, log_start)]
            self._let_go()
        else:
            kept = self._part_beyond(log_start)
            gone = self._parts[:kept]
            del self._parts[:kept]
        return [part.name for part in gone]

    def remove_files(self, names: Sequence[str]) -> None:
        """Remove files of what was let go of; may run in another thread than look-ups do.

        Raises:
            DiskError: the device failed; those that are left are let go of when they are loaded.
        """
        for name in names:
            path = f"{self._folder}/{name}"
            if self._disk.exists(path):
                self._disk.remove(path)
        if self._disk.exists(self._folder):
            self._disk.sync_directory(self._folder)

    def _gone_before(self, log_start: int, may_wait: bool) -> int:
        """One past the last match below `log_start`, or that where a batch lies on both sides; 0
        where there is none."""
        while True:
            try:
                last = self._last_below(log_start, may_wait)
            except _DamagedError:
                continue
            return 0 if last is None else min(last + 1, log_start)

    def truncate(self, offset: Offset) -> None:
        """The log was cut there: what is known from there on goes, durably.

        Raises:
            DiskError: the device failed, and files may still say what is gone.
        """
        if offset >= self.examined_end:
            return
        self._start = min(self._start, offset)
        kept = self._part_beyond(offset)
        if self._parts[kept].start >= offset:
            self._forget(kept, offset)
            return
        self._forget(kept + 1)
        try:
            self._cut(self._parts[kept], offset)
        except _DamagedError:
            assert self.examined_end <= offset, "more has gone than was to"
        self.save(is_durable=True)

    def _cut(self, part: _Part, offset: int) -> None:
        """Let go of a part's rows that reach `offset`."""
        full = bisect_left(part.lasts, offset)
        if full < len(part.lasts):
            rows = self._block(part, full)
            part.rest = _Rows(rows.bases[:], rows.codes[:])
            del part.firsts[full:]
            del part.lasts[full:]
            self._let_go()
        at = part.rest.first_reaching(offset)
        if at < len(part.rest):
            offset = max(part.start, min(offset, part.rest.bases[at]))
            part.rest.keep(at)
        part.end = offset
        part.is_dirty = True

    def _forget(self, number: int, offset: int = 0) -> None:
        """Remove parts from that number on, durably; where none is left, begin at `offset`."""
        gone = self._parts[number:]
        if not gone:
            return
        self._parts[number:] = [] if number else [_Part(offset, offset)]
        self._let_go()
        self.remove_files([part.name for part in gone])

    def remove(self) -> None:
        """Remove all files: the view is gone, and this is not used any more.

        Raises:
            DiskError: the device failed.
        """
        if self._disk.exists(self._folder):
            self._disk.remove_tree(self._folder)

    # ---- files ----

    def save(self, *, is_durable: bool = False) -> None:
        """Write what was added. On a disk that refuses it stays in memory, unless it is to be
        durable.

        Raises:
            DiskError: it was to be durable and is not.
        """
        try:
            for part in self._parts:
                if part.is_dirty:
                    self._write(part, is_durable)
        except DiskError:
            if is_durable:
                raise
            return  # the log's own writes say so

    def _write(self, part: _Part, is_durable: bool) -> None:
        path = f"{self._folder}/{part.name}"
        is_new = not self._disk.exists(path)
        if is_new:
            self._disk.make_directories(self._folder)
        file = self._disk.open(path, create=True)
        try:
            end = self._write_rows(file, part)
            table = part.table()
            file.pwrite(table, HEADER_SIZE)
            counts = (len(part.firsts), len(part.rest), crc32c(table))
            fields = (
                MAGIC,
                VERSION,
                self._identity,
                part.start,
                part.end,
                self._start,
                self.epoch,
                *counts,
            )
            header = _HEADER.pack(*fields)
            file.pwrite(header + _CRC.pack(crc32c(header)), 0)
            if is_durable:
                file.truncate(end)  # no block of another time may stand where one is lost
                file.fdatasync()
        finally:
            file.close()
        if is_new and is_durable:
            self._disk.sync_directory(self._folder)
        part.is_dirty = False

    def _write_rows(self, file: File, part: _Part) -> int:
        """Write rows that are in no full block; the position after them."""
        while True:
            rest = part.rest
            position = BLOCKS_POSITION + len(part.firsts) * BLOCK_BYTES
            if not len(rest):
                return position
            rows = _Rows(rest.bases[:ROWS_MAX], rest.codes[:ROWS_MAX])
            data = rows.to_bytes()
            file.pwrite(data, position)
            if len(rows) < ROWS_MAX:
                return position + len(data)
            part.add_full(rows)
            part.rest = _Rows(rest.bases[ROWS_MAX:], rest.codes[ROWS_MAX:])

    def close(self) -> None:
        """Write what was added."""
        self.save()

    def _load(self) -> None:
        """Take over files as long as each follows the one before, and remove the others."""
        if not self._disk.exists(self._folder):
            return
        names = [name for name in self._disk.list(self._folder) if name.endswith(SUFFIX)]
        for number, name in enumerate(names):
            part = self._load_part(name)
            if part is None or (self._parts and part.start != self._parts[-1].end):
                for other in names[number:]:
                    self._disk.remove(f"{self._folder}/{other}")
                self._disk.sync_directory(self._folder)
                return
            self._parts.append(part)

    def _load_part(self, name: str) -> _Part | None:
        """What a file says; None where it says nothing."""
        file = self._disk.open(f"{self._folder}/{name}")
        try:
            data = file.pread(BLOCKS_POSITION, 0)
            if len(data) < HEADER_SIZE:
                return None
            if crc32c(data[: _HEADER.size]) != _CRC.unpack_from(data, _HEADER.size)[0]:
                return None
            fields = _HEADER.unpack_from(data)
            magic, version, identity, start, end, view_start, epoch, full, rest, crc = fields
            part = _Part(start, end)
            if (magic, version, identity) != (MAGIC, VERSION, self._identity) or name != part.name:
                return None  # one of another format is made again from the log
            self._start = max(self._start, view_start)
            _load_rows(file, part, data[HEADER_SIZE:], full, rest, crc)
            self.epoch = epoch if part.end == end else -1
            return part
        finally:
            file.close()


def _load_rows(file: File, part: _Part, table: bytes, full: int, rest: int, crc: int) -> None:
    """Fill a part with what its file has, up to where that is damaged."""
    table = table[: full * _ENTRY.size]
    is_whole = len(table) == full * _ENTRY.size and crc32c(table) == crc
    if is_whole:
        for first, last in _ENTRY.iter_unpack(table):
            part.firsts.append(first)
            part.lasts.append(last)
    try:
        for at in range(len(part.firsts), full):
            part.add_full(_read_rows(file, at, ROWS_MAX))
        if rest:
            part.rest = _read_rows(file, full, rest)
    except _DamagedError:
        part.cut_damaged(len(part.firsts))


def _read_rows(file: File, at: int, count: int) -> _Rows:
    """The first `count` rows of a block, which may have more that the header did not know of."""
    rows = _parse_rows(file.pread(BLOCK_BYTES, BLOCKS_POSITION + at * BLOCK_BYTES))
    if len(rows) < count:
        raise _DamagedError
    rows.keep(count)
    return rows
