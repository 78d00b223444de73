"""One group commit: the files and folders to sync, and how far the log is flushed afterwards.

`run` touches only what it captured at its making, so it may run in any thread; whatever the log
does meanwhile (append, roll, truncate, unlink) cannot race with it. The log's truncation lowers
what the job may claim, see `ReplicatedLog.truncate_to`.
"""

from __future__ import annotations

from attrs import define

from raftmq.ports import Disk, File


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
