"""Values of the log that its callers hold: entries, spans, settings, flush jobs, recovery reports.

Offsets are Kafka offsets, indexes are positions of the Raft log (offset + bare entries before it);
`replicated_log.py` alone converts one into the other.
"""

from __future__ import annotations

from typing import Final

from attrs import Factory, define, frozen

from raftmq.errors import AheadError, RaftmqError, StorageError
from raftmq.ports import Disk, File
from raftmq.types import Buffer, LeaderEpoch, Offset, RaftIndex

BATCH_KIND: Final = 0
"""`LogEntry.kind` of a batch; bare entries have other kinds, which are opaque here."""


@frozen(slots=True)
class BareEntry:
    """An entry without records: an election, a membership, a log-start move. Takes no offset."""

    index: RaftIndex
    leader_epoch: LeaderEpoch
    base_offset: Offset
    kind: int
    payload: bytes


@define(slots=True, unsafe_hash=True)
class LogEntry:
    """One entry as read from the log: a batch, or a bare entry with its payload.

    Never changed once made; not frozen, because one is made per batch on the hot path.
    """

    start: RaftIndex
    end: RaftIndex
    leader_epoch: LeaderEpoch
    kind: int
    payload: Buffer

    @property
    def is_bare(self) -> bool:
        """True when it has no records."""
        return self.kind != BATCH_KIND


@frozen(slots=True)
class FileSpan:
    """Verified bytes of whole batches in a file.

    The span keeps the file alive: the log may unlink, replace or drop it meanwhile. `base_offset`
    is that of its first batch, `end_offset` the next offset of its last one.
    """

    file: File
    position: int
    size: int
    end_offset: int = -1
    base_offset: int = -1


@frozen(slots=True)
class LogConfig:
    """Settings of one log.

    Attributes:
        segment_bytes: a segment is closed before it would grow beyond this.
        segment_ms: and when it is this old.
        index_interval_bytes: one sparse index entry per so many bytes.
        retention_bytes: -1, or how much is kept.
        retention_ms: -1, or how long records are kept.
        verified_ms: how long bytes count as verified; afterwards they are checked again before
            they are served.
        verify_bytes_max: how much one `locate` checks inline at most (one batch at least).
        bare_reserve_bytes: kept allocated for bare entries, so that elections work on a full disk.
        segment_reserve_bytes: kept allocated ahead in the active segment (metadata group).
        staged_bytes_max: how much waits in memory while the disk is full before appends fail.
        recent_bytes_max: how much of the newest batches this log keeps in memory at most.
    """

    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * 24 * 3600 * 1000
    index_interval_bytes: int = 4096
    retention_bytes: int = -1
    retention_ms: int = 14 * 24 * 3600 * 1000
    verified_ms: int = 24 * 3600 * 1000
    verify_bytes_max: int = 1 << 20
    bare_reserve_bytes: int = 32 * 1024
    segment_reserve_bytes: int = 0
    staged_bytes_max: int = 64 << 20
    recent_bytes_max: int = 1 << 30


class DamagedError(StorageError):
    """Bytes that this replica should hold are damaged: never served, and repaired from a peer."""

    def __init__(self, start: Offset, end: Offset) -> None:
        super().__init__(f"offsets [{start}, {end}) are damaged on this replica")
        self.start = start
        self.end = end


class UnusableLogError(RaftmqError):
    """The folder lost what the log cannot be read without (log start, bare entries).

    The replica is to be treated as one that lost its storage: no vote, no ack, until re-admitted.
    """


class NewerFormatError(AheadError):
    """A file was written by a newer raftmq."""


@define(slots=True)
class RecoveryReport:
    """What opening the log found.

    Attributes:
        is_new: there was nothing; a log was begun.
        cut: bytes after the recorded flushed end were cut off.
        cut_claimed_end: the end that the cut bytes claimed, 0 when they cannot have been whole
            (the file ended before them), so they were never promised to be durable.
            While it is above 0, votes are to be refused to logs that end below it.
        damaged: offset ranges that the replica should hold and cannot read.
        claimed_end: the log end that must be kept although bytes below it are damaged; 0 if sound.
        dropped_bare_entries: bare entries beyond the log end that were dropped.
        finished: an interrupted truncation or reset was carried through.
        scanned_bytes: how much was read and checked.
    """

    is_new: bool = False
    cut: bool = False
    cut_claimed_end: RaftIndex = RaftIndex(0)
    damaged: list[tuple[Offset, Offset]] = Factory(list)
    claimed_end: RaftIndex = RaftIndex(0)
    dropped_bare_entries: int = 0
    finished: str = ""
    scanned_bytes: int = 0


@define(slots=True, eq=False)
class FlushJob:
    """Syncs captured files, then renames one (the journal's), then syncs folders.

    Attributes:
        synced_offset: batches below it were written to the captured files.
        bare_count: so many bare entries (counted since the log was opened) were written.
        sequence: of the journal's jobs, the last record that was written.
        is_void: the log was truncated below or reset: the job claims nothing.
    """

    disk: Disk
    files: tuple[File, ...]
    folders: tuple[str, ...] = ()
    synced_offset: int = 0
    bare_count: int = 0
    sequence: int = 0
    rename: tuple[str, str] | None = None
    is_void: bool = False
    is_done: bool = False

    def run(self) -> None:
        """Make the captured writes durable. Runs in any thread.

        Raises:
            DiskError: never retried; the replica (or the node, for the journal) must stop.
        """
        for file in self.files:
            file.fdatasync()
        if self.rename is not None:
            self.disk.rename(*self.rename)
        for folder in self.folders:
            self.disk.sync_directory(folder)
        self.is_done = True
