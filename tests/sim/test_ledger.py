"""A long run that was interrupted goes on, and does no seed twice."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from jepsen_like import __main__ as command_line
from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.cluster.world import Counts
from jepsen_like.ledger import Ledger


def result(seed: int, verdict: Verdict = Verdict.CLEAN) -> ClusterResult:
    counts = Counts(acked=seed, events=30_000, faults={"kill": 1})
    return ClusterResult(seed, verdict, "", counts=counts, trace_hash=f"{seed:x}", seconds=1.5)


def test_what_was_added_is_read_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "out" / "runs.jsonl")
    assert list(ledger.read()) == []
    ledger.add(result(7))
    ledger.add(result(8, Verdict.ANOMALY))
    read = list(Ledger(tmp_path / "out" / "runs.jsonl").read())
    assert [(r.seed, r.verdict, r.counts.acked, r.seconds) for r in read] == [
        (7, Verdict.CLEAN, 7, 1.5),
        (8, Verdict.ANOMALY, 8, 1.5),
    ]


def test_a_line_cut_off_by_an_interruption_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    ledger = Ledger(path)
    ledger.add(result(7))
    ledger.add(result(8))
    path.write_bytes(path.read_bytes()[:-9])
    assert [r.seed for r in ledger.read()] == [7]
    ledger.add(result(8))
    assert [r.seed for r in ledger.read()] == [7, 8]


def test_a_resumed_run_does_what_is_left_and_sums_up_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[int]] = []

    def run(seeds: Sequence[int], _jobs: int) -> Iterator[ClusterResult]:
        asked.append([*seeds])
        return map(result, seeds[:2])

    monkeypatch.setattr(command_line, "run_chosen", run)
    arguments = ["sim", "--seeds", "3", "--seed", "5", "--resume", "--out", str(tmp_path)]
    assert command_line.main(arguments, io.StringIO()) == 0
    out = io.StringIO()
    assert command_line.main(arguments, out) == 0
    assert asked == [[5, 6, 7], [7]]
    lines = out.getvalue().splitlines()
    assert lines[0] == "2 of 3 runs are done"
    assert lines[1].startswith("3/3 seed 7: clean")
    assert lines[-1].startswith("3 runs: 3 clean")
    assert lines[-1].endswith("20,000 events a second of a core")


def test_other_code_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "run_chosen", lambda seeds, _jobs: map(result, seeds))
    arguments = ["sim", "--seeds", "2", "--resume", "--out", str(tmp_path)]
    assert command_line.main(arguments, io.StringIO()) == 0
    monkeypatch.setattr(command_line, "code_digest", lambda: "other")
    out = io.StringIO()
    assert command_line.main(arguments, out) == 0
    assert out.getvalue().splitlines()[0] == "0 of 2 runs are done"
