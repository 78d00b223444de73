"""Damaged bytes, emptied folders, full disks: detected, repaired or refused; never served wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from tests.live.harness import Cluster, Node, lack, need, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]

SETTINGS = {"scrub_bytes_per_s": 64 << 20}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SETTINGS) as cluster:
        yield cluster


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x40]))


def first_segment(node: Node, topic: str) -> Path:
    return min(node.partition_folder(topic).glob("*.log"))


@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("when", ["running", "stopped"])
def test_flipped_byte_is_repaired_and_never_served(cluster: Cluster, role: str, when: str) -> None:
    create_topic(cluster.bootstrap, "t", 1, segment_bytes="1048576")
    with Load(cluster.bootstrap, "t", 1, rate=20_000, size=1000) as load:
        load.wait_for(5_000)
    leader = leaders(cluster.bootstrap, "t")[0]
    node = cluster[leader if role == "leader" else next(n for n in cluster.nodes if n != leader)]
    healthy = next(n for n in cluster.nodes.values() if n is not node)
    segment = first_segment(node, "t")
    if when == "stopped":
        node.terminate()
    flip_byte(segment, 300_000)
    if when == "stopped":
        node.start()
        node.wait_ready()
    good = first_segment(healthy, "t").read_bytes()
    wait_until(lambda: first_segment(node, "t").read_bytes() == good, 30, "the damage is repaired")
    load.reckon(f"{node.host}:{node.client_port}").check()


def test_emptied_data_folder_comes_back_by_itself(cluster: Cluster) -> None:
    partitions = 20
    create_topic(cluster.bootstrap, "t", partitions, min_insync_replicas="2")
    with Load(cluster.bootstrap, "t", partitions, rate=2_000) as load:
        load.wait_for(1_000)
        cluster[2].kill()
        cluster[2].wipe()
        load.wait_for(500)
        cluster[2].start()
        cluster[2].wait_ready()
        wait_until(
            lambda: all(isr == {1, 2, 3} for isr in in_sync(cluster.bootstrap, "t").values()),
            40,
            "three of three again",
        )
        load.wait_for(500)
    load.reckon().check()
    cluster[1].kill()
    load.reckon(f"{cluster[2].host}:{cluster[2].client_port}").check()


@pytest.fixture
def small_disks(tmp_path: Path) -> Iterator[dict[int, Path]]:
    if os.geteuid() != 0:
        lack("needs root to mount a tmpfs")
    mounted = []
    folders = {}
    for i in (1, 2, 3):
        folder = tmp_path / f"tmpfs-{i}"
        folder.mkdir()
        command = [need("mount"), "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lack(f"cannot mount a tmpfs: {done.stderr.strip()}")
        mounted.append(folder)
        folders[i] = folder / "data"
    yield folders
    for folder in mounted:
        subprocess.run([need("umount"), str(folder)], check=True)


@pytest.mark.root
def test_full_disk(tmp_path: Path, small_disks: dict[int, Path]) -> None:
    """Writes are refused with KAFKA_STORAGE_ERROR, reads go on, writes resume with freed space."""
    with Cluster(tmp_path, data=small_disks) as cluster:
        create_topic(cluster.bootstrap, "t", 1)
        with Load(cluster.bootstrap, "t", 1, rate=1_000) as load:
            load.wait_for(1_000)
        fillers = []
        for folder in small_disks.values():
            filler = folder.parent / "filler"
            free = shutil.disk_usage(folder.parent).free
            filler.write_bytes(bytes(max(0, free - (1 << 20))))
            fillers.append(filler)
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": cluster.bootstrap, "retries": 0, "acks": "all"}
        )
        codes: list[int] = []
        for i in range(40):
            value = b"%d " % (1_000_000 + i) + os.urandom(200_000)
            producer.produce(
                "t", value, on_delivery=lambda e, _m: codes.append(e.code() if e else 0)
            )
            producer.flush(20)
            if codes[-1]:
                break
        assert codes[-1] == confluent_kafka.KafkaError.KAFKA_STORAGE_ERROR, codes
        load.reckon().check()
        assert all(node.is_running for node in cluster.nodes.values())
        for filler in fillers:
            filler.unlink()

        def accepts() -> bool:
            producer.produce(
                "t", b"0 again", on_delivery=lambda e, _m: codes.append(e.code() if e else 0)
            )
            producer.flush(10)
            return codes[-1] == 0

        wait_until(accepts, 5, "writes resume")
