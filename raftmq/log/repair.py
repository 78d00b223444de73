"""Repair a damaged segment: a new file beside it, synced, then renamed over it.

Never in place: spans of the old file may be on their way to a consumer, and they keep it alive.
A peer's batches are gathered in a file first; the new segment holds the sound ones around the
damage and those, every one of them checked. Other damage of the segment stays damage. Copying and
checking a whole segment may take seconds, so that part is a job for a worker thread; it touches
only what it holds.
"""

from __future__ import annotations

from typing import Final

from attrs import define

from raftmq.errors import CorruptBatchError
from raftmq.log.batch_reader import Epochs
from raftmq.log.segment import Damage, Segment
from raftmq.ports import Disk, DiskError, File
from raftmq.records import check_batch
from raftmq.types import Buffer

_COPY_BYTES: Final = 4 << 20
_SYNC_BYTES: Final = 32 << 20
"""Copied bytes are synced in such pieces: all at once would make every other flush wait."""


@define(slots=True, eq=False)
class Fill:
    """Batches for one damaged range, gathered in a file until they fill it, since a range may be a
    whole segment. A crash leaves a file that the next opening removes.

    Attributes:
        next_offset: where the next batch must begin.
        size: bytes gathered.
    """

    disk: Disk
    path: str
    start: int
    end: int
    epochs: Epochs
    next_offset: int = 0
    size: int = 0
    file: File | None = None

    @property
    def is_full(self) -> bool:
        """True when the whole range is there."""
        return self.next_offset == self.end

    def add(self, batch: Buffer) -> None:
        """Check and keep the batch that comes next.

        Raises:
            CorruptBatchError: it is damaged, or does not belong there.
            DiskFullError: it was not kept.
            DiskError: fatal.
        """
        header = check_batch(batch)
        at = self.next_offset
        if (
            header.base_offset != at
            or header.next_offset > self.end
            or not self.epochs.allows(at, header.leader_epoch)
        ):
            raise CorruptBatchError(f"repair with a batch that does not belong at {at}")
        if self.file is None:
            self.file = self.disk.open(self.path, create=True)
            self.file.truncate(0)
        self.file.pwrite(batch, self.size)
        self.size += len(batch)
        self.next_offset = header.next_offset

    def drop(self) -> None:
        """Forget what was gathered."""
        if self.file is not None:
            self.file = None
            self.disk.remove(self.path)


@define(slots=True, eq=False)
class RepairJob:
    """Builds the repaired copy of a closed segment; `ReplicatedLog.repaired` puts it in place.

    Attributes:
        old: the damaged segment, which goes on serving meanwhile.
        new: a segment object that describes the repaired file afterwards. It begins where `old`
            does, or at the log start when the damage reaches below it: no peer can send what lies
            there.
        version: of `old` when the job was made; another one voids it.
    """

    disk: Disk
    old: Segment
    new: Segment
    damage: Damage
    fill: Fill
    source: File | None
    version: int
    is_done: bool = False

    @property
    def temporary(self) -> str:
        """Where the repaired file is built."""
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
            if self.fill.file is not None:
                at = _copy(self.fill.file, 0, self.fill.size, file, at)
            if source is not None:
                at = _copy(source, damage.position_end, old.size, file, at)
            file.fdatasync()
        except DiskError:
            self.drop()
            raise
        self.new.describe(file, at, old.end_offset)
        self.is_done = True

    def drop(self) -> None:
        """Remove the repaired file and the gathered batches."""
        self.disk.remove(self.temporary)
        self.fill.drop()


def _copy(source: File, position: int, end: int, target: File, at: int) -> int:
    """Copy bytes `[position, end)`; returns the position in `target` after them."""
    while position < end:
        data = source.pread(min(_COPY_BYTES, end - position), position)
        if not data:
            break  # the file is shorter than the log's extent; that part is damage too
        target.pwrite(data, at)
        if at // _SYNC_BYTES != (at + len(data)) // _SYNC_BYTES:
            target.fdatasync()
        at += len(data)
        position += len(data)
    return at
