"""At a level every version makes the same of a command as the commits with which it may be in one
cluster: `level-1.txt`, `level-3.txt`, `level-4.txt`, `level-7.txt` and `level-8.txt` have 420
commands each as bd280f3, 1da0f6b8, b35744de, b50fe6cb and 4c875b40 encoded them, the last ones
before the next level, each command behind the CRC-32 of its snapshot after it. A change of what is
applied that shows here needs a level of its own."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest

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

HERE = Path(__file__).parent
TOLD = (HERE / "level-1.txt").read_text().splitlines()


@pytest.mark.parametrize("level", [1, 3, 4, 7, 8])
def test_what_commands_do_at_a_level_never_changes(level: int) -> None:
    image, encoder = EMPTY_IMAGE, SnapshotEncoder()
    for number, line in enumerate((HERE / f"level-{level}.txt").read_text().splitlines(), 1):
        digest, _, text = line.partition(" ")
        envelope = decode_envelope(text.encode())
        assert encode_envelope(envelope).decode() == text, f"line {number} is written otherwise"
        image, _ = apply(image, envelope, Offset(image.version + 1))
        assert f"{crc32(encoder.encode(image)):08x}" == digest, (
            f"the image differs at line {number}"
        )
    assert image.level == level


def test_every_kind_of_version_1_is_among_them() -> None:
    kinds = {type(decode_envelope(line.partition(" ")[2].encode()).command) for line in TOLD}
    first = {kind for kind in ALL_COMMANDS if FIRST_VERSIONS[kind] == 1}
    missing = {kind.__name__ for kind in first - kinds}
    assert missing <= {"ReplaceMember", "DeleteOffsets", "ExpireOffsets"}, "those were not drawn"
