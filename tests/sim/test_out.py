"""The folder of a failure: fewer faults where fewer are enough, and the same run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jepsen_like.cluster import out
from jepsen_like.cluster.out import minimise, replay, write_failure
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.cluster.world import Fault
from jepsen_like.history_events import Event, read_history

FAULTS = [Fault(100.0 * number, "kill", number) for number in range(20)]


def run(faults: Sequence[Fault]) -> ClusterResult:
    """Fails as soon as the third and the seventeenth strike together."""
    is_bad = FAULTS[3] in faults and FAULTS[17] in faults
    return ClusterResult(
        7,
        Verdict.ANOMALY if is_bad else Verdict.CLEAN,
        "Name" if is_bad else "",
        faults=tuple(faults),
        trace=("one", "two"),
        trace_hash=f"{len(faults)}",
        history=[Event("ok", "heal", -1, 0, 0)],
    )


def test_faults_that_are_not_needed_are_left_out() -> None:
    best = minimise(run(FAULTS), run, tries_max=200)
    assert list(best.faults) == [FAULTS[3], FAULTS[17]]


def test_another_finding_is_not_the_same_failure() -> None:
    def other(faults: Sequence[Fault]) -> ClusterResult:
        result = run(faults)
        result.name = "Other"
        return result

    assert list(minimise(run(FAULTS), other).faults) == FAULTS


def test_a_folder_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "run_cluster_seed", lambda _seed, *, faults: run(faults))
    folder = write_failure(run(FAULTS), tmp_path, tries_max=200)
    assert (folder / "trace.txt").read_text() == "one\ntwo\n"
    assert f"replay {folder}" in (folder / "why.txt").read_text()
    assert [event.f for event in read_history(folder / "history.jsonl.zst")] == ["heal"]
    result, is_same = replay(folder)
    assert is_same
    assert list(result.faults) == [FAULTS[3], FAULTS[17]]
