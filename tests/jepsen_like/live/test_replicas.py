"""Copies compared at the end of a round: what the scrub has not come to is no difference."""

from __future__ import annotations

from pathlib import Path

from jepsen_like.live.replicas import compare
from tests.log.helpers import FOLDER, filled, sim_disk


def copies(root: Path) -> dict[int, Path]:
    """Three copies of one log, on the real disk."""
    disk = sim_disk()
    filled(disk)
    folders = {}
    for node_id in (1, 2, 3):
        folders[node_id] = root / str(node_id)
        folders[node_id].mkdir()
        for path in disk.files(FOLDER):
            (folders[node_id] / Path(path).name).write_bytes(disk.content(path))
    return folders


def change(folder: Path, position: int, data: bytes) -> None:
    """Write into the first segment."""
    (segment, *_) = sorted(folder.glob("*.log"))
    content = bytearray(segment.read_bytes())
    content[position : position + len(data)] = data
    segment.write_bytes(content)


def test_equal_copies(tmp_path: Path) -> None:
    assert compare(copies(tmp_path)) == ""


def test_a_copy_that_fails_its_checksum_is_left_out(tmp_path: Path) -> None:
    """A bit that was flipped 13 s before the round ended, in a closed segment of a follower."""
    folders = copies(tmp_path)
    change(folders[2], 70, b"\xff\xfe\xfd")
    assert compare(folders) == ""


def test_sound_copies_that_differ(tmp_path: Path) -> None:
    folders = copies(tmp_path)
    sorted(folders[2].glob("*.log"))[-1].write_bytes(b"")
    assert compare(folders) == "nodes [1, 3] against [2]"


def test_without_a_sound_copy_they_differ(tmp_path: Path) -> None:
    folders = copies(tmp_path)
    for node_id in folders:
        change(folders[node_id], 70, bytes([250 + node_id, 7, 9]))
    assert compare(folders) == "nodes [1] against [2] against [3]"
