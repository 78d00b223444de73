"""Power loss: the nodes' disk drops everything that was not fsynced, under load.

Data lies on an XFS image mounted through a loop device; `xfs_io -x -c shutdown` without a log flush
ends the filesystem as a power cut would; after a remount only what was synced is there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_live_cli import Dev
from tests.live.harness import Cluster, lack, need, wait_until
from tests.live.load import Load, create_topic
from tests.live.transacting import Transacting

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.root]


class PowerDisk:
    """An XFS filesystem in a file, which can lose its power."""

    def __init__(self, folder: Path) -> None:
        self.image = folder / "disk.img"
        self.mount_point = folder / "disk"
        self.mount_point.mkdir()
        with self.image.open("wb") as file:
            file.truncate(2 << 30)
        run(need("mkfs.xfs"), "-q", str(self.image))
        self.mount()

    def mount(self) -> None:
        done = subprocess.run(
            [need("mount"), "-o", "loop", str(self.image), str(self.mount_point)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            lack(f"cannot mount a loop device: {done.stderr.strip()}")

    def lose_power(self) -> None:
        run(need("xfs_io"), "-x", "-c", "shutdown", str(self.mount_point))

    def unmount(self) -> None:
        """Once the killed processes have let go of their files."""
        command = [need("umount"), str(self.mount_point)]
        said: list[str] = []

        def is_free() -> bool:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said[:] = [done.stderr]
            return done.returncode == 0

        try:
            wait_until(is_free, what="the mount point being free")
        except pytest.fail.Exception as error:
            error.add_note(f"{said}, held by {users_of(self.mount_point)}")
            raise


def users_of(folder: Path) -> list[str]:
    """The processes that have something of a folder open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            links = [process / "cwd", *(process / "fd").iterdir()]
            if any(str(link.readlink()).startswith(str(folder)) for link in links):
                found.append(f"{process.name} {(process / 'cmdline').read_text()[:200]}")
    return found


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def power_disk(tmp_path: Path) -> Iterator[PowerDisk]:
    if os.geteuid() != 0:
        lack("needs root for loop devices")
    disk = PowerDisk(tmp_path)
    yield disk
    disk.unmount()


def lose_power(power_disk: PowerDisk, cluster: Cluster) -> None:
    """All nodes lose power at once, and begin again with what the disk has."""
    power_disk.lose_power()
    for node in cluster.nodes.values():
        node.kill()
    power_disk.unmount()
    power_disk.mount()
    for node in cluster.nodes.values():
        node.start()
    for node in cluster.nodes.values():
        node.wait_ready()


def test_power_lost_under_load(tmp_path: Path, power_disk: PowerDisk) -> None:
    partitions = 4
    data = {i: power_disk.mount_point / f"node-{i}" for i in (1, 2, 3)}
    with Cluster(tmp_path, data=data) as cluster:
        create_topic(cluster.bootstrap, "t", partitions)
        with Load(cluster.bootstrap, "t", partitions, rate=20_000, size=300) as load:
            load.wait_for(20_000, timeout_s=90)
            lose_power(power_disk, cluster)
            load.wait_for(2_000, timeout_s=90)
        reckoning = load.reckon()
        reckoning.check()
        assert reckoning.acknowledged >= 22_000


@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("producers", "times"),
    [
        pytest.param(20, 1, id="once"),
        pytest.param(100, 10, marks=pytest.mark.soak, id="ten times"),
    ],
)
def test_power_lost_in_the_middle_of_transactions(
    tmp_path: Path, power_disk: PowerDisk, producers: int, times: int
) -> None:
    """Each is wholly there or wholly not, its offset with it, as its producer was told."""
    data = {i: power_disk.mount_point / f"node-{i}" for i in (1, 2, 3)}
    with (
        Cluster(tmp_path, data=data) as cluster,
        Transacting(cluster.bootstrap, producers) as transacting,
    ):
        for _ in range(times):
            transacting.go_on()
            transacting.wait_for(2 * producers)
            wait_until(lambda: transacting.open >= 0.9 * producers, what="all in the middle of one")
            lose_power(power_disk, cluster)
            transacting.settle()
            transacting.check()


def test_power_lost_under_a_local_cluster(power_disk: PowerDisk) -> None:
    """`raftmq dev` finds its folder whole: it starts again with the same ports and the record."""
    with Dev(power_disk.mount_point / "dev", nodes=3) as dev:
        before = dev.file()
        done = dev.run("produce", "t", "kept")
        assert done.returncode == 0, done.stderr
        power_disk.lose_power()
        assert dev.process is not None
        for pid in (node["pid"] for node in before["nodes"]):
            with contextlib.suppress(ProcessLookupError):  # it noticed that its disk is gone
                os.kill(pid, signal.SIGKILL)
        dev.process.kill()
        dev.end()
        power_disk.unmount()
        power_disk.mount()
        dev.start()
        after = dev.file()
        assert [n["data"] for n in after["nodes"]] == [n["data"] for n in before["nodes"]]
        assert [n["peer_port"] for n in after["nodes"]] == [n["peer_port"] for n in before["nodes"]]
        done = dev.run("consume", "t", "-o", "earliest", "--count", "1")
        assert (done.returncode, done.stdout) == (0, "kept\n"), done.stderr
