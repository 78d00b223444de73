"""Loggers that a flood cannot fill, as one process has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from weakref import WeakSet

import pytest
import structlog

from raftmq import logs
from raftmq.logs import RateLimitedLog, flush_all


def test_a_module_that_a_worker_imports_may_make_one_while_all_are_flushed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The admin port's module is imported in a worker, while the loop ticks."""
    made: list[RateLimitedLog] = []

    def make() -> None:
        made.append(RateLimitedLog(structlog.get_logger("worker")))

    worker = threading.Thread(target=make)

    class Interrupted(WeakSet[RateLimitedLog]):
        def __iter__(self) -> Iterator[RateLimitedLog]:
            for log in super().__iter__():
                yield log
                if worker.ident is None:
                    worker.start()
                    worker.join(0.1)  # who has to wait for us is not waited for

    monkeypatch.setattr(logs, "_all", Interrupted())
    kept = [RateLimitedLog(structlog.get_logger(f"{number}")) for number in range(3)]
    flush_all()
    worker.join()
    assert {*logs._all} == {*kept, *made}
