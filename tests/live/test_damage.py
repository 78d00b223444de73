"""Damaged bytes, emptied folders, full disks: detected, repaired or refused; never served wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest

from raftmq.errors import ErrorCode
from raftmq.records import check_batches
from tests.live.harness import Cluster, Node, lack, need, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders
from tests.live.raw import fetch

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def flip_byte(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x40]))


def first_segment(node: Node, topic: str) -> Path:
    return min(node.partition_folder(topic).glob("*.log"))


def log_bytes(node: Node, topic: str) -> bytes:
    """The whole log as one piece; replicas may have rolled their segments at other places."""
    return b"".join(p.read_bytes() for p in sorted(node.partition_folder(topic).glob("*.log")))


def whole_log(cluster: Cluster, topic: str) -> bytes:
    """What all nodes hold, once they hold the same: a leader may be the last to write what two
    others have made durable."""

    def agreed() -> bytes:
        found = {log_bytes(node, topic) for node in cluster.nodes.values()}
        return found.pop() if len(found) == 1 else b""

    whole: bytes = wait_until(agreed, 60, "all have it all")
    return whole


def served(node: Node, topic: str) -> tuple[int, bytes]:
    """What a consumer gets from this very node until it errs, or there is no more."""
    offset, data = 0, b""
    while True:
        code, batches = fetch(node, topic, offset)
        if code or not batches:
            return code, data
        data += batches
        offset = check_batches(bytearray(batches))[-1].next_offset


def is_refused_or_good(node: Node, topic: str, good: bytes) -> bool:
    """Nothing wrong is ever served; a restarted node is soon told of a leader and what it may."""
    code, data = served(node, topic)
    assert good.startswith(data)
    return code == ErrorCode.KAFKA_STORAGE_ERROR or data == good


@pytest.mark.parametrize("when", ["running", "stopped"])
def test_flipped_byte_is_repaired_and_never_served(tmp_path: Path, when: str) -> None:
    """Found by the scrub while running; after a restart without a scrub, by who reads it first."""
    scrub = 64 << 20 if when == "running" else 0
    with Cluster(tmp_path, settings={"scrub_bytes_per_s": scrub}) as cluster:
        for role in ("leader", "follower"):
            check_flipped_byte(cluster, role, when)


def check_flipped_byte(cluster: Cluster, role: str, when: str) -> None:
    topic = f"t-{role}"
    create_topic(cluster.bootstrap, topic, 1, segment_bytes="1048576")
    small_batches = {"batch.size": 20_000, "queue.buffering.max.messages": 1_000}
    with Load(cluster.bootstrap, topic, 1, rate=5_000, size=1000, **small_batches) as load:
        load.wait_for(3_000)
    leader = leaders(cluster.bootstrap, topic)[0]
    node = cluster[leader if role == "leader" else next(n for n in cluster.nodes if n != leader)]
    good = whole_log(cluster, topic)
    segment = first_segment(node, topic)
    good_segment = segment.read_bytes()
    if when == "stopped":
        node.terminate()
    flip_byte(segment, 300_000)
    if when == "stopped":
        # Written through the page cache, the flip shows at once; a device's rot shows when bytes
        # come back from it. So only a new process, which has verified nothing yet, is asked now.
        node.start()
        node.wait_ready()
        # It may have hit a header, which is seen and mended at the start.
        wait_until(lambda: is_refused_or_good(node, topic, good), what="it is found by reading")
    wait_until(
        lambda: first_segment(node, topic).read_bytes() == good_segment, 60, "it is repaired"
    )
    assert wait_until(lambda: served(node, topic)[1] == good, 60)
    load.reckon().check()


def test_damage_at_every_replica_in_other_places_heals(tmp_path: Path) -> None:
    """Each batch is whole on one node at least; nobody is whole, and no operator comes."""
    with Cluster(tmp_path) as cluster:
        create_topic(cluster.bootstrap, "t", 1, segment_bytes="1048576")
        small_batches = {"batch.size": 20_000, "queue.buffering.max.messages": 1_000}
        with Load(cluster.bootstrap, "t", 1, rate=5_000, size=1000, **small_batches) as load:
            load.wait_for(4_000)
        good = whole_log(cluster, "t")
        for node in cluster.nodes.values():
            node.terminate()
        for number, node in enumerate(cluster.nodes.values()):
            for segment in sorted(node.partition_folder("t").glob("*.log"))[:-1]:
                # Every third of a segment goes bad on another node, in several batches.
                third = segment.stat().st_size // 3
                for step in range(3):
                    flip_byte(segment, number * third + 25_000 + step * 80_000)
        for node in cluster.nodes.values():
            node.start()
        for node in cluster.nodes.values():
            node.wait_ready()
        with Load(cluster.bootstrap, "t", 1, rate=500) as more:
            more.wait_for(200)

        def is_healed(node: Node) -> bool:
            rows = [row for row in node.get("/status")["partitions"] if row["topic"] == "t"]
            return (
                all(not row["damaged"] for row in rows)
                and log_bytes(node, "t")[: len(good)] == good
            )

        for node in cluster.nodes.values():
            wait_until(lambda node=node: is_healed(node), 60, f"node {node.node_id} is healed")
        assert served(cluster[leaders(cluster.bootstrap, "t")[0]], "t")[1][: len(good)] == good


def voting(node: Node) -> int:
    """In how many partitions this node's present storage has a vote."""
    return sum(row["is_voter"] for row in node.get("/status")["partitions"])


