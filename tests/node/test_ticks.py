"""When a node wakes, and in which order it looks, ticks and tells."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import define, field

from jepsen_like.disk import SimDisk
from raftmq.config import NodeConfig
from raftmq.log.journal import HardStateJournal
from raftmq.node.data_plane import DataPlane
from raftmq.ports import never
from raftmq.promise import Promise
from raftmq.replication.multiraft import MultiRaft
from raftmq.runtime.clock import CoreTimes
from raftmq.types import StorageId
from tests.partition.fake_replica import FakeClock
from tests.replication.inline import InlineCatchUp

TICK_MS, HEARTBEAT_TICKS = 25, 2


def _nobody(*_args: object) -> None:
    pass


class EnoughError(Exception):
    """The node woke as often as the test wants."""


class FakeLinks:
    """Nobody is there."""

    def send_stored(self, *_args: object) -> bool:
        return False


@define(eq=False)
class Bench:
    """A data plane on time that passes while it sleeps."""

    late_ms: float = 0.0
    log: list[str] = field(factory=list)
    clock: FakeClock = field(factory=FakeClock)
    wakes_ms: list[float] = field(factory=list)
    wakes_max: int = 0
    plane: DataPlane = field(init=False)

    def __attrs_post_init__(self) -> None:
        disk = SimDisk(Random(1))
        disk.make_directories("data")
        around: Any = SimpleNamespace(
            disk=disk,
            folder=SimpleNamespace(storage_id=StorageId(1)),
            clock=self.clock,
            random=Random(1),
            tasks=SimpleNamespace(sleep=self._sleep),
            flusher=SimpleNamespace(submit=_nobody),
            connect=lambda _ears: FakeLinks(),
            make_catch_up=lambda _links, rate: InlineCatchUp(rate),
            batch_openers=None,
            disk_space=lambda: (0, 0),
            make_lock=lambda: None,
            buggify=never,
            core_times=CoreTimes,
            core_stolen_ms=lambda: 0.0,
        )
        self.plane = DataPlane(
            NodeConfig(
                node_id=1, data=Path("/data"), tick_ms=TICK_MS, heartbeat_ticks=HEARTBEAT_TICKS
            ),
            around,
            HardStateJournal.open(disk, "data/state.journal"),
            on_formation=_nobody,
            on_broker=_nobody,
            on_identity=_nobody,
            on_lost=_nobody,
        )
        self.plane.on_tick.append(lambda _now_ms: self.log.append("told"))

    async def _sleep(self, seconds: float) -> None:
        if len(self.wakes_ms) == self.wakes_max:
            raise EnoughError
        self.clock.now_ms += seconds * 1e3 + self.late_ms
        self.wakes_ms.append(self.clock.now_ms)

    async def wake(self, times: int) -> None:
        """Let the node run until it woke so often."""
        self.wakes_max = times
        with pytest.raises(EnoughError):
            await self.plane.tick_forever()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench()
    monkeypatch.setattr(MultiRaft, "tick", lambda _self, _late: bench.log.append("tick"))
    return bench


def says(monkeypatch: pytest.MonkeyPatch, *, quiescent: bool) -> None:
    monkeypatch.setattr(MultiRaft, "is_quiescent", quiescent)


async def test_a_busy_node_wakes_for_each_tick(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, quiescent=False)
    start_ms = bench.clock.now_ms
    await bench.wake(3)
    assert bench.log == ["tick", "told"] * 3
    assert bench.wakes_ms == [start_ms + TICK_MS * n for n in (1, 2, 3)]


async def test_a_node_quiescent_wakes_once_per_heartbeat(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, quiescent=True)
    start_ms = bench.clock.now_ms
    await bench.wake(2)
    assert bench.log == ["tick", "tick", "told"] * 2
    assert bench.wakes_ms == [start_ms + HEARTBEAT_TICKS * TICK_MS * n for n in (1, 2)]


async def test_who_was_held_back_is_woken_by_ticks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else does: a replica that catches up would stand still for ever."""
    says(monkeypatch, quiescent=False)
    rate = bench.plane.catch_up.rate
    rate.set_limit(1_000)
    rate.admit(2 * TICK_MS, 1, list, is_needed=False)
    woken: list[float] = []

    def wake() -> None:
        woken.append(bench.clock.now_ms)

    assert not rate.admit(1, 1, wake, is_needed=False)
    await bench.wake(4)
    assert len(woken) == 1


async def test_who_pauses_goes_on_at_a_tick(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that is not before its time; none of them asks for a wake-up of its own."""
    says(monkeypatch, quiescent=True)
    start_ms = bench.clock.now_ms
    went_on_ms: list[float] = []

    async def wait(promise: Promise[None]) -> None:
        promise.when_done(lambda _promise: went_on_ms.append(bench.clock.now_ms - start_ms))

    bench.plane.tasks.wait = wait
    step_ms = HEARTBEAT_TICKS * TICK_MS
    for pause_ms in (2 * step_ms, step_ms / 2, 0.0):
        await bench.plane.pause(pause_ms / 1e3)
    await bench.wake(3)
    assert went_on_ms == [step_ms, step_ms, 2 * step_ms]
    assert bench.wakes_ms == [start_ms + step_ms * n for n in (1, 2, 3)]
