"""Checks an archive: its manifests, its files, and the log as far as that still has the records.

Everything is read back: bytes against checksums, rows against counts, offsets against ranges, dates
against folders, ranges against each other. A finding is something to look at, in words; none are
collected by halves: a check that cannot be made says so. Changes nothing, and needs no Spark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Final
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from attrs import define, field, frozen

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import EARLIEST, ResourceType
from raftmq_spark.decode import arrow_schema
from raftmq_spark.errors import DataLossError
from raftmq_spark.export.archive import Archive
from raftmq_spark.export.errors import ArchiveError
from raftmq_spark.export.manifest import (
    DataFile,
    ExportedRange,
    Gap,
    Manifest,
    PartitionKey,
    in_order,
)
from raftmq_spark.export.planning import find_topics, partition_key
from raftmq_spark.export.writer import COLUMNS, day_text, split_by_day
from raftmq_spark.plan import RangePart, open_admin
from raftmq_spark.reader import read_range
from raftmq_spark.security import ClientSettings

WINDOW: Final = 100_000
"""Offsets that are held in memory at once."""
_THREADS: Final = 4
_CHUNK_BYTES: Final = 4 << 20


class Kind(Enum):
    """What is wrong."""

    MISSING = "missing"
    DAMAGED = "damaged"
    WRONG = "wrong"
    """Whole, but not what the manifest says."""
    SURPLUS = "surplus"
    """There, but no manifest lists it."""
    DIFFERS = "differs from the log"


@frozen
class Finding:
    """Something that is not as it should be."""

    kind: Kind
    what: str
    """A path or a range."""
    why: str


@define
class Verdict:
    """What a check saw."""

    manifests: int = 0
    voided: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    rows_in_log: int = 0
    """Rows that were held against the log."""
    findings: list[Finding] = field(factory=list)
    notes: list[str] = field(factory=list)
    """What could not be checked, and why that is no fault."""

    @property
    def is_good(self) -> bool:
        """Nothing was found."""
        return not self.findings


Progressed = Callable[[int, int], None]
"""Told of files done, and files in all."""


def verify(
    archive: Archive,
    client: ClientSettings | None = None,
    *,
    progress: Progressed = lambda _done, _all: None,
) -> Verdict:
    """Check everything; with a client also against the log.

    Raises:
        StoreError: the archive cannot be read.
    """
    verdict = Verdict()
    manifests = _read_manifests(archive, verdict)
    _check_ranges(manifests, verdict)
    listed = [(item, file) for m in manifests for item in m.ranges for file in item.files]
    verdict.files = len(listed)
    with ThreadPoolExecutor(_THREADS) as pool:
        checks = pool.map(lambda pair: _check_file(archive, *pair), listed)
        for done, (rows, size, findings) in enumerate(checks, 1):
            verdict.rows += rows
            verdict.bytes += size
            verdict.findings += findings
            progress(done, len(listed))
    _find_surplus(archive, {file.path for _, file in listed}, verdict)
    if client is not None:
        bad = {finding.what for finding in verdict.findings}
        with open_admin(client) as admin:
            _check_log(archive, manifests, admin, client, bad, verdict)
    return verdict


# Manifests and ranges.


def _read_manifests(archive: Archive, verdict: Verdict) -> list[Manifest]:
    """All that can be read; behind one that cannot, the chain is not followed."""
    manifests = []
    try:
        for stored in archive.manifests():
            verdict.manifests += 1
            verdict.voided += stored.manifest.is_void
            manifests.append(stored.manifest)
    except ArchiveError as error:
        kind = Kind.MISSING if "missing" in str(error) else Kind.DAMAGED
        verdict.findings.append(Finding(kind, f"manifest {verdict.manifests + 1}", str(error)))
    return manifests


def _check_ranges(manifests: Iterable[Manifest], verdict: Verdict) -> None:
    """Ranges and gaps join on to each other without overlap, and `ends` says where they end."""
    reached: dict[PartitionKey, int] = {}
    for manifest in manifests:
        for item in in_order(manifest.ranges, manifest.gaps):
            before = reached.get(item.key, item.start)
            if before != item.start:
                why = f"manifest {manifest.number} goes on at {item.start}, not at {before}"
                verdict.findings.append(Finding(Kind.WRONG, str(item.key), why))
            reached[item.key] = item.end
            if isinstance(item, ExportedRange) and item.rows != sum(f.rows for f in item.files):
                why = f"manifest {manifest.number} says {item.rows} rows, its files have others"
                verdict.findings.append(Finding(Kind.WRONG, _named(item), why))
            if isinstance(item, Gap):
                verdict.notes.append(f"{_named(item)} is not in the archive: {item.why}")
        if manifest.end_of() != reached:
            why = "its ends are not where its ranges end"
            verdict.findings.append(Finding(Kind.WRONG, f"manifest {manifest.number}", why))


def _named(item: ExportedRange | Gap) -> str:
    return f"{item.key} [{item.start}, {item.end})"


# Files.


def _check_file(
    archive: Archive, item: ExportedRange, file: DataFile
) -> tuple[int, int, list[Finding]]:
    """Rows and bytes that are there, and what is wrong with them."""
    try:
        size, digest = _sum(archive, file.path)
    except FileNotFoundError:
        return 0, 0, [Finding(Kind.MISSING, file.path, f"{file.rows} rows of {_named(item)}")]
    except OSError as error:
        return 0, 0, [Finding(Kind.DAMAGED, file.path, f"cannot be read: {error}")]
    if size != file.bytes or digest != file.sha256:
        told = f"{file.bytes} with {file.sha256[:12]}..."
        why = f"{size} bytes with SHA-256 {digest[:12]}..., not {told}"
        return 0, size, [Finding(Kind.DAMAGED, file.path, why)]
    rows = 0
    try:
        for batch in file_batches(archive, file):
            why = _check_rows(batch, item, file, rows)
            rows += batch.num_rows
            if why:
                return rows, size, [Finding(Kind.WRONG, file.path, why)]
    except (OSError, pa.ArrowException) as error:
        return rows, size, [Finding(Kind.DAMAGED, file.path, f"cannot be read: {error}")]
    if rows != file.rows:
        why = f"{rows} rows, not {file.rows}"
        return rows, size, [Finding(Kind.WRONG, file.path, why)]
    return rows, size, []


def _sum(archive: Archive, path: str) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    with archive.store.open_input(path) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return size, digest.hexdigest()


def _check_rows(batch: pa.RecordBatch, item: ExportedRange, file: DataFile, before: int) -> str:
    """What is wrong with these rows; nothing for an empty text."""
    offsets = batch.column("offset").to_numpy()
    if not len(offsets):
        return ""
    if not bool(np.all(np.diff(offsets) > 0)):
        return "offsets do not ascend"
    if offsets[0] < file.first_offset or offsets[-1] > file.last_offset:
        return f"offsets {offsets[0]} to {offsets[-1]} are outside those of the manifest"
    if before == 0 and offsets[0] != file.first_offset:
        return f"begins with offset {offsets[0]}, not {file.first_offset}"
    if offsets[0] < item.start or offsets[-1] >= item.end:
        return f"offsets {offsets[0]} to {offsets[-1]} are outside {_named(item)}"
    if not pc.all(pc.equal(batch.column("partition"), item.partition)).as_py():
        return f"rows of other partitions than {item.partition}"
    days = [day_text(day) for day, _ in split_by_day(batch)]
    if days != [file.date]:
        return f"rows of {', '.join(days)}, not of {file.date}"
    return ""


def file_batches(archive: Archive, file: DataFile) -> Iterator[pa.RecordBatch]:
    """The rows of a file, in order."""
    with archive.store.open_input(file.path) as stream, pq.ParquetFile(stream) as parquet:
        yield from parquet.iter_batches(columns=list(COLUMNS))


def range_rows(archive: Archive, item: ExportedRange, start: int, end: int) -> pa.Table:
    """Rows of a range within `[start, end)` by offset, whatever their dates."""
    tables = [arrow_schema(COLUMNS).empty_table()]
    for file in item.files:
        if file.first_offset < end and file.last_offset >= start:
            limits = [("offset", ">=", start), ("offset", "<", end)]
            with archive.store.open_input(file.path) as stream:
                tables.append(pq.read_table(stream, columns=list(COLUMNS), filters=limits))
    return pa.concat_tables(tables).sort_by("offset").combine_chunks()


def windows(start: int, end: int) -> Iterator[tuple[int, int]]:
    """A range in pieces that fit into memory."""
    for begin in range(start, end, WINDOW):
        yield begin, min(begin + WINDOW, end)


def _find_surplus(archive: Archive, listed: set[str], verdict: Verdict) -> None:
    open_runs = {run.run for run in archive.open_runs()}
    for entry in archive.data_entries():
        if entry.path not in listed:
            is_running = any(f"-{run}-" in entry.path for run in open_runs)
            why = (
                "of a run that died or is under way; the next export deletes it if it died"
                if is_running
                else f"{entry.size} bytes that no manifest lists"
            )
            verdict.findings.append(Finding(Kind.SURPLUS, entry.path, why))


# The log.


def _check_log(
    archive: Archive,
    manifests: Iterable[Manifest],
    admin: Admin,
    client: ClientSettings,
    bad: set[str],
    verdict: Verdict,
) -> None:
    """Hold every range against the log, where that still has it."""
    ranges = [item for manifest in manifests for item in manifest.ranges]
    topics = find_topics(admin, (item.topic for item in ranges))
    keys = {
        item.key: TopicPartition(item.topic, item.partition)
        for item in ranges
        if item.topic in topics and partition_key(topics[item.topic], item.partition) == item.key
    }
    found = admin.list_offsets(dict.fromkeys(keys.values(), EARLIEST)) if keys else {}
    starts = {key: found[name].offset for key, name in keys.items()}
    compacted = {name: _is_compacted(admin, name) for name in topics}
    for key in sorted({item.key for item in ranges} - set(starts)):
        verdict.notes.append(f"{key} is not in the log any more: the topic was deleted")
    for item in ranges:
        start = starts.get(item.key)
        if start is None or any(file.path in bad for file in item.files):
            continue
        if start > item.start:
            told = f"[{item.start}, {min(start, item.end)}) is not in the log any more: retention"
            verdict.notes.append(f"{item.key} {told}")
        if start < item.end:
            _check_range(archive, item, max(start, item.start), client, compacted, verdict)


def _is_compacted(admin: Admin, topic: str) -> bool:
    entries = admin.describe_configs(ResourceType.TOPIC, topic)
    return any(e.name == "cleanup.policy" and "compact" in (e.value or "") for e in entries)


def _check_range(
    archive: Archive,
    item: ExportedRange,
    start: int,
    client: ClientSettings,
    compacted: dict[str, bool],
    verdict: Verdict,
) -> None:
    topic_id = UUID(item.topic_id) if item.topic_id else None
    for begin, end in windows(start, item.end):
        part = RangePart(item.topic, item.partition, begin, end, topic_id)
        try:
            batches = list(read_range(client, part, columns=COLUMNS))
        except DataLossError as error:
            verdict.notes.append(f"{_named(item)} cannot be held against the log: {error}")
            return
        ours = range_rows(archive, item, begin, end)
        logged = pa.Table.from_batches(batches, schema=ours.schema)
        if compacted.get(item.topic):
            there = logged["offset"].combine_chunks()
            ours = ours.filter(pc.is_in(ours["offset"], value_set=there))
        verdict.rows_in_log += logged.num_rows
        if not ours.combine_chunks().equals(logged.combine_chunks()):
            why = _difference(ours, logged)
            verdict.findings.append(Finding(Kind.DIFFERS, _named(item), why))
            return


def _difference(ours: pa.Table, logged: pa.Table) -> str:
    if ours.num_rows != logged.num_rows:
        return f"{ours.num_rows} rows in the archive, {logged.num_rows} in the log"
    for column in COLUMNS:
        mine, theirs = ours[column].to_pylist(), logged[column].to_pylist()
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a != b:
                return f"{column} at offset {ours['offset'][number]} is another one"
    return "the rows differ"
