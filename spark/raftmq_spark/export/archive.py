"""An archive: its identity, its manifests in order, the runs that may have left files behind.

Only what a manifest lists counts. Owns the numbering: the next manifest is the last one's number
plus one, and whoever puts it first has it. A run that ended without its manifest is voided before
its files are deleted: an empty manifest takes the number it meant to write, so that, should it only
have been paused, it finds the number taken and can never list files that are gone. Knows no broker.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Final

from attrs import define, frozen

from raftmq_spark.export.errors import ArchiveError, BusyError
from raftmq_spark.export.manifest import (
    FOLDER,
    IDENTITY_PATH,
    RUNS_FOLDER,
    DataFile,
    End,
    ExportedRange,
    Gap,
    Identity,
    Manifest,
    PartitionKey,
    Run,
    Stored,
    Until,
    decode_identity,
    decode_manifest,
    decode_run,
    encode,
    manifest_number,
    manifest_path,
    next_ends,
)
from raftmq_spark.export.store import Entry, Location, Store, open_store

TOPIC_PREFIX: Final = "topic="
DATE_PREFIX: Final = "date="
NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"
"""Hive's, Spark's and pyarrow's name for a null: timestamps that are no date of this calendar."""


@frozen
class State:
    """An archive at one moment."""

    last: Stored | None

    @property
    def next_number(self) -> int:
        """The number of the manifest to come."""
        return 1 if self.last is None else self.last.manifest.number + 1

    @property
    def ends(self) -> dict[PartitionKey, int]:
        """How far the archive reaches, by partition."""
        return {} if self.last is None else self.last.manifest.end_of()


@define
class Archive:
    """An archive in a store."""

    store: Store
    identity: Identity

    # Manifests.

    def state(self) -> State:
        """The newest manifest."""
        numbers = manifest_numbers(self.store)
        return State(self.manifest(numbers[-1]) if numbers else None)

    def manifest(self, number: int) -> Stored:
        """One manifest.

        Raises:
            ArchiveError: it is missing, damaged, of a newer format or of another archive.
        """
        return read_manifest(self.store, self.identity, number)

    def manifests(self) -> Iterator[Stored]:
        """All manifests in order; each must name the checksum of the one before.

        Raises:
            ArchiveError: one is missing, damaged or was changed.
        """
        numbers = manifest_numbers(self.store)
        previous = ""
        for number in range(1, numbers[-1] + 1 if numbers else 1):
            stored = self.manifest(number)
            if stored.manifest.previous != previous:
                raise ArchiveError(
                    f"{self.store.location}: manifest {number} does not follow the manifest"
                    f" {number - 1} that is there: one of them was changed"
                )
            previous = stored.sha256
            yield stored

    def put(
        self,
        state: State,
        run: Run,
        ranges: Iterable[ExportedRange],
        gaps: Iterable[Gap],
    ) -> Manifest:
        """Make a run count: write its manifest, unless somebody else wrote that number.

        Raises:
            BusyError: somebody did; nothing of this run counts.
        """
        ranges, gaps = tuple(ranges), tuple(gaps)
        manifest = Manifest(
            number=run.number,
            run=run.run,
            archive=self.identity.archive,
            created_at=now_text(),
            previous="" if state.last is None else state.last.sha256,
            ranges=ranges,
            gaps=gaps,
            ends=next_ends(state.ends, ranges, gaps),
        )
        assert run.number == state.next_number
        stands = self._put(manifest)
        if stands.run != run.run or stands.is_void:
            raise BusyError(
                f"{self.store.location}: another export wrote manifest {run.number} meanwhile;"
                " nothing of this run counts, and the next one goes on from there"
            )
        return stands

    def _put(self, manifest: Manifest) -> Manifest:
        """Write a manifest or find the one that stands in its place."""
        if self.store.put_if_absent(manifest_path(manifest.number), encode(manifest)):
            return manifest
        # Also after a put of ours whose answer was lost and that was sent again.
        return self.manifest(manifest.number).manifest

    # Runs that may have left files behind.

    def begin(self, state: State, topics: Iterable[str]) -> Run:
        """Note a run before its first file."""
        run = Run(
            run=secrets.token_hex(6),
            number=state.next_number,
            topics=tuple(sorted(topics)),
            host=socket.gethostname(),
            pid=os.getpid(),
            created_at=now_text(),
        )
        self.store.put(_run_path(run.run), encode(run))
        return run

    def end(self, run: Run) -> None:
        """Forget a run: it counts, or all that it left is deleted."""
        self.store.delete(_run_path(run.run))

    def open_runs(self) -> list[Run]:
        """Runs that did not end, or have not yet."""
        found = []
        for entry in self.store.entries(RUNS_FOLDER):
            data = self.store.read(entry.path)
            if data is not None:
                found.append(decode_run(data, f"{self.store.location}/{entry.path}"))
        return sorted(found, key=lambda run: (run.number, run.run))

    def settle(self, run: Run) -> bool:
        """Decide about a run that did not end: True if it counts, else it never will."""
        state = self.state()
        if run.number >= state.next_number:
            assert run.number == state.next_number, f"a run ahead of its archive: {run}"
            void = Manifest(
                number=run.number,
                run=run.run,
                archive=self.identity.archive,
                created_at=now_text(),
                previous="" if state.last is None else state.last.sha256,
                ends=tuple(End(*key, end) for key, end in sorted(state.ends.items())),
                is_void=True,
            )
            stands = self._put(void)
        else:
            stands = self.manifest(run.number).manifest
        return stands.run == run.run and not stands.is_void

    def clean(self, run: Run) -> list[str]:
        """Delete every file of a run that does not count; what was deleted."""
        deleted = []
        for topic in run.topics:
            entries = self.store.entries(topic_folder(topic), is_deep=True, with_unfinished=True)
            for entry in entries:
                if _is_of(run, entry):
                    self.store.delete(entry.path)
                    deleted.append(entry.path)
        return deleted

    def sweep(self, run: Run, manifest: Manifest) -> list[str]:
        """Delete what failed or needless attempts of a run that counts left; what was deleted.

        Every attempt at a range writes to the same dates, so only those folders are looked at.
        """
        listed = {file.path for file in manifest.files()}
        deleted = []
        for folder in sorted({path.rpartition("/")[0] for path in listed}):
            for entry in self.store.entries(folder, with_unfinished=True):
                if entry.path not in listed and _is_of(run, entry):
                    self.store.delete(entry.path)
                    deleted.append(entry.path)
        return deleted

    # Data.

    def files(self) -> Iterator[DataFile]:
        """Every file that counts, by manifest and range."""
        for stored in self.manifests():
            yield from stored.manifest.files()

    def data_entries(self) -> list[Entry]:
        """Every Parquet file that is there, counting or not."""
        entries: list[Entry] = []
        for folder in self.store.folders():
            if folder.startswith(TOPIC_PREFIX):
                entries.extend(self.store.entries(folder, is_deep=True, with_unfinished=True))
        return entries


