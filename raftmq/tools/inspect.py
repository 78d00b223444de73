"""Look at a log's files without changing them: for `raftmq log dump` and `raftmq log verify`.

Reads only, also beside a running node, whose unflushed tail may then look torn. What it says of one
file alone is weaker than `verify_folder`: base offset and leader epoch lie outside a batch's CRC
and can be judged only against the other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from raftmq.errors import RemoteProtocolError
from raftmq.log.aborted import Aborted, AbortedIndex
from raftmq.log.bare_entries import read_slots
from raftmq.log.batch_reader import BadBatch, Epochs, checked_batches, find_after, is_zero
from raftmq.log.indexes import DamagedIndexError, OffsetIndex, SegmentSummary, TimeIndex
from raftmq.log.log_start import LocalStart
from raftmq.log.model import BareEntry
from raftmq.log.shared import FileCache, IndexCache
from raftmq.ports import Disk, File
from raftmq.records import HEADER_SIZE, BatchHeader, parse_header

_SEGMENT_NAME: Final = re.compile(r"(\d{20})\.log")
_OFFSET_MAX: Final = 1 << 62
ZEROS: Final = "zeros up to the end"
"""Reserved room, or an append that never came."""
_ANY_EPOCH: Final = Epochs((_OFFSET_MAX,), (_OFFSET_MAX,))


@frozen(slots=True)
class SegmentItem:
    """One batch of a segment file, or a stretch that is none.

    Attributes:
        position, size: the bytes.
        header: None for a stretch that cannot be read.
        is_sound: the batch is whole and in its place.
        note: why it is not sound; "" otherwise.
    """

    position: int
    size: int
    header: BatchHeader | None
    is_sound: bool
    note: str = ""


@frozen(slots=True)
class Finding:
    """A fault that `verify_folder` found.

    Attributes:
        path: the file.
        position: byte in it, or -1.
        is_damage: False for faults that the node repairs by itself (indexes, a torn tail).
        text: describes it.
    """

    path: str
    position: int
    is_damage: bool
    text: str


def base_offset_of(path: str) -> int:
    """The base offset in a segment's name.

    Raises:
        ValueError: not the name of a segment.
    """
    match = _SEGMENT_NAME.fullmatch(path.rpartition("/")[2])
    if match is None:
        raise ValueError(f"{path}: not a segment (20 digits and .log)")
    return int(match[1])


def read_segment(
    file: File, base_offset: int, epochs: Epochs = _ANY_EPOCH
) -> Iterator[SegmentItem]:
    """Yield every batch of a segment file and every stretch between them that is none.

    Raises:
        DiskError: the device failed.
    """
    size = file.size()
    position, offset = 0, base_offset
    while position < size:
        try:
            for batch in checked_batches(file, position, size, offset, epochs):
                header = batch.header
                yield SegmentItem(batch.position, header.size, header, True)
                position, offset = batch.position + header.size, header.next_offset
        except BadBatch as bad:
            found = find_after(file, bad, size, _OFFSET_MAX, epochs)
            end = size if found is None else found[0]
            claimed = bad.claimed or _header_at(file, bad.position)
            note = _describe(file, bad, end, is_tail=found is None)
            yield SegmentItem(bad.position, end - bad.position, claimed, False, note)
            position, offset = (end, offset) if found is None else found


def _header_at(file: File, position: int) -> BatchHeader | None:
    data = file.pread(HEADER_SIZE, position)
    return parse_header(data) if len(data) == HEADER_SIZE and not is_zero(data) else None


def _describe(file: File, bad: BadBatch, end: int, *, is_tail: bool) -> str:
    if is_tail and is_zero(file.pread(end - bad.position, bad.position)):
        return ZEROS
    if bad.is_short and is_tail:
        return "cut off by the end of the file"
    if bad.claimed is None:
        return f"no batch that begins at offset {bad.offset}"
    return "wrong CRC, counts or leader epoch"


def read_bare_entries(disk: Disk, path: str) -> Iterator[tuple[BareEntry, bool]]:
    """Yield the entries of a `bare.entries` file and whether both copies are sound.

    Raises:
        FileNotFoundError: no such file.
        NewerFormatError: of a newer raftmq.
        DiskError: the device failed.
    """
    for slot in read_slots(_content(disk, path)).slots:
        yield slot.entry, slot.is_whole


def read_log_start(disk: Disk, path: str) -> LocalStart | None:
    """Contents of a `log-start` file; None when both copies are damaged.

    Raises:
        FileNotFoundError: no such file.
        NewerFormatError: of a newer raftmq.
        DiskError: the device failed.
    """
    return LocalStart.decode(_content(disk, path))


def read_index(disk: Disk, path: str) -> tuple[SegmentSummary, list[tuple[int, int]]]:
    """Header and pairs of an `.index` (offset, position) or `.timeindex` (timestamp, offset).

    Raises:
        DamagedIndexError: the node will rebuild it.
        NewerFormatError: of a newer raftmq.
        DiskError: the device failed.
    """
    stem, _, suffix = path.rpartition(".")
    base = base_offset_of(f"{stem}.log")
    files, cache = FileCache(disk, 1), IndexCache()
    if suffix == "index":
        offsets = OffsetIndex(path, base, files, cache)
        summary = offsets.open()
        return summary, [(base + key, value) for key, value in offsets.pairs()]
    times = TimeIndex(path, base, files, cache)
    summary = times.open()
    return summary, times.pairs()


def read_aborted(disk: Disk, path: str) -> tuple[int, list[Aborted]]:
    """What a `.txnindex` says: up to where it knows all, and the aborted transactions.

    Raises:
        DamagedIndexError: the node will rebuild it.
        NewerFormatError: of a newer raftmq.
        DiskError: the device failed.
    """
    base = base_offset_of(f"{path.rpartition('.')[0]}.log")
    index = AbortedIndex(path, base, FileCache(disk, 1), IndexCache())
    index.open()
    if not index.is_known:
        raise DamagedIndexError(f"{path}: it says nothing of this segment")
    return index.covered, list(index.between(base, _OFFSET_MAX))


def _content(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


def verify_folder(disk: Disk, folder: str) -> list[Finding]:
    """Check every byte of a partition's folder; an empty list means that all is well.

    Raises:
        NewerFormatError: a file of a newer raftmq.
        DiskError: the device failed.
    """
    return list(_verify(disk, folder))


def _verify(disk: Disk, folder: str) -> Iterator[Finding]:
    names = disk.list(folder)
    start_path = f"{folder}/log-start"
    if "log-start" not in names:
        yield Finding(start_path, -1, True, "missing")
        return
    try:
        local = read_log_start(disk, start_path)
    except RemoteProtocolError as error:
        yield Finding(start_path, 0, True, str(error))
        return
    if local is None:
        yield Finding(start_path, 0, True, "both copies are damaged")
        return
    if local.encode() != _content(disk, start_path):
        yield Finding(start_path, 0, False, "one of two copies is damaged")
    if local.pending:
        yield Finding(start_path, 0, False, f"unfinished {local.pending.name.lower()}")
    starts = [int(local.log_start.base_offset)]
    epochs = [int(local.log_start.previous_epoch)]
    yield from _verify_bare(disk, folder, names, local, starts, epochs)
    yield from _verify_segments(disk, folder, names, Epochs(tuple(starts), tuple(epochs)))


def _verify_bare(
    disk: Disk,
    folder: str,
    names: list[str],
    local: LocalStart,
    starts: list[int],
    epochs: list[int],
) -> Iterator[Finding]:
    """Check the bare entries and learn the epochs from them."""
    path = f"{folder}/bare.entries"
    if "bare.entries" not in names:
        return
    found = read_slots(_content(disk, path))
    expected = local.log_start.index - local.log_start.base_offset
    for slot in found.slots:
        entry = slot.entry
        if entry.index < local.log_start.index:
            continue
        if not slot.is_whole:
            yield Finding(path, slot.position, False, "one of two copies is damaged")
        if entry.index - entry.base_offset != expected:
            yield Finding(path, slot.position, True, f"entries before index {entry.index} are lost")
        expected = entry.index - entry.base_offset + 1
        if entry.leader_epoch != epochs[-1]:
            starts.append(entry.base_offset)
            epochs.append(entry.leader_epoch)
    if found.is_tail_bad:
        yield Finding(path, found.end, False, "a torn or damaged entry at the end")


def _verify_segments(
    disk: Disk, folder: str, names: list[str], epochs: Epochs
) -> Iterator[Finding]:
    bases = [int(match[1]) for match in map(_SEGMENT_NAME.fullmatch, names) if match]
    start = epochs.starts[0]
    end = start
    for at, base in enumerate(bases):
        path = f"{folder}/{base:020d}.log"
        next_base = bases[at + 1] if at + 1 < len(bases) else None
        if next_base is not None and next_base <= start:
            yield Finding(path, -1, False, "lies below the log start")
            continue
        if base > end:
            yield Finding(path, -1, True, f"offsets [{end}, {base}) are missing before it")
        file = disk.open(path)
        try:
            for item in read_segment(file, base, epochs):
                if item.is_sound and item.header is not None:
                    end = item.header.next_offset
                    continue
                is_tail = next_base is None and item.position + item.size == file.size()
                if not (is_tail and item.note == ZEROS):
                    yield Finding(path, item.position, not is_tail, item.note)
        finally:
            file.close()
        yield from _verify_indexes(disk, path)


def _verify_indexes(disk: Disk, path: str) -> Iterator[Finding]:
    for suffix in ("index", "timeindex", "txnindex"):
        index_path = f"{path[: -len('log')]}{suffix}"
        if not disk.exists(index_path):
            continue
        try:
            if suffix == "txnindex":
                read_aborted(disk, index_path)
            else:
                read_index(disk, index_path)
        except DamagedIndexError as error:
            yield Finding(index_path, 0, False, str(error))
