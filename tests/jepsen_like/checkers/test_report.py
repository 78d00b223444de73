"""Reports: text, JSON, exit codes and the command line; and histories that cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jepsen_like.checkers import Report, Validity, Verdict, check_events
from jepsen_like.checkers.verdict import EXAMPLES_MAX
from jepsen_like.history_events import Event, MalformedHistoryError, write_history
from tests.jepsen_like.checkers.scribe import KEY, Scribe

VALID = Verdict("one", Validity.VALID)
UNKNOWN = Verdict("two", Validity.UNKNOWN, note="gave up")
INVALID = Verdict("three", Validity.INVALID, 1)


@pytest.mark.parametrize(
    ("verdicts", "validity", "exit_code"),
    [
        ((), Validity.VALID, 0),
        ((VALID,), Validity.VALID, 0),
        ((VALID, UNKNOWN), Validity.UNKNOWN, 2),
        ((INVALID, UNKNOWN, VALID), Validity.INVALID, 1),
    ],
)
def test_the_worst_verdict_counts(
    verdicts: tuple[Verdict, ...], validity: Validity, exit_code: int
) -> None:
    report = Report(verdicts)
    assert report.validity is validity
    assert report.exit_code == exit_code


def many_losses() -> Scribe:
    scribe = Scribe()
    scribe.append(1, {offset: offset for offset in range(20)})
    scribe.append(1, {20: 20})
    scribe.poll(2, {20: 20})
    return scribe


def test_counts_all_and_keeps_the_first_few() -> None:
    report = many_losses().report()
    lost = report["lost-write"]
    assert lost.count == 20
    assert len(lost.examples) == EXAMPLES_MAX
    assert lost.examples[0].where == KEY
    assert lost.examples[0].ops == (0, 4)
    text = report.to_text()
    assert "3 operations: append ok 2, poll ok 1" in text
    assert "lost-write               invalid  20" in text
    assert "t-0: 0 was acknowledged at offset 0, polls reached 20, none returned it" in text
    assert "and 12 more" in text
    assert text.splitlines()[-1] == "invalid"


def test_json_says_the_same() -> None:
    told = json.loads(many_losses().report().to_json())
    assert told["validity"] == "invalid"
    assert told["operations"] == 3
    assert told["counts"] == {"append ok": 2, "poll ok": 1}
    (lost,) = [verdict for verdict in told["verdicts"] if verdict["name"] == "lost-write"]
    assert (lost["validity"], lost["count"]) == ("invalid", 20)
    assert lost["examples"][0]["ops"] == [0, 4]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([Event("ok", "append", 1, 0, 0)], "never began"),
        ([Event("invoke", "poll", 1, 0, 0), Event("invoke", "poll", 1, 0, 0)], "begins twice"),
        ([Event("invoke", "poll", 1, 0, 0), Event("ok", "append", 1, 0, 0)], "as another"),
        ([Event("invoke", "poll", 1, 0, 0), Event("ok", "poll", 2, 0, 0)], "as another"),
    ],
)
def test_refuses_histories_that_cannot_be(events: list[Event], told: str) -> None:
    with pytest.raises(MalformedHistoryError, match=told):
        check_events(events)


@pytest.mark.slow
def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, many_losses().events)
    command = [sys.executable, "-m", "jepsen_like.checkers", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "invalid"
    done = subprocess.run(
        [*command, "--json", "--no-final-polls"], capture_output=True, text=True, check=False
    )
    told = json.loads(done.stdout)
    names = {v["name"] for v in told["verdicts"] if v["validity"] != "valid"}
    assert names == set()
    assert done.returncode == 0
