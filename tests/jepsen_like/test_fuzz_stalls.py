"""Which stalls of a loop the fuzzer holds against a node on a machine with too few cores."""

from __future__ import annotations

import pytest
from attrs import evolve

from jepsen_like.fuzz import stalls as module
from jepsen_like.fuzz.stalls import LIMIT_MS, OtherThreads, Stall, read_stall
from raftmq.node.loop_watch import STALL_SHARE, LoopWatch
from raftmq.runtime.clock import CoreTimes

LINE = (
    "2026-01-02T03:04:05.250000Z warning loop stalled             node=1 late_ms=98.0 ran_ms=3.5"
    " without_core_ms=18.0 stolen_ms=1.5 collecting_ms=0.0 had_core=True"
)


def test_a_line_of_a_stall() -> None:
    stall = read_stall(LINE)
    assert stall is not None
    assert stall.at % 60 == 5.25
    assert (stall.late_ms, stall.ran_ms, stall.no_core_ms, stall.had_core) == (98, 3.5, 19.5, True)
    assert read_stall(LINE.replace("stalled", "went on")) is None


def test_a_line_that_tells_how_many_were_left_out_is_none() -> None:
    left_out = "2026-01-02T03:04:05.250000Z warning loop stalled             left_out=3 node=1"
    assert read_stall(left_out) is None


def test_the_limit_is_that_of_a_node() -> None:
    watch = LoopWatch(LIMIT_MS / STALL_SHARE, CoreTimes, lambda: 0.0)
    watch.ticked(LIMIT_MS)
    assert watch.stalls_count == 0
    watch.ticked(LIMIT_MS + 0.1)
    assert watch.stalls_count == 1


def sampled(monkeypatch: pytest.MonkeyPatch, waited_s: float) -> tuple[OtherThreads, Stall]:
    """A node whose worker waits for so long within a stall of 98 ms; the loop's own thread waits
    for all of it."""
    monkeypatch.setattr(module, "SAMPLE_S", 3_600.0)  # by hand alone
    others = OtherThreads({1: 7})
    for at, worker in ((1_000.0, 0.0), (1_000.05, 0.0), (1_000.15, waited_s), (1_000.2, waited_s)):
        monkeypatch.setattr(
            module, "waits_of", lambda pid, t=at, w=worker: {(pid, pid): t, (pid, 8): w}
        )
        monkeypatch.setattr(module.time, "time", lambda t=at: t)
        others.sample()
    others.close()
    return others, Stall(1_000.148, 98.0, 3.5, 19.5, had_core=True)


def test_a_thread_that_had_the_interpreter_and_no_core_explains_a_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, stall = sampled(monkeypatch, 0.070)
    assert others.explain(1, stall)
    assert not others.explain(1, evolve(stall, late_ms=130.0)), "23 ms more are too many"
    assert not others.explain(1, evolve(stall, ran_ms=60.0)), "it did that itself"
    assert not others.explain(1, evolve(stall, at=1_000.9)), "nobody sampled that"


def test_a_thread_that_hardly_waited_explains_none(monkeypatch: pytest.MonkeyPatch) -> None:
    others, stall = sampled(monkeypatch, 0.010)
    assert not others.explain(1, stall)
