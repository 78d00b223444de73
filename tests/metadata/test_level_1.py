"""At level 1 every version makes the same of a command as commit bd280f3, with which it may be in
one cluster: `level-1.txt` has 420 commands as that one encoded them, each behind the CRC-32 of its
snapshot after it. A change of `apply.py` that shows here needs a level of its own."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from raftmq.metadata.apply import apply
from raftmq.metadata.commands import (
    ALL_COMMANDS,
    FIRST_VERSIONS,
    decode_envelope,
    encode_envelope,
)
from raftmq.metadata.image import EMPTY_IMAGE
from raftmq.metadata.snapshot import SnapshotEncoder
from raftmq.types import Offset

TOLD = (Path(__file__).parent / "level-1.txt").read_text().splitlines()


def test_what_commands_do_at_level_1_never_changes() -> None:
    image, encoder = EMPTY_IMAGE, SnapshotEncoder()
    for number, line in enumerate(TOLD, 1):
        digest, _, text = line.partition(" ")
        envelope = decode_envelope(text.encode())
        assert encode_envelope(envelope).decode() == text, f"line {number} is written otherwise"
        image, _ = apply(image, envelope, Offset(image.version + 1))
        assert f"{crc32(encoder.encode(image)):08x}" == digest, (
            f"the image differs at line {number}"
        )


def test_every_kind_of_version_1_is_among_them() -> None:
    kinds = {type(decode_envelope(line.partition(" ")[2].encode()).command) for line in TOLD}
    first = {kind for kind in ALL_COMMANDS if FIRST_VERSIONS[kind] == 1}
    missing = {kind.__name__ for kind in first - kinds}
    assert missing <= {"ReplaceMember", "DeleteOffsets", "ExpireOffsets"}, "those were not drawn"
