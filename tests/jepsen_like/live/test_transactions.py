"""What the live workload on transactions tells of them, by a producer that does as it is told."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest

from jepsen_like.checkers import Validity, check_events
from jepsen_like.history_events import Event, Recorder
from jepsen_like.live.workloads import transactors
from jepsen_like.live.workloads.base import Around, Headers, Plan
from jepsen_like.live.workloads.members import UnansweredError
from jepsen_like.live.workloads.senders import Settled
from jepsen_like.live.workloads.transactions import Identity, Producers
from jepsen_like.live.workloads.transactors import (
    DoomedError,
    Librdkafka,
    Made,
    OverError,
    Transactor,
    ask_beside,
)
from raftmq_client.blocking import Admin
from raftmq_client.errors import TimedOutError
from tests.live.harness import Cluster


class Told:
    """A producer whose every end comes to what the test says."""

    protocol = 1
    is_hung = False

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
def around(recorder: Recorder) -> Around:
    plan = Plan("nowhere", {"log": 1}, ("transactions",), 1.0, 1, transactional={"x": 2})
    return Around(plan, recorder)


@pytest.fixture
def producers(around: Around) -> Producers:
    return Producers(around)


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


# ---- who hangs ----


class Refusal:
    """An error of librdkafka's that may be tried again."""

    def fatal(self) -> bool:
        return False

    def txn_requires_abort(self) -> bool:
        return False

    def retriable(self) -> bool:
        return True

    def __str__(self) -> str:
        return "Conflicting send_offsets_to_transaction API call is already in progress"


class Theirs:
    """A producer of confluent-kafka that does not come back from `send_offsets_to_transaction`,
    and refuses all else meanwhile."""

    def __init__(self, forever: threading.Event) -> None:
        self._forever = forever
        self.refused = 0

    def init_transactions(self, _timeout_s: float) -> None:
        pass

    def begin_transaction(self) -> None:
        pass

    def produce(self, *_: Any, **__: Any) -> None:
        pass

    def poll(self, _timeout_s: float) -> None:
        pass

    def send_offsets_to_transaction(self, *_: Any) -> None:
        self._forever.wait()

    def abort_transaction(self, _timeout_s: float) -> None:
        self.refused += 1
        raise confluent_kafka.KafkaException(Refusal())

    commit_transaction = abort_transaction


class Group:
    def consumer_group_metadata(self) -> None:
        return None


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Theirs]:
    """The one that `Librdkafka` makes; it hangs until the test is over."""
    forever = threading.Event()
    made = Theirs(forever)
    monkeypatch.setattr(confluent_kafka, "Producer", lambda *_, **__: made)
    monkeypatch.setattr(transactors, "new_consumer", lambda *_: Group())
    monkeypatch.setattr(transactors, "ANSWER_S", 0.3)
    monkeypatch.setattr(transactors, "CALL_S", 0.01)
    yield made
    forever.set()


def test_one_that_hangs_is_asked_for_nothing_more(
    around: Around,
    events: list[Event],
    producers: Producers,
    theirs: Theirs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would refuse, as long as it hangs: an abort that is asked for again and again took a
    minute of a core, and the clients' last answers came too late."""
    monkeypatch.setattr(transactors, "_commit_beside", lambda *_: "CompleteAbort")
    transactor: Transactor = Librdkafka(Made(around, "transactor-0", 1_000, 0))
    mine = Identity(0, random.Random(1), 1_000, transactor, process=1)
    running = producers._begin(mine)
    assert running is not None
    running.offset = 7
    assert not producers._write(mine, running, list(running.records))
    producers._finish(mine, running, is_commit=False)
    assert theirs.refused == 0
    assert mine.transactor is None, "another one takes its place"
    assert rows(events, "end") == []
    assert rows(events, "transaction") == ["invoke", "fail"], "nobody asked for a commit"
    assert len(around.hung) == 2
    assert "hangs" in around.hung[0]
    assert "our own client was answered" in around.hung[1]
    assert "CompleteAbort" in around.hung[1]
    assert around.unanswered == []


def test_who_is_refused_at_once_does_not_take_a_core(around: Around, theirs: Theirs) -> None:
    transactor = Librdkafka(Made(around, "transactor-0", 1_000, 0))
    with pytest.raises(UnansweredError, match="Conflicting"):
        transactor.end(is_commit=False)
    assert 2 <= theirs.refused <= 2 + transactors.ANSWER_S / transactors.RETRY_S


@pytest.mark.parametrize(
    "why", [UnansweredError("its transaction is Ongoing"), TimedOutError("silence", sent=True)]
)
def test_a_cluster_that_answers_nobody_is_found_where_one_hangs(
    around: Around, why: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise why

    monkeypatch.setattr(transactors, "_commit_beside", fail)
    monkeypatch.setattr(transactors, "BESIDE_S", 0.1)
    ask_beside(Made(around, "transactor-0", 1_000, 0), "g", "it")
    assert around.unanswered == [f"it: our own client got no answer either: {why}"]
    assert around.hung == []


def test_a_cluster_may_take_its_time_under_a_fault(
    around: Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: deque[Exception | str] = deque([UnansweredError("cut off"), "CompleteAbort"])

    def answer(*_: Any) -> str:
        told = answers.popleft()
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(transactors, "_commit_beside", answer)
    ask_beside(Made(around, "transactor-0", 1_000, 0), "g", "it")
    assert around.unanswered == []
    assert not answers


@pytest.mark.live
@pytest.mark.slow
def test_what_is_asked_beside_one_that_hangs_is_answered_by_real_nodes(
    recorder: Recorder, shared_cluster: Cluster, unique: str
) -> None:
    """What the hung one left open is waited for until its timeout ends it."""
    bootstrap = shared_cluster.bootstrap
    with Admin(bootstrap) as admin:
        admin.create_topic(unique, 2, 3)
    plan = Plan(bootstrap, {}, ("transactions",), 1.0, 1, transactional={unique: 2})
    around = Around(plan, recorder)
    made = Made(around, f"id-of-{unique}", 2_500, 0)
    left_open = Librdkafka(made)
    left_open.begin()
    left_open.send(f"{unique}-0", b"never seen", lambda *_: None)
    left_open.commit_offset(f"group-of-{unique}", f"{unique}-0", 7)
    ask_beside(made, f"group-of-{unique}", "it")
    left_open.close()
    assert around.unanswered == []
    [told] = around.hung
    assert told.startswith("it: our own client was answered after ")
    assert told.endswith(" s, its transaction is CompleteAbort")
