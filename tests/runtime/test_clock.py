"""How long a thread waited for a core, as the kernel counts it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from raftmq.runtime.clock import CoreTimes, CoreWait


def test_a_thread_that_shares_one_core_waits_for_it() -> None:
    """Two processes on one core: each is ready all the time and runs part of it."""
    found: list[CoreTimes] = []

    def share() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        wait = CoreWait()
        child = os.posix_spawn(
            "/usr/bin/timeout", ["timeout", "60", "sh", "-c", "while :; do :; done"], os.environ
        )
        before = wait.times()
        deadline = time.monotonic() + 30
        ran = waited = 0.0
        while time.monotonic() < deadline and min(ran, waited) <= 50:
            now = wait.times()
            ran, waited = now.ran_ms - before.ran_ms, now.waited_ms - before.waited_ms
        found.append(CoreTimes(ran, waited))
        os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        wait.close()

    thread = threading.Thread(target=share)
    thread.start()
    thread.join()
    assert min(found[0]) > 50


def test_nothing_is_told_where_nothing_is_counted(tmp_path: Path) -> None:
    missing = CoreWait(str(tmp_path / "no"), str(tmp_path / "no"))
    assert missing.times() == (0.0, 0.0)
    assert missing.stolen_ms() == 0.0
    missing.close()
    empty = tmp_path / "empty"
    empty.write_text("")
    wait = CoreWait(str(empty), str(empty))
    assert wait.times() == (0.0, 0.0)
    assert wait.stolen_ms() == 0.0
    wait.close()
    wait.close()


def test_what_the_host_took_is_the_mean_over_all_cores(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 20 30 40 50 0 60 600 0 0\ncpu0 1 2 3 4 5 0 6 300 0 0\n")
    wait = CoreWait(stat=str(stat))
    taken_s = 600 / os.sysconf("SC_CLK_TCK")
    assert wait.stolen_ms() == pytest.approx(taken_s * 1e3 / (os.cpu_count() or 1))
    wait.close()
    real = CoreWait()
    assert real.stolen_ms() >= 0.0
    real.close()
