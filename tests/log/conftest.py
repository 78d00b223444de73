"""Both disks, so that one contract is tested on each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

from raftmq.ports import Disk
from raftmq.runtime.disk import RealDisk
from tests.log.helpers import sim_disk


@frozen
class Place:
    """A disk and a folder on it that may be used."""

    disk: Disk
    root: str


@pytest.fixture(params=["real", "simulated"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "real":
        yield Place(RealDisk(), str(tmp_path))
    else:
        disk = sim_disk()
        disk.make_directories("data")
        yield Place(disk, "data")
