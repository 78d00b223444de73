"""What waits for cores excuse, and that nothing is excused for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from jepsen_like.live import scarcity as module
from jepsen_like.live.progress import longest_stall
from jepsen_like.live.scarcity import STRETCH_MAX, Patience, Sampler, Scarcity, ran_s, waits_of

NODE, CLIENT = (10, 10), (20, 21)


def sampled(*waits: tuple[float, float]) -> Scarcity:
    """A sample each second, of two threads."""
    scarcity = Scarcity()
    for at, (node, client) in enumerate(waits):
        scarcity.note(float(at), {NODE: node, CLIENT: client})
    return scarcity


def test_the_thread_that_waited_longest_counts_alone() -> None:
    scarcity = sampled((5, 1), (5.25, 1), (5.5, 1.75), (5.5, 2.5))
    assert scarcity.waited_s(0, 1) == 0.25
    assert scarcity.waited_s(0, 3) == 1.5, "the client's; not both together"
    assert scarcity.counted_s(0, 3) == 1.5
    assert scarcity.waited_s(2.2, 2.4) == pytest.approx(0.2), "not more than there is"
    assert scarcity.waited_s(7, 9) == 0, "nobody sampled that"
    assert Scarcity().counted_s(3, 9) == 6


def test_what_began_or_ended_meanwhile_counts_as_far_as_it_is_known() -> None:
    scarcity = Scarcity()
    scarcity.note(0, {NODE: 1.0})
    scarcity.note(1, {NODE: 1.5, CLIENT: 0.25})
    scarcity.note(2, {CLIENT: 0.5})
    assert scarcity.waited_s(0, 2) == 0.5
    assert scarcity.waited_s(1, 2) == 0.25


def test_a_bound_is_stretched_and_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    starved = Scarcity()
    bounded, plain, stretched = Patience(10), Patience(10, Scarcity()), Patience(10, starved)
    for second in range(100):
        starved.note(second, {NODE: float(second)})  # it never runs
    now = 10.0
    assert not bounded.is_over
    now = 10.5
    assert bounded.is_over
    assert plain.is_over
    assert not stretched.is_over
    now = 10 * (1 + STRETCH_MAX)
    assert not stretched.is_over
    now += 0.5
    assert stretched.is_over


def test_a_shorter_stall_counts_more_where_nobody_waited() -> None:
    scarcity = Scarcity()
    waits = [0, 1, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    for at, waited in enumerate(waits):
        scarcity.note(at, {NODE: float(waited)})
    stall = longest_stall("t-0", [(0, 10)], [6, 9.5], scarcity)
    assert (stall.began, stall.seconds, stall.counted_s) == (6, 3.5, 3.5)
    assert longest_stall("t-0", [(0, 10)], [6, 9.5]).seconds == 6


def test_who_shares_a_core_waits_for_it() -> None:
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this kernel does not count waits")
    core = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, [{core}]); print(flush=True)\nwhile True: pass"
    busy = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        while not all(sum(waits_of(process.pid).values()) > 0.02 for process in busy):
            pass  # both run for ever, on one core
        pid = busy[0].pid
        assert list(waits_of(pid)) == [(pid, pid)]
    finally:
        for process in busy:
            process.kill()
            process.communicate()
    assert not waits_of(pid), "it is gone"


def test_cores_by_kind_of_process() -> None:
    scarcity = Scarcity()
    assert scarcity.cores(0, 9) == {}
    scarcity.note(0, {}, {"clients": 1.0})
    scarcity.note(2, {}, {"clients": 1.5, "nodes": 3.0})
    scarcity.note(4, {}, {"clients": 3.5, "nodes": 3.0})
    assert scarcity.cores(0, 4) == {"clients": 0.625, "nodes": 0.75}
    assert scarcity.cores(2, 4) == {"clients": 1.0, "nodes": 0.0}
    assert scarcity.cores(4, 9) == {}, "nothing was sampled then"


def test_old_samples_are_forgotten_but_for_the_last_of_them() -> None:
    scarcity = sampled((5, 1), (5.25, 1), (5.5, 1.75), (5.5, 2.5))
    scarcity.forget(-1)
    assert scarcity.waited_s(0, 1) == 0.25
    scarcity.forget(2.5)
    assert scarcity.waited_s(2.5, 3) == 0.5, "the rest of its sample"
    assert scarcity.waited_s(0, 2) == 0, "nobody knows that any more"


def test_a_sampler_counts_what_processes_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come and go among them, and one that has the number of an earlier one."""
    scarcity = Scarcity()
    told = iter([{7: "nodes", 8: "nodes"}, {7: "nodes"}, {7: "nodes", 9: "clients"}])
    ran = iter([1.0, 0.5, 1.25, 0.25, 2.0])
    has_told = threading.Event()

    def kinds() -> dict[int, str]:
        found = next(told, None)
        if found is None:
            has_told.set()
        return found or {}

    monkeypatch.setattr(module, "SAMPLE_S", 0.01)
    monkeypatch.setattr(module, "ran_s", lambda _pid: next(ran))
    sampler = Sampler(scarcity, kinds)
    assert has_told.wait(10)
    sampler.close()
    assert [sample.get("nodes") for sample in scarcity._ran[:3]] == [1.5, 1.75, 2.0]
    assert scarcity._ran[-1] == {"nodes": 2.0, "clients": 2.0}


def test_what_a_process_ran_is_the_kernels_own_count() -> None:
    before = ran_s(os.getpid())
    assert before is not None
    while ran_s(os.getpid()) == before:
        pass  # a tick of the kernel is 10 ms
    assert abs((ran_s(os.getpid()) or 0) - sum(os.times()[:2])) < 0.1
    assert ran_s(1 << 30) is None
