"""What the live workload on transactions tells of them, by a producer that does as it is told."""

from __future__ import annotations

import random
from collections import deque

import pytest

from jepsen_like.checkers import Validity, check_events
from jepsen_like.history_events import Event, Recorder
from jepsen_like.live.workloads.base import Around, Headers, Plan
from jepsen_like.live.workloads.members import UnansweredError
from jepsen_like.live.workloads.senders import Settled
from jepsen_like.live.workloads.transactions import Identity, Producers
from jepsen_like.live.workloads.transactors import DoomedError, OverError, Transactor


class Told:
    """A producer whose every end comes to what the test says."""

    protocol = 1

    def __init__(self, *ends: Exception | None, lost: int = 0) -> None:
        self._ends = deque(ends)
        self._lost = lost
        self._offset = 0
        self.asked: list[bool] = []
        self.is_closed = False

    def begin(self) -> tuple[int, int]:
        return 7, 3

    def send(self, key: str, data: bytes, settled: Settled, headers: Headers = ()) -> None:
        del key, data, headers
        settled(self._offset, "")
        self._offset += 1

    def commit_offset(self, group: str, key: str, offset: int) -> None:
        del group, key, offset

    def end(self, *, is_commit: bool) -> None:
        self.asked.append(is_commit)
        error = self._ends.popleft()
        if error is not None:
            raise error

    def lost_ends(self) -> int:
        lost, self._lost = self._lost, 0
        return lost

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def recorder(events: list[Event]) -> Recorder:
    return Recorder(events.append, lambda: 0)


@pytest.fixture
def producers(recorder: Recorder) -> Producers:
    plan = Plan("nowhere", {"log": 1}, ("transactions",), 1.0, 1, transactional={"x": 2})
    return Producers(Around(plan, recorder))


def run_one(producers: Producers, transactor: Told, *, is_commit: bool) -> Identity:
    """One transaction from its beginning to its end."""
    told: Transactor = transactor
    mine = Identity(0, random.Random(1), 1_000, told, process=1)
    running = producers._begin(mine)
    assert running is not None
    assert producers._write(mine, running, list(running.records))
    producers._finish(mine, running, is_commit=is_commit)
    return mine


def rows(events: list[Event], f: str) -> list[str]:
    return [event.type for event in events if event.f == f]


@pytest.mark.parametrize(
    ("ends", "lost", "is_commit", "outcome", "asked"),
    [
        ((None,), 0, True, "ok", [True]),
        ((None,), 0, False, "fail", [False]),
        ((DoomedError("no"), None), 0, True, "fail", [True, False]),
        ((DoomedError("no"), None), 1, True, "info", [True, False]),
        ((OverError("fenced", is_certain=True),), 0, True, "fail", [True]),
        ((OverError("fenced", is_certain=True),), 2, True, "info", [True]),
        ((OverError("over", is_certain=False),), 0, True, "info", [True]),
        ((UnansweredError("silence"),), 0, True, "info", [True]),
        ((UnansweredError("silence"),), 0, False, "fail", [False]),
        ((None,), 1, True, "ok", [True]),
    ],
    ids=[
        *("committed", "aborted", "refused", "refused, an answer was lost", "fenced"),
        *("fenced, answers were lost", "over, and who knows", "no answer"),
        *("an abort without an answer", "committed at the second try"),
    ],
)
def test_what_is_unknown_stays_unknown(
    events: list[Event],
    producers: Producers,
    ends: tuple[Exception | None, ...],
    lost: int,
    is_commit: bool,
    outcome: str,
    asked: list[bool],
) -> None:
    transactor = Told(*ends, lost=lost)
    mine = run_one(producers, transactor, is_commit=is_commit)
    assert transactor.asked == asked
    assert rows(events, "transaction") == ["invoke", outcome]
    assert rows(events, "end").count("info") == lost + sum(
        isinstance(error, UnansweredError) for error in ends
    )
    is_over = any(isinstance(error, OverError | UnansweredError) for error in ends)
    assert transactor.is_closed == is_over == (mine.transactor is None)


@pytest.mark.parametrize(
    ("lost", "validity"), [(0, Validity.INVALID), (1, Validity.VALID)], ids=["without", "with"]
)
def test_a_lost_commit_excuses_what_comes_of_the_next_one_by_protocol_1(
    events: list[Event], recorder: Recorder, producers: Producers, lost: int, validity: Validity
) -> None:
    """KAFKA-17754: the EndTxn without an answer commits the next transaction, which was aborted."""
    run_one(producers, Told(None, lost=lost), is_commit=True)
    run_one(producers, Told(None), is_commit=False)
    for event in [event for event in events if event.f == "transaction"]:
        if event.type == "invoke":
            records = {key: [*enumerate(v for _, v in rows)] for key, rows in event.records.items()}
            recorder.ok(recorder.invoke(9, "poll_committed"), records=records)
    assert check_events(events)["committed-aborted-read"].validity is validity
