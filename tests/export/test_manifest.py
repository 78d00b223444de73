"""Manifests as values and bytes."""

from __future__ import annotations

import msgspec
import pytest

from raftmq_spark.export.errors import ArchiveError
from raftmq_spark.export.manifest import (
    DataFile,
    End,
    ExportedRange,
    Gap,
    Identity,
    Manifest,
    PartitionKey,
    Run,
    Until,
    checksum,
    decode_identity,
    decode_manifest,
    decode_run,
    encode,
    manifest_number,
    manifest_path,
    next_ends,
)

FILE = DataFile("topic=t/date=2026-03-01/a.parquet", "2026-03-01", 9, 120, "ab", 11, 19)
RANGE = ExportedRange("t", "id", 3, 10, 20, 9, (FILE,))
MANIFEST = Manifest(
    number=7,
    run="r",
    archive="a",
    created_at="2026-03-01T00:00:00Z",
    previous="cd",
    ranges=(RANGE,),
    gaps=(Gap("t", "id", 3, 5, 10, "retention"),),
    ends=(End("t", "id", 3, 20),),
)


def test_round_trips() -> None:
    data = encode(MANIFEST)
    stored = decode_manifest(data, "m")
    assert stored.manifest == MANIFEST
    assert stored.sha256 == checksum(data)
    assert stored.manifest.end_of() == {PartitionKey("t", "id", 3): 20}
    assert (stored.manifest.rows, stored.manifest.bytes) == (9, 120)
    identity = Identity("a", "c", "g", Until.COMMITTED)
    assert decode_identity(encode(identity), "i") == identity
    run = Run("r", 7, ("t",), "h", 1, "now")
    assert decode_run(encode(run), "r") == run


def test_a_newer_format_is_refused_by_name() -> None:
    newer = msgspec.json.encode({"format": 2, "number": 7})
    with pytest.raises(ArchiveError, match="m has format 2; this raftmq reads up to 1"):
        decode_manifest(newer, "m")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"format": 1}', b"\xff\xfe", b'{"number":"x"}']
)
def test_damage_is_told(data: bytes) -> None:
    with pytest.raises(ArchiveError, match="m is damaged"):
        decode_manifest(data, "m")


def test_names() -> None:
    assert manifest_path(7) == "_manifests/00000007.json"
    assert manifest_number(manifest_path(123_456_789)) == 123_456_789
    for other in ("_manifests/archive.json", "_manifests/put-if-absent", "_manifests/7.json.tmp"):
        assert manifest_number(other) is None


def test_ends_follow_ranges_and_gaps() -> None:
    key = PartitionKey("t", "id", 3)
    assert next_ends({key: 5}, [RANGE], [MANIFEST.gaps[0]]) == (End("t", "id", 3, 20),)
    with pytest.raises(AssertionError):
        next_ends({key: 6}, [RANGE], [MANIFEST.gaps[0]])
    with pytest.raises(AssertionError):
        next_ends({key: 10}, [RANGE, RANGE], [])
