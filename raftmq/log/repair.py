"""Mend a damaged segment: a new file beside it, synced, then renamed over it.

Never in place: spans of the old file may be on their way to a consumer, and they keep it alive.
The new file holds the sound batches around the damage and a peer's batches for the damage itself,
every one of them checked. Other damage of the segment stays damage.
"""

from __future__ import annotations

from collections.abc import Sequence

from raftmq.errors import CorruptBatchError
from raftmq.log.batch_reader import Epochs
from raftmq.log.segment import Damage, Segment
from raftmq.ports import Disk, File
from raftmq.records import check_batch
from raftmq.types import Buffer

_COPY_BYTES = 4 << 20


def repair(
    old: Segment,
    new: Segment,
    damage: Damage,
    batches: Sequence[Buffer],
    epochs: Epochs,
    start: int,
    disk: Disk,
    folder: str,
) -> None:
    """Build the mended file under the name of `new`; durable on return.

    `new` is an empty segment object at the base offset the mended one shall have: that of `old`, or
    the log start when the damage reaches below it, since nobody can send what lies there. It
    describes the mended file afterwards.

    Raises:
        CorruptBatchError: the batches do not fill `[start, damage.end)`, or are wrong.
        DiskFullError: nothing changed.
        DiskError: fatal.
    """
    _check(batches, start, damage.end, epochs)
    is_reduced = new.base_offset != old.base_offset
    assert not is_reduced or new.base_offset == start
    temporary = f"{new.path}.tmp"
    file = disk.open(temporary, create=True)
    try:
        file.truncate(0)
        at = 0 if is_reduced or old.is_missing else _copy(old.file, 0, damage.position, file, 0)
        for batch in batches:
            file.pwrite(batch, at)
            at += len(batch)
        if not old.is_missing:
            at = _copy(old.file, damage.position_end, old.size, file, at)
        file.fdatasync()
    except BaseException:
        file.close()
        disk.remove(temporary)
        raise
    file.close()
    disk.rename(temporary, new.path)
    if new.path != old.path:
        old.remove()
    disk.sync_directory(folder)
    old.release()
    new.size, new.end_offset = at, old.end_offset
    new.rebuild()


def _check(batches: Sequence[Buffer], start: int, end: int, epochs: Epochs) -> None:
    offset = start
    for batch in batches:
        header = check_batch(batch)
        if header.base_offset != offset or not epochs.allows(offset, header.leader_epoch):
            raise CorruptBatchError(f"repair with a batch that does not belong at {offset}")
        offset = header.next_offset
    if offset != end:
        raise CorruptBatchError(f"repair up to {offset} of a range up to {end}")


def _copy(source: File, position: int, end: int, target: File, at: int) -> int:
    while position < end:
        data = source.pread(min(_COPY_BYTES, end - position), position)
        if not data:
            break  # the file is shorter than the log's extent; that part is damage too
        target.pwrite(data, at)
        at += len(data)
        position += len(data)
    return at
