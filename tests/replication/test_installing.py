"""A large state is read off the loop before a log start that carries it is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raftmq.log.log_start import LogStart
from raftmq.metadata import state_machine
from raftmq.metadata.image import EMPTY_IMAGE
from raftmq.metadata.snapshot import encode_image
from raftmq.metadata.state_machine import MetadataMachine
from raftmq.ports import DiskError, Runnable
from raftmq.types import Offset, RaftIndex
from tests.replication.inline import InlineCatchUp
from tests.replication.sim_cluster import SimCluster
from tests.replication.sim_nodes import Machine, SimNode


class Job:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.runs = 0

    def run(self) -> None:
        self.runs += 1


class SlowThread:
    """A worker that takes its time."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Runnable, Callable[[DiskError | None], None]]] = []

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.jobs.append((job, done))


def test_the_core_hears_of_it_when_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster(segment_bytes=300)
    away = cluster.followers()[0]
    cluster.commit(3)
    away.crash()
    cluster.commit(10, size=50)
    leader = cluster.replica(cluster.leader)
    leader.move_log_start(Offset(8))
    cluster.until(lambda: leader.log_start_offset == 8)
    made: list[Job] = []
    thread = SlowThread()

    class SlowMachine(Machine):
        def restoring(self, state: Any) -> Job:
            made.append(Job(state))
            return made[-1]

    monkeypatch.setattr(SimNode, "make_machine", SlowMachine)
    monkeypatch.setattr(InlineCatchUp, "run_long", thread.run_long)
    away.start()
    cluster.until(lambda: bool(thread.jobs))
    cluster.run(2_000)
    replica = cluster.replica(away)
    assert replica.log_start_offset == 0
    assert len(made) == len(thread.jobs) == 1, "what is being read is not read again"
    job, done = thread.jobs.pop()
    job.run()
    away.run(lambda: done(None))
    cluster.until(lambda: replica.log_start_offset == 8)
    cluster.settle()


def test_what_was_read_is_used_for_this_state_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "DECODE_INLINE_BYTES_MAX", 1)
    state = encode_image(EMPTY_IMAGE)
    machine = MetadataMachine()
    assert machine.restoring(b"") is None
    job = machine.restoring(state)
    assert job is not None
    job.run()
    with monkeypatch.context() as patch:
        patch.setattr(state_machine, "decode_image", lambda _: pytest.fail("read once more"))
        machine.restore(LogStart(Offset(0), RaftIndex(0), state=state))
    assert machine.image == EMPTY_IMAGE
    machine.restoring(b"nonsense").run()  # type: ignore[union-attr]
    machine.restore(LogStart(Offset(0), RaftIndex(0), state=state))
    assert machine.image == EMPTY_IMAGE
