"""Histories written by hand: each checker rejects its anomaly, and accepts what looks like it."""

from __future__ import annotations

import pytest

from jepsen_like.checkers import Options, Report, Validity, check_events
from tests.jepsen_like.checkers import (
    histories_of_groups,
    histories_of_logs,
    histories_of_transactions,
    histories_of_views,
)
from tests.jepsen_like.checkers.histories import ACCEPTED, REJECTED, Written
from tests.jepsen_like.checkers.histories_of_transactions import A, B, ask, begin, read
from tests.jepsen_like.checkers.histories_of_views import MS, come, delay, wait
from tests.jepsen_like.checkers.scribe import Scribe

assert histories_of_groups
assert histories_of_logs
assert histories_of_transactions
assert histories_of_views


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


def test_what_wrong_clocks_excuse() -> None:
    """What was sent to a topic, or came, while nobody could know the time; nothing else."""
    s = Scribe()
    s.ok(delay(s, 10, 11, due=500))
    wait(s, 100)
    come(s, (0, 10), stamp=100)

    def invalid(*wrong: tuple[int, int]) -> tuple[str, ...]:
        spans = [(began * MS, ended * MS) for began, ended in wrong]
        report = check_events(s.events, Options(clocks_wrong=spans))
        return report.named(Validity.INVALID)

    assert invalid() == ("NeverEarly", "NothingPendingIsDropped")
    assert invalid((200, 300)) == invalid()
    assert invalid((90, 110)) == ("NothingPendingIsDropped",), "it came then"
    assert invalid((0, 5)) == (), "its topic was written to then"
    come(s, (0, 10), (1, 10), stamp=100)
    assert invalid((0, 200)) == ("DeliveredOnce",), "however late it is"
