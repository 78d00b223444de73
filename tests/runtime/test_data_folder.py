"""A node's data folder: whose it is, and that damage to it is never believed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from jepsen_like.disk import CrashOdds, SimCrash, SimDisk
from raftmq.runtime.data_folder import DataFolder, DataFolderError
from raftmq.runtime.disk import RealDisk
from raftmq.types import NodeId


def opened(path: Path, *, cluster_id: str = "c", node_id: int = 1) -> DataFolder:
    folder = DataFolder.open(RealDisk(), path, cluster_id=cluster_id, node_id=NodeId(node_id))
    folder.take()
    return folder


def test_identity_and_formation_last(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    state = folder.load_formation()
    folder.save_formation(state)
    folder.close()
    again = opened(tmp_path)
    assert again.storage_id == folder.storage_id != 0
    assert again.load_formation() == state
    again.close()


def test_it_is_new_until_it_is_taken(tmp_path: Path) -> None:
    """The journal is made in between; afterwards, a missing journal is a lost one."""
    for _ in range(2):
        folder = DataFolder.open(RealDisk(), tmp_path, cluster_id="c", node_id=NodeId(1))
        assert folder.is_new
        folder.close()
    opened(tmp_path).close()
    folder = DataFolder.open(RealDisk(), tmp_path, cluster_id="c", node_id=NodeId(1))
    assert not folder.is_new
    folder.close()


@pytest.mark.parametrize("syncs", [1, 2])
def test_what_a_start_reads_is_durable(syncs: int) -> None:
    """A process may have died between a file's new name and the sync that makes it durable: first
    that of node.json, then that of formation.json."""
    disk = SimDisk(Random(1))
    disk.make_directories("/data")

    def started(draw: int) -> DataFolder:
        return DataFolder.unlocked(disk, "/data", cluster_id="c", node_id=NodeId(1), draw=draw)

    folder = started(1)
    promised = replace(folder.load_formation(), recovering="1,2")
    seen: list[str] = []

    def is_last(verb: str, _path: str) -> int | None:
        seen.append(verb)
        return 0 if seen.count("sync directory") == syncs else None

    disk.crash_when(is_last)
    with suppress(SimCrash):
        folder.take()
        folder.save_formation(promised)
    assert seen.count("sync directory") == syncs
    disk.end_process()
    second = started(3)
    known = second.load_formation()
    assert (second.storage_id, known == promised) == (1, syncs == 2)
    disk.crash(Random(1), CrashOdds(lose=1, names=1))
    third = started(5)
    assert (third.storage_id, third.load_formation()) == (1, known)


def test_another_node_or_cluster_is_refused_by_name(tmp_path: Path) -> None:
    opened(tmp_path).close()
    with pytest.raises(DataFolderError, match="belongs to cluster 'c', the config says 'd'"):
        opened(tmp_path, cluster_id="d")
    with pytest.raises(DataFolderError, match="belongs to node 1, the config says 2"):
        opened(tmp_path, node_id=2)


def test_a_second_process_is_kept_out(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(DataFolderError, match="in use by another process"):
        opened(tmp_path)
    folder.close()


def look(path: Path) -> None:
    folder = opened(path)
    try:
        folder.load_formation()
    finally:
        folder.close()


@pytest.mark.parametrize("name", ["node.json", "formation.json"])
def test_no_flipped_bit_is_believed(tmp_path: Path, name: str) -> None:
    folder = opened(tmp_path)
    state = folder.load_formation()
    folder.save_formation(state)
    folder.close()
    path = tmp_path / name
    sound = path.read_bytes()
    for position in range(len(sound) - 1):  # the last byte is a line's end
        damaged = bytearray(sound)
        damaged[position] ^= 1 << (position % 7)
        path.write_bytes(damaged)
        with pytest.raises(DataFolderError, match="is damaged"):
            look(tmp_path)
    path.write_bytes(sound)
    look(tmp_path)
