"""What counts: the manifest of one export, as a value and as bytes.

A manifest lists half-open ranges of offsets with their files, row counts and checksums, the gaps
that somebody agreed to, and `ends`, how far the archive reaches with it in all. It names the
checksum of the manifest before it, so that a lost or changed one is noticed. Numbers have no holes:
a run that died is voided by an empty manifest under the number it meant to write, after which it
can never count. Pure: knows no file system, no broker and no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec
from attrs import field, frozen

from raftmq_spark.export.errors import ArchiveError

FORMAT: Final = 1
FOLDER: Final = "_manifests"
IDENTITY_PATH: Final = f"{FOLDER}/archive.json"
RUNS_FOLDER: Final = "_runs"
_DIGITS: Final = 8


class Until(Enum):
    """Up to where an archive follows its topics."""

    STABLE = "stable"
    """The last stable offset; the group is the export's own and its offsets are committed."""
    COMMITTED = "committed"
    """What the group's consumers have committed; the export commits nothing."""


class PartitionKey(NamedTuple):
    """A partition of one incarnation of a topic: deleted and created anew it is another one."""

    topic: str
    topic_id: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@frozen
class Identity:
    """Whose archive this is; written once."""

    archive: str
    cluster: str
    group: str
    until: Until
    format: int = FORMAT


@frozen
class DataFile:
    """One Parquet file. `path` is relative to the archive, `date` empty for impossible times."""

    path: str
    date: str
    rows: int
    bytes: int
    sha256: str
    first_offset: int
    last_offset: int


@frozen
class ExportedRange:
    """Offsets `[start, end)` of a partition and the files that hold their records."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    rows: int
    files: tuple[DataFile, ...] = ()

    @property
    def key(self) -> PartitionKey:
        """The partition."""
        return PartitionKey(self.topic, self.topic_id, self.partition)


@frozen
class Gap:
    """Offsets that the archive passes over, and why: `retention`, `skipped`, `unreadable`."""

    topic: str
    topic_id: str
    partition: int
    start: int
    end: int
    why: str

    @property
    def key(self) -> PartitionKey:
        """The partition."""
        return PartitionKey(self.topic, self.topic_id, self.partition)


@frozen
class End:
    """How far the archive reaches in one partition."""

    topic: str
    topic_id: str
    partition: int
    end: int

    @property
    def key(self) -> PartitionKey:
        """The partition."""
        return PartitionKey(self.topic, self.topic_id, self.partition)


@frozen
class Manifest:
    """One export that counts; with `is_void` one that never will."""

    number: int
    run: str
    archive: str
    created_at: str
    previous: str
    """Checksum of manifest `number - 1`, empty for the first."""
    ranges: tuple[ExportedRange, ...] = ()
    gaps: tuple[Gap, ...] = ()
    ends: tuple[End, ...] = ()
    is_void: bool = False
    format: int = FORMAT

    @property
    def rows(self) -> int:
        """Rows that it adds."""
        return sum(item.rows for item in self.ranges)

    @property
    def bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.bytes for item in self.ranges for file in item.files)

    def files(self) -> Iterable[DataFile]:
        """All its files, by range."""
        for item in self.ranges:
            yield from item.files

    def end_of(self) -> dict[PartitionKey, int]:
        """How far the archive reaches, by partition."""
        return {item.key: item.end for item in self.ends}


@frozen
class Run:
    """Written before a run's first file: what to clean up should it die."""

    run: str
    number: int
    """The manifest that it means to write."""
    topics: tuple[str, ...]
    host: str
    pid: int
    created_at: str
    format: int = FORMAT


@frozen
class Stored:
    """A manifest as it was read, with the checksum of its bytes."""

    manifest: Manifest
    sha256: str = field(default="")


def manifest_path(number: int) -> str:
    """Where a manifest lies in its archive."""
    return f"{FOLDER}/{number:0{_DIGITS}d}.json"


def manifest_number(name: str) -> int | None:
    """The number in a manifest's file name; None for other files."""
    stem, dot, rest = name.rpartition("/")[2].partition(".")
    return int(stem) if dot and rest == "json" and stem.isdigit() else None


def encode(value: Manifest | Identity | Run) -> bytes:
    """As JSON for people and machines."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def decode_manifest(data: bytes, path: str) -> Stored:
    """Read a manifest.

    Raises:
        ArchiveError: damaged, or of a newer format.
    """
    return Stored(_decode(data, Manifest, path), checksum(data))


def decode_identity(data: bytes, path: str) -> Identity:
    """Read whose archive it is.

    Raises:
        ArchiveError: damaged, or of a newer format.
    """
    identity: Identity = _decode(data, Identity, path)
    return identity


def decode_run(data: bytes, path: str) -> Run:
    """Read what a run meant to do.

    Raises:
        ArchiveError: damaged, or of a newer format.
    """
    run: Run = _decode(data, Run, path)
    return run


def checksum(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def _decode(data: bytes, kind: type[Any], path: str) -> Any:
    try:
        head = msgspec.json.decode(data)
        version = head.get("format") if isinstance(head, dict) else None
        if isinstance(version, int) and version > FORMAT:
            raise ArchiveError(
                f"{path} has format {version}; this raftmq reads up to {FORMAT}: use a newer one"
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArchiveError(f"{path} is damaged: {error}") from None


def in_order(ranges: Iterable[ExportedRange], gaps: Iterable[Gap]) -> list[ExportedRange | Gap]:
    """Ranges and gaps together, by partition and offset."""
    items: list[ExportedRange | Gap] = [*ranges, *gaps]
    return sorted(items, key=lambda item: (item.key, item.start))


def next_ends(
    before: Mapping[PartitionKey, int], ranges: Sequence[ExportedRange], gaps: Sequence[Gap]
) -> tuple[End, ...]:
    """How far the archive reaches with these ranges.

    Ranges and gaps of a partition join on to each other and to what was there before.
    """
    reached = dict(before)
    for item in in_order(ranges, gaps):
        known = reached.get(item.key)
        assert known is None or known == item.start, f"{item.key} joins at {known}: {item}"
        assert item.end > item.start
        reached[item.key] = item.end
    return tuple(End(*key, end) for key, end in sorted(reached.items()))
