"""Spark reads on while what it needs dies: a leader, a worker process, the log under its plan.

One cluster and one topic for all, since its records are more than reader, sockets and Spark hold
at once: most of them are fetched after what happens in the middle of a read. The last test lets
retention take them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from attrs import frozen

from raftmq.types import TopicPartition
from raftmq_client.blocking import Admin
from raftmq_client.core.admin import EARLIEST, ResourceType
from tests.live.harness import Cluster, wait_until
from tests.spark.conftest import Produced, produce
from tests.spark.test_source import frame, per_partition

pytestmark = [pytest.mark.spark, pytest.mark.live, pytest.mark.slow]
TOPIC: Final = "t"
COUNT: Final = 80_000
"""Records of each of two partitions."""


@frozen
class Row:
    """What a read's tasks give back of a row."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes


@pytest.fixture(scope="module")
def mortal_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("mortal")
    with Cluster(folder, settings={"retention_check_ms": 200}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def written(mortal_cluster: Cluster) -> Produced:
    with Admin(mortal_cluster.bootstrap, timeout_ms=60_000) as admin:
        admin.create_topic(TOPIC, 2, 3, {"segment.bytes": str(1 << 20)})
    return produce(mortal_cluster.bootstrap, TOPIC, 2 * COUNT, partitions=(0, 1), size=1_000)


class PausedRead:
    """A read whose two tasks wait at their thousandth row, once; in a thread of its own."""

    def __init__(self, spark: Any, cluster: Cluster, folder: Path) -> None:
        chosen = frame(spark, cluster, subscribe=TOPIC, columns="partition,offset,key,value")
        self.rows: list[Row] = []
        self.error: Exception | None = None
        self._folder = folder
        self._job = threading.Thread(target=self._collect, args=(chosen, str(folder)))
        self._job.start()
        wait_until(lambda: len(list(folder.glob("waits-*"))) == 2, 120, "both tasks are reading")

    def _collect(self, chosen: Any, folder: str) -> None:
        def wait_at_row(rows: Any) -> Any:
            import os
            import time

            from pyspark import TaskContext

            attempt = TaskContext.get().attemptNumber()
            for number, row in enumerate(rows):
                if number == 0:
                    open(f"{folder}/attempt-{row.partition}-{attempt}", "w").close()
                if number == 1_000:
                    open(f"{folder}/waits-{row.partition}", "w").close()
                    while not os.path.exists(f"{folder}/go-on"):
                        time.sleep(0.02)
                yield row.partition, row.offset, row.key, bytes(row.value)

        try:
            found = chosen.rdd.mapPartitions(wait_at_row).collect()
        except Exception as error:  # noqa: BLE001 - whatever Spark says, the test judges it
            self.error = error
        else:
            self.rows = [Row(*fields) for fields in found]

    def go_on(self) -> None:
        """Let the tasks go on, and wait for the end of the read."""
        (self._folder / "go-on").touch()
        self._job.join(240)
        assert not self._job.is_alive()

    @property
    def attempts(self) -> list[str]:
        """`PARTITION-NUMBER` of each attempt that came to a first row."""
        return sorted(path.name[8:] for path in self._folder.glob("attempt-*"))


def reading_workers(cluster: Cluster) -> list[psutil.Process]:
    """The Python workers of this process's Spark that are connected to a node."""
    ports = {node.client_port for node in cluster.nodes.values()}
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            is_worker = "pyspark.daemon" in process.cmdline()
            peers = {link.raddr.port for link in process.net_connections("tcp") if link.raddr}
        except psutil.Error:
            continue  # it ended
        if is_worker and peers & ports:
            found.append(process)
    return found


def test_a_worker_is_killed_in_the_middle_of_its_task(
    spark: Any, mortal_cluster: Cluster, written: Produced, tmp_path: Path
) -> None:
    """The process that fetches a partition is killed; its task is run again on the same rows."""
    read = PausedRead(spark, mortal_cluster, tmp_path)
    workers = reading_workers(mortal_cluster)
    assert len(workers) == 2, "each task has a process that is still fetching"
    workers[0].kill()
    workers[0].wait(60)
    read.go_on()
    assert read.error is None
    assert per_partition(read.rows) == written
    assert read.attempts in (["0-0", "0-1", "1-0"], ["0-0", "1-0", "1-1"])


def test_the_leader_is_killed_in_the_middle_of_a_read(
    spark: Any, mortal_cluster: Cluster, written: Produced, tmp_path: Path
) -> None:
    cluster = mortal_cluster
    read = PausedRead(spark, cluster, tmp_path)
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        leader = admin.topic(TOPIC).partitions[0].leader
    cluster[leader].kill()
    read.go_on()
    cluster.bring_back()
    assert read.error is None
    assert per_partition(read.rows) == written
    assert read.attempts == ["0-0", "1-0"], "the reader itself goes on at the next leader"


def test_retention_passes_in_the_middle_of_a_read(
    spark: Any, mortal_cluster: Cluster, written: Produced, tmp_path: Path
) -> None:
    cluster = mortal_cluster
    spared = frame(spark, cluster, subscribe=TOPIC, failOnDataLoss="false")
    assert spared.count() == 2 * COUNT  # planned
    read = PausedRead(spark, cluster, tmp_path)
    keys = [TopicPartition(TOPIC, partition) for partition in written]
    with Admin(cluster.bootstrap, timeout_ms=60_000) as admin:
        admin.alter_configs(ResourceType.TOPIC, TOPIC, {"retention.bytes": str(1 << 20)})

        def log_starts() -> list[int]:
            found = admin.list_offsets(dict.fromkeys(keys, EARLIEST))
            return [item.offset for item in found.values()]

        wait_until(lambda: min(log_starts()) > COUNT // 2, 120, "retention takes most of it")
    read.go_on()
    said = str(read.error)
    assert "DataLossError" in said
    assert "are gone, its log starts at" in said
    assert read.rows == []
    rest = per_partition(spared.collect())
    for partition, records in rest.items():
        assert 0 < len(records) < COUNT // 2
        assert records == written[partition][-len(records) :]
    assert sorted(rest) == [0, 1]
