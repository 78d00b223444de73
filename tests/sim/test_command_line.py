"""`python -m jepsen_like`: exit codes and last lines."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import attrs
import pytest

from jepsen_like import __main__ as command_line
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.planted import BUGS


def test_clean_seeds_exit_0_with_a_summary() -> None:
    out = io.StringIO()
    assert command_line.main(["sim", "--seeds", "1", "--seed", "5", "--jobs", "1"], out) == 0
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("1/1 seed 5: clean")
    assert lines[-1].startswith("1 runs: 1 clean, 0 anomaly, 0 unknown; median per run: ack")


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([Verdict.CLEAN, Verdict.ANOMALY, Verdict.UNKNOWN], 1),
        ([Verdict.CLEAN, Verdict.UNKNOWN], 2),
    ],
    ids=["anomaly", "unknown"],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verdicts: list[Verdict], code: int
) -> None:
    results = [ClusterResult(number, verdict, "Name") for number, verdict in enumerate(verdicts)]
    monkeypatch.setattr(command_line, "run_chosen", lambda *_: iter(results))
    out = io.StringIO()
    arguments = ["sim", "--seeds", str(len(results)), "--out", str(tmp_path), "--tries", "0"]
    assert command_line.main(arguments, out) == code
    assert f"{len(results)} runs:" in out.getvalue().splitlines()[-1]
    assert ("again: python -m jepsen_like replay" in out.getvalue()) == (code == 1)


def test_a_caught_bug_exits_0() -> None:
    out = io.StringIO()
    arguments = ["planted", "--bug", "minority-commit", "--seeds", "5", "--jobs", "1"]
    assert command_line.main(arguments, out) == 0
    assert out.getvalue().splitlines()[-1] == "caught 1 of 1"


def test_an_escaped_bug_exits_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    harmless = attrs.evolve(BUGS["minority-commit"], plant=nullcontext)
    monkeypatch.setitem(BUGS, "minority-commit", harmless)
    out = io.StringIO()
    arguments = ["planted", "--bug", "minority-commit", "--seeds", "1", "--jobs", "1"]
    assert command_line.main(arguments, out) == 1
    assert out.getvalue().splitlines()[-1] == "caught 0 of 1"


def _runs(first: int, count: int, _jobs: int) -> Iterator[ClusterResult]:
    return (ClusterResult(seed, Verdict.CLEAN) for seed in range(first, first + count))


def test_a_soak_shows_how_far_it_is_and_sums_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "run_cluster_seeds", _runs)
    out = io.StringIO()
    assert command_line.main(["soak", "--minutes", "0.001", "--seed", "7"], out) == 0
    lines = out.getvalue().splitlines()
    assert "[####" in out.getvalue()
    assert lines[-2].startswith("seeds from 7 on")
    assert "0 anomaly, 0 unknown" in lines[-1]


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "end", [interrupted, partial(signal.raise_signal, signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_soak_without_end_ends_by_hand(
    monkeypatch: pytest.MonkeyPatch, end: Callable[[], None]
) -> None:
    """SIGTERM is how timers and `timeout` end it."""
    before = signal.getsignal(signal.SIGTERM)

    def runs(first: int, count: int, jobs: int) -> Iterator[ClusterResult]:
        if first > 1:
            end()
        return _runs(first, count, jobs)

    monkeypatch.setattr(command_line, "run_cluster_seeds", runs)
    out = io.StringIO()
    assert command_line.main(["soak", "--minutes", "0", "--seed", "1"], out) == 0
    assert out.getvalue().splitlines()[-1].startswith("16 runs: 16 clean")
    monkeypatch.setattr(command_line, "run_cluster_seeds", lambda *_: runs(2, 0, 0))
    assert command_line.main(["soak", "--minutes", "0", "--seed", "1"], out) == 2
    assert signal.getsignal(signal.SIGTERM) is before