def open_archive(
    location: Location, *, cluster: str, group: str, until: Until
) -> tuple[Archive, bool]:
    """The archive of a group, made where there is none; whether it is new.

    Raises:
        ArchiveError: it is another group's or cluster's, or damaged.
    """
    store = open_store(location)
    mine = Identity(secrets.token_hex(8), cluster, group, until)
    data = store.read(IDENTITY_PATH)
    is_new = data is None and store.put_if_absent(IDENTITY_PATH, encode(mine))
    if is_new:
        return Archive(store, mine), True
    archive = find_archive(store)
    found = archive.identity
    if found.group != group or found.cluster != cluster:
        whose = f"group {found.group!r} of cluster {found.cluster!r}"
        raise ArchiveError(
            f"{location} is the archive of {whose}, not of group {group!r} of cluster {cluster!r};"
            " give each a folder of its own"
        )
    if found.until is not until:
        raise ArchiveError(
            f"{location} is filled with --until {found.until.value}, which cannot change;"
            f" use another folder for --until {until.value}"
        )
    return archive, False


def find_archive(store: Store) -> Archive:
    """The archive that is in a store.

    Raises:
        ArchiveError: there is none, or it is damaged.
    """
    data = store.read(IDENTITY_PATH)
    if data is None:
        raise ArchiveError(f"{store.location} is no archive: it has no {IDENTITY_PATH}")
    return Archive(store, decode_identity(data, f"{store.location}/{IDENTITY_PATH}"))


def archive_files(to: str) -> list[str]:
    """Full paths of the files that count, for `spark.read.parquet(*paths)` or pyarrow.

    Between a crash and the next run an archive holds files that do not count; these leave them out.
    """
    from raftmq_spark.export.store import locate

    archive = find_archive(open_store(locate(to)))
    prefix = {"s3": "s3a://", "hdfs": "hdfs://"}.get(archive.store.location.scheme, "")
    if archive.store.location.scheme == "hdfs":
        base = str(archive.store.location)
        return [f"{base}/{file.path}" for file in archive.files()]
    return [f"{prefix}{archive.store.full(file.path)}" for file in archive.files()]


def manifest_numbers(store: Store) -> list[int]:
    """The numbers of all manifests that are there, ascending."""
    found = (manifest_number(entry.path) for entry in store.entries(FOLDER))
    return sorted(number for number in found if number is not None)


def read_manifest(store: Store, identity: Identity, number: int) -> Stored:
    """One manifest.

    Raises:
        ArchiveError: it is missing, damaged, of a newer format or of another archive.
    """
    path = manifest_path(number)
    data = store.read(path)
    if data is None:
        raise ArchiveError(f"{store.location}/{path} is missing")
    stored = decode_manifest(data, f"{store.location}/{path}")
    if stored.manifest.archive != identity.archive or stored.manifest.number != number:
        raise ArchiveError(f"{store.location}/{path} belongs to another archive or number")
    return stored


def topic_folder(topic: str) -> str:
    """Where a topic's files lie. Topic names hold no character that needs escaping."""
    return f"{TOPIC_PREFIX}{topic}"


def now_text() -> str:
    """The time, for people: nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _is_of(run: Run, entry: Entry) -> bool:
    return f"-{run.run}-" in entry.path.rpartition("/")[2]


def _run_path(run: str) -> str:
    return f"{RUNS_FOLDER}/{run}.json"
