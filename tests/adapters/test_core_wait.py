"""How long a thread waited for a core, as the kernel counts it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from raftmq.adapters.core_wait import CoreWait


def spin(until_s: float) -> None:
    while time.monotonic() < until_s:
        pass


def test_a_thread_that_shares_one_core_waits_for_it() -> None:
    """Two processes on one core: each is ready all the time and runs half of it."""
    waited: list[float] = []

    def share() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        wait = CoreWait()
        child = os.posix_spawn(
            "/usr/bin/timeout", ["timeout", "0.5", "sh", "-c", "while :; do :; done"], os.environ
        )
        before = wait.waited_ms()
        spin(time.monotonic() + 0.4)
        waited.append(wait.waited_ms() - before)
        os.waitpid(child, 0)
        wait.close()

    thread = threading.Thread(target=share)
    thread.start()
    thread.join()
    assert waited[0] > 50


def test_nothing_is_told_where_nothing_is_counted(tmp_path: Path) -> None:
    missing = CoreWait(str(tmp_path / "no"))
    assert missing.waited_ms() == 0.0
    missing.close()
    empty = tmp_path / "empty"
    empty.write_text("")
    wait = CoreWait(str(empty))
    assert wait.waited_ms() == 0.0
    wait.close()
    wait.close()