def test_emptied_data_folder_comes_back_by_itself(cluster: Cluster) -> None:
    partitions = 20
    create_topic(cluster.bootstrap, "t", partitions, min_insync_replicas="2")
    with Load(cluster.bootstrap, "t", partitions, rate=500) as load:
        load.wait_for(500)
        cluster[2].kill()
        cluster[2].wipe()
        load.wait_for(200)
        cluster[2].start()
        cluster[2].wait_ready()
        wait_until(lambda: voting(cluster[2]) == partitions, 60, "a voter of all groups again")
        wait_until(
            lambda: all(isr == {1, 2, 3} for isr in in_sync(cluster.bootstrap, "t").values()),
            60,
            "three of three again",
        )
        load.wait_for(200)
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


def fill(folder: Path) -> Path:
    """Take the last byte of free space."""
    filler = folder / "last-bytes"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filler


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
            if codes[-1] == confluent_kafka.KafkaError.KAFKA_STORAGE_ERROR:
                break  # and not a leader that a busy machine changed meanwhile
        assert codes[-1] == confluent_kafka.KafkaError.KAFKA_STORAGE_ERROR, codes
        load.reckon().check()
        assert all(node.is_running for node in cluster.nodes.values())
        for folder in small_disks.values():
            fillers.append(fill(folder.parent))
        leader = leaders(cluster.bootstrap, "t")[0]
        cluster[leader].kill()
        others = ",".join(f"{n.host}:{n.client_port}" for n in cluster.live)
        wait_until(lambda: leaders(others, "t")[0] != leader, 60, "votes need no free space")
        load.reckon(others).check()
        cluster[leader].start()
        cluster[leader].wait_ready()
        for filler in fillers:
            filler.unlink()

        def accepts() -> bool:
            producer.produce(
                "t", b"0 again", on_delivery=lambda e, _m: codes.append(e.code() if e else 0)
            )
            producer.flush(10)
            return codes[-1] == 0

        wait_until(accepts, 60, "writes resume")


@pytest.mark.root
def test_a_leader_whose_disk_is_full_gives_its_partitions_to_others(
    tmp_path: Path, small_disks: dict[int, Path]
) -> None:
    """A majority has room: nobody needs to wait until an operator makes some on the leader."""
    with Cluster(tmp_path, data=small_disks) as cluster:
        create_topic(cluster.bootstrap, "t", 1)
        with Load(cluster.bootstrap, "t", 1, rate=500) as load:
            load.wait_for(200)
            leader = leaders(cluster.bootstrap, "t")[0]
            filler = fill(cluster[leader].data.parent)
            wait_until(
                lambda: cluster[leader].get("/status")["disk"]["is_full"], 20, "it is known as full"
            )
            load.wait_for(500, timeout_s=20)
            filler.unlink()
            load.wait_for(200)
        load.reckon().check()
