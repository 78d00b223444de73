"""Histories written by hand: each checker rejects its anomaly, and accepts what looks like it."""

from __future__ import annotations

import pytest

from jepsen_like.checkers import Options, Report, Validity, check_events
from tests.jepsen_like.checkers import (
    histories_of_groups,
    histories_of_logs,
    histories_of_transactions,
)
from tests.jepsen_like.checkers.histories import ACCEPTED, REJECTED, Written
from tests.jepsen_like.checkers.histories_of_transactions import A, B, ask, begin, read
from tests.jepsen_like.checkers.scribe import Scribe

assert histories_of_groups
assert histories_of_logs
assert histories_of_transactions


def test_every_verdict_is_tried_with_a_history_that_it_must_reject() -> None:
    names = {verdict.name for verdict in check_events([]).verdicts}
    assert names == {name for name, _ in REJECTED}


@pytest.mark.parametrize(
    ("name", "written"), REJECTED, ids=[f"{name}-{written.__name__}" for name, written in REJECTED]
)
def test_rejects(name: str, written: Written) -> None:
    scribe = Scribe()
    written(scribe)
    report = scribe.report()
    verdict = report[name]
    assert verdict.validity is Validity.INVALID, report.to_text()
    assert verdict.count >= 1
    assert verdict.examples
    ops = {event.op for event in scribe.events}
    assert all(op in ops for example in verdict.examples for op in example.ops)
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("name", "written"), ACCEPTED, ids=[f"{name}-{written.__name__}" for name, written in ACCEPTED]
)
def test_accepts(name: str, written: Written) -> None:
    scribe = Scribe()
    written(scribe)
    report = scribe.report()
    assert name in {verdict.name for verdict in report.verdicts}
    assert report.validity is Validity.VALID, report.to_text()


def test_what_options_excuse() -> None:
    scribe = Scribe()
    scribe.append(1, {0: 10})
    scribe.append(1, {2: 12})
    scribe.append(1, {3: 13})
    scribe.poll(2, [(0, 10), (2, 12)])
    assert scribe.report().named(Validity.INVALID) == ("unseen", "offset-gap", "linear-log")
    report = check_events(scribe.events, Options(must_see_all=False, gaps_allowed=True))
    assert report.validity is Validity.VALID
    assert "1 excused" in report["unseen"].note
    assert "1 excused" in report["offset-gap"].note


def test_a_run_that_ended_early_has_not_lost_what_nobody_came_to() -> None:
    """One partition was read to its end, the other one not as far."""

    def judged(passed: int) -> Report:
        scribe = Scribe()
        transaction = begin(scribe, x_0=[10], x_1=[11])
        scribe.ok(ask(scribe, transaction))
        scribe.ok(transaction, records={A: [(0, 10)], B: [(3, 11)]})
        read(scribe, A, {0: 10}, 1)
        read(scribe, B, {}, passed)
        return check_events(scribe.events, Options(must_see_all=False))

    assert judged(3).validity is Validity.VALID
    assert judged(4).named(Validity.INVALID) == ("torn-transaction",)
