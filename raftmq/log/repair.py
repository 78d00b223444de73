"""Mend a damaged segment: a new file beside it, synced, then renamed over it.

Never in place: spans of the old file may be on their way to a consumer, and they keep it alive.
The new file holds the sound batches around the damage and a peer's batches for the damage itself,
every one of them checked. Other damage of the segment stays damage. Copying and checking a whole
segment may take seconds, so that part is a job for a worker thread; it touches only what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from attrs import define

from raftmq.errors import CorruptBatchError
from raftmq.log.batch_reader import Epochs
from raftmq.log.segment import Damage, Segment
from raftmq.ports import Disk, DiskError, File
from raftmq.records import check_batch
from raftmq.types import Buffer

_COPY_BYTES: Final = 4 << 20


def check_repair(batches: Sequence[Buffer], start: int, end: int, epochs: Epochs) -> None:
    """Check that batches are sound and fill `[start, end)`.

    Raises:
        CorruptBatchError: they do not.
    """
    offset = start
    for batch in batches:
        header = check_batch(batch)
        if header.base_offset != offset or not epochs.allows(offset, header.leader_epoch):
            raise CorruptBatchError(f"repair with a batch that does not belong at {offset}")
        offset = header.next_offset
    if offset != end:
        raise CorruptBatchError(f"repair up to {offset} of a range up to {end}")


@define(slots=True, eq=False)
class RepairJob:
    """Builds the mended copy of a closed segment; `ReplicatedLog.repaired` puts it in place.

    Attributes:
        old: the damaged segment, which goes on serving meanwhile.
        new: a segment object that describes the mended file afterwards. It begins where `old`
            does, or at the log start when the damage reaches below it: nobody can send what lies
            there.
        version: of `old` when the job was made; another one voids it.
    """

    disk: Disk
    old: Segment
    new: Segment
    damage: Damage
    batches: Sequence[Buffer]
    source: File | None
    version: int
    is_done: bool = False

    @property
    def temporary(self) -> str:
        """Where the mended file is built."""
        return f"{self.new.path}.tmp"

    def run(self) -> None:
        """Copy, sync and check. Runs in any thread.

        Raises:
            DiskFullError: nothing changed.
            DiskError: fatal.
        """
        old, damage, source = self.old, self.damage, self.source
        file = self.disk.open(self.temporary, create=True)
        try:
            file.truncate(0)
            at = 0
            if source is not None and self.new.base_offset == old.base_offset:
                at = _copy(source, 0, damage.position, file, 0)
            for batch in self.batches:
                file.pwrite(batch, at)
                at += len(batch)
            if source is not None:
                at = _copy(source, damage.position_end, old.size, file, at)
            file.fdatasync()
        except DiskError:
            self.drop()
            raise
        self.new.describe(file, at, old.end_offset)
        self.is_done = True

    def drop(self) -> None:
        """Forget the mended file."""
        self.disk.remove(self.temporary)


def _copy(source: File, position: int, end: int, target: File, at: int) -> int:
    """Copy bytes `[position, end)`; returns the position in `target` after them."""
    while position < end:
        data = source.pread(min(_COPY_BYTES, end - position), position)
        if not data:
            break  # the file is shorter than the log's extent; that part is damage too
        target.pwrite(data, at)
        at += len(data)
        position += len(data)
    return at
