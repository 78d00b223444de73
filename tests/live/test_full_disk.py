"""A disk without a byte free: what gives it space back does so, now and after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from jepsen_like.live.storage import Disk, LackError, PowerDisk, TmpfsDisk
from tests.live.harness import Cluster, Node, lack, wait_until
from tests.live.load import Load, create_topic, in_sync, leaders, read_partitions

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.root]

PARTITIONS = 3
"""One for each node to lead."""
SEGMENT = {"segment_bytes": "1048576"}
FULL_S = 4.0
"""Leaders are balanced each second."""


@pytest.fixture(
    params=[
        pytest.param(TmpfsDisk, id="tmpfs", marks=pytest.mark.soak),
        pytest.param(PowerDisk, id="xfs"),
    ]
)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0:
        lack("needs root to mount a disk of its own")
    try:
        made: Disk = request.param(tmp_path / "small")
    except LackError as error:
        lack(str(error))
    yield made
    made.close()


NOTHING_HELD = 1 << 62
"""A follower whose log was begun anew at its leader's start has no room for a segment."""


def is_full(node: Node) -> bool:
    return bool(node.get("/status")["disk"]["is_full"])


def starts(node: Node, topic: str) -> list[int]:
    """Where the oldest segment of each partition begins; NOTHING_HELD where none is left."""
    folders = [node.partition_folder(topic, index) for index in range(PARTITIONS)]
    return [
        min((int(path.stem) for path in folder.glob("*.log")), default=NOTHING_HELD)
        for folder in folders
    ]


def used(node: Node, topic: str) -> int:
    folders = [node.partition_folder(topic, index) for index in range(PARTITIONS)]
    return sum(path.stat().st_size for folder in folders for path in folder.glob("*.log"))


def ends(bootstrap: str, topic: str) -> list[int]:
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": "w"})
    try:
        wheres = [confluent_kafka.TopicPartition(topic, index) for index in range(PARTITIONS)]
        return [consumer.get_watermark_offsets(where, timeout=30)[1] for where in wheres]
    finally:
        consumer.close()


def delete_below(bootstrap: str, topic: str, offsets: list[int]) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    wheres = [confluent_kafka.TopicPartition(topic, i, at) for i, at in enumerate(offsets)]
    for future in admin.delete_records(wheres, request_timeout=30).values():
        future.result(40)


def retain(bootstrap: str, topic: str, size: int) -> None:
    entry = ConfigEntry("retention.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    (future,) = admin.incremental_alter_configs([resource]).values()
    future.result(40)


def leads_nothing(cluster: Cluster, node: Node) -> bool:
    return all(
        node.node_id not in leaders(cluster.bootstrap, topic).values()
        for topic in ("deleted", "retained", "kept")
    )


def check_kept(load: Load, low: list[int]) -> None:
    """All that was acknowledged from there on is where it was."""
    read = read_partitions(load.bootstrap, load.topic, range(PARTITIONS))
    for index, told in enumerate(load.acknowledged):
        found = dict(read[index])
        for number, offset in told.items():
            if offset is not None and offset >= low[index]:
                assert found.get(offset) == number, (index, number, offset)


def test_what_gives_space_back_does_so_on_a_full_disk(tmp_path: Path, disk: Disk) -> None:
    settings = {"retention_check_ms": 200}
    with Cluster(tmp_path, data={1: disk.folder / "data"}, settings=settings) as cluster:
        node = cluster[1]
        for topic in ("deleted", "retained", "kept"):
            create_topic(cluster.bootstrap, topic, PARTITIONS, **SEGMENT)
        deleted = Load(cluster.bootstrap, "deleted", PARTITIONS, rate=10_000, size=1_000)
        retained = Load(cluster.bootstrap, "retained", PARTITIONS, rate=10_000, size=1_000)
        with deleted, retained:
            deleted.wait_for(12_000)
            retained.wait_for(12_000)
        wait_until(
            lambda: all(
                len(isr) == 3
                for topic in ("deleted", "retained")
                for isr in in_sync(cluster.bootstrap, topic).values()
            ),
            what="all replicas have it",
        )
        half = [end // 2 for end in ends(cluster.bootstrap, "deleted")]
        with Load(cluster.bootstrap, "kept", PARTITIONS, rate=300) as kept:
            kept.wait_for(300)
            disk.fill()
            wait_until(lambda: is_full(node), 30, "it is known as full")
            wait_until(lambda: leads_nothing(cluster, node), 30, "others lead")
            kept.wait_for(300)

        # What it lacks of this topic stands before the entry that says what may go.
        with Load(cluster.bootstrap, "deleted", PARTITIONS, rate=2_000, size=1_000) as more:
            more.wait_for(1_000)
        delete_below(cluster.bootstrap, "deleted", half)
        wait_until(lambda: min(starts(node, "deleted")) > 0, 60, "deleted records are gone there")

        disk.free()
        disk.fill()
        assert node.terminate(40) == 0, node.log_tail()
        disk.fill()  # with what the node gave back as it ended
        node.start()
        node.wait_ready()
        assert is_full(node), "nobody has to write first"
        until = time.monotonic() + FULL_S
        while time.monotonic() < until:
            assert leads_nothing(cluster, node), "leadership came back to a full disk"

        before = used(node, "retained")
        retain(cluster.bootstrap, "retained", 1 << 20)
        wait_until(lambda: used(node, "retained") < before, 60, "retention works there")
        below = ends(cluster.bootstrap, "deleted")
        delete_below(cluster.bootstrap, "deleted", below)
        wait_until(
            lambda: all(a > b for a, b in zip(starts(node, "deleted"), half, strict=True)),
            60,
            "the rest is deleted there",
        )
        disk.free()
        wait_until(lambda: not is_full(node), 60, "it has space again")
        wait_until(
            lambda: all(len(isr) == 3 for isr in in_sync(cluster.bootstrap, "kept").values()),
            what="all replicas are in sync",
        )
        wait_until(lambda: not leads_nothing(cluster, node), 60, "it leads again")
        kept.reckon().check()
        check_kept(deleted, below)
        firsts = [starts(node, "retained") for node in cluster.nodes.values()]
        check_kept(retained, [max(of_all) for of_all in zip(*firsts, strict=True)])
