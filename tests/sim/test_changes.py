"""Changes of several files that a power loss interrupts: the fault that waits for them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.cluster.stress import changes
from jepsen_like.disk import SimDisk
from jepsen_like.inode import SECTOR
from raftmq.log.recovery import _Recovery


@pytest.mark.slow
def test_truncations_and_resets_are_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: Counter[str] = Counter()
    clear = _Recovery._clear_pending

    def noted(recovery: _Recovery, what: str) -> None:
        finished[what] += 1
        clear(recovery, what)

    monkeypatch.setattr(_Recovery, "_clear_pending", noted)
    for seed in range(1, 9):
        result = run_cluster_seed(seed, changes(seed))
        assert result.name == "", result.detail
        if finished["truncation"] and finished["reset"]:
            return
    pytest.fail(f"nothing else was finished than {finished}")


def test_after_a_power_loss_nothing_is_in_memory() -> None:
    disk = SimDisk(Random(1))
    file = disk.open("a", create=True)
    file.pwrite(bytes(3 * SECTOR), 0)
    file.fdatasync()
    disk.sync_directory("")
    assert file.is_cached(0, 3 * SECTOR)
    disk.crash()
    file = disk.open("a")
    assert not file.is_cached(SECTOR, 1)
    file.pread(10, SECTOR)
    assert file.is_cached(SECTOR, SECTOR)
    assert not file.is_cached(SECTOR, SECTOR + 1)
    file.pwrite(b"x", 2 * SECTOR)
    assert file.is_cached(SECTOR, 9 * SECTOR), "beyond the end there is nothing to read"
    disk.drop_cache()
    assert file.is_cached(2 * SECTOR, 1), "what is not on the device is only in memory"
    assert not file.is_cached(SECTOR, 1)
