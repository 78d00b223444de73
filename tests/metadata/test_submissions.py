"""What waits in the engine, as tables: each way between states is taken, no other one can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from itertools import pairwise, product
from typing import Any, Final, TypeVar

import pytest

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.commands import NoOperation
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.raft_engine import STAGE_NEXT, RaftMetadataEngine, Stage
from raftmq.metadata.submissions import (
    COMMAND_NEXT,
    FORWARD_NEXT,
    ROUND_NEXT,
    BarrierRounds,
    CommandState,
    Forward,
    ForwardState,
    Round,
    RoundState,
    Submission,
    Submissions,
)
from raftmq.promise import Promise
from raftmq.types import RaftIndex
from tests.controller.metadata_cluster import MetadataCluster

S = TypeVar("S", bound=IntEnum)
NOW_MS: Final = 1_000.0
RESEND_MS: Final = 100.0
LATE_MS: Final = NOW_MS + RESEND_MS


def ways(table: Mapping[S, frozenset[S]]) -> set[tuple[S, S]]:
    return {(before, after) for before, nexts in table.items() for after in nexts}


def taken(events: Mapping[Any, Mapping[S, S]], at: Callable[[S], Any]) -> set[tuple[S, S]]:
    """Let each event happen in each of its states; the ways that were taken."""
    found = set()
    for event, rows in events.items():
        for before, after in rows.items():
            thing = at(before)
            event(thing)
            assert thing.state is after, f"{event.__name__} in {before.name}"
            found.add((before, after))
    return found


@pytest.mark.parametrize(
    ("make", "table"),
    [
        (lambda state: Submission(1, b"", Promise(), 0.0, True, state), COMMAND_NEXT),
        (lambda state: Forward([], 0.0, state), FORWARD_NEXT),
        (lambda state: Round(state=state), ROUND_NEXT),
    ],
    ids=["command", "forward", "round"],
)
def test_no_other_way_can_be_taken(
    make: Callable[[IntEnum], Any], table: Mapping[IntEnum, frozenset[IntEnum]]
) -> None:
    for before, after in product(table, table):
        thing = make(before)
        if after in table[before]:
            thing.become(after)
        else:
            with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
                thing.become(after)


# ---- own commands ----


class OneCommand:
    """Commands with one in a state."""

    def __init__(self, state: CommandState) -> None:
        self.submissions = Submissions()
        self.promise = self.submissions.add(b"command", LATE_MS, may_resend=False)
        [self.command] = self.submissions.commands.values()
        if state is not CommandState.UNSENT:
            self.send()
        if state is CommandState.ABANDONED:
            self.controller_changes()
        assert self.state is state

    @property
    def state(self) -> CommandState:
        return self.command.state

    def send(self) -> None:
        self.submissions.next_unsent(1_000)

    def controller_changes(self) -> None:
        self.submissions.abandon_unrepeatable()
        self.submissions.send_all_again()

    def send_again(self) -> None:
        self.submissions.send_all_again()
        self.send()


def test_states_of_a_command() -> None:
    events = {
        OneCommand.send: {
            CommandState.UNSENT: CommandState.SENT,
            CommandState.ABANDONED: CommandState.ABANDONED,
        },
        OneCommand.send_again: {
            CommandState.UNSENT: CommandState.SENT,
            CommandState.SENT: CommandState.SENT,
            CommandState.ABANDONED: CommandState.ABANDONED,
        },
        OneCommand.controller_changes: {
            CommandState.SENT: CommandState.ABANDONED,
            CommandState.ABANDONED: CommandState.ABANDONED,
        },
    }
    unmoved = {(CommandState.ABANDONED, CommandState.ABANDONED)}
    assert taken(events, OneCommand) - unmoved == ways(COMMAND_NEXT)


def test_what_was_never_sent_fails_for_certain_when_the_controller_changes() -> None:
    for state, error in (
        (CommandState.UNSENT, ErrorCode.NOT_CONTROLLER),
        (CommandState.SENT, None),
        (CommandState.ABANDONED, None),
    ):
        one = OneCommand(state)
        assert one.submissions.abandon_unrepeatable() is (state is CommandState.SENT)
        assert (None if one.promise.error is None else one.promise.error.code) is error  # type: ignore[attr-defined]


@pytest.mark.parametrize("state", CommandState, ids=lambda state: state.name)
def test_every_command_is_answered_once_however_it_ends(state: CommandState) -> None:
    ends: dict[Callable[[Submissions], None], ErrorCode | None] = {
        lambda s: s.expire(LATE_MS): ErrorCode.REQUEST_TIMED_OUT,
        lambda s: s.applied(1, "result"): None,
        lambda s: s.applied(2, "of a later one"): ErrorCode.NOT_CONTROLLER,
        lambda s: s.restored(1): ErrorCode.REQUEST_TIMED_OUT,
        Submissions.incarnation_ended: ErrorCode.NOT_CONTROLLER,
    }
    for end, expected in ends.items():
        one = OneCommand(state)
        end(one.submissions)
        one.submissions.settle()
        assert one.promise.is_done
        error = one.promise.error
        assert (error.code if isinstance(error, KafkaError) else error) is expected
        assert not one.submissions.commands
        one.submissions.expire(LATE_MS)
        one.submissions.settle()


# ---- forwards ----


class OneForward:
    """A forward of two commands in a state."""

    def __init__(self, state: ForwardState) -> None:
        self.submissions = Submissions()
        for _ in range(2):
            self.submissions.add(b"command", 2 * LATE_MS, may_resend=True)
        forward = self.submissions.begin_forward(1_000, NOW_MS)
        assert forward is not None
        self.forward = forward
        if state is ForwardState.TAKEN:
            self.taken()
        elif state is ForwardState.FAILED:
            self.failed()
        elif state is ForwardState.GIVEN_UP:
            self.given_up()
        assert self.state is state

    @property
    def state(self) -> ForwardState:
        return self.forward.state

    def taken(self) -> None:
        self.submissions.forward_taken(self.forward)

    def refused(self) -> None:
        self.submissions.forward_refused(self.forward, 0, KafkaError("refused"))

    def failed(self) -> None:
        self.forward.become(ForwardState.FAILED)

    def given_up(self) -> None:
        self.submissions.send_all_again()


def test_states_of_a_forward() -> None:
    under_way, given_up = ForwardState.UNDER_WAY, ForwardState.GIVEN_UP
    events = {
        OneForward.taken: {under_way: ForwardState.TAKEN},
        OneForward.refused: {under_way: ForwardState.TAKEN},
        OneForward.failed: {under_way: ForwardState.FAILED},
        OneForward.given_up: {under_way: given_up, ForwardState.FAILED: given_up},
    }
    assert taken(events, OneForward) == ways(FORWARD_NEXT)


@pytest.mark.parametrize(
    ("state", "is_overdue", "is_late", "may_begin"),
    [
        (ForwardState.UNDER_WAY, False, True, False),
        (ForwardState.TAKEN, False, False, True),
        (ForwardState.FAILED, True, True, False),
        (ForwardState.GIVEN_UP, False, False, True),
    ],
    ids=lambda value: value.name if isinstance(value, ForwardState) else str(value),
)
def test_one_forward_at_a_time(
    state: ForwardState, is_overdue: bool, is_late: bool, may_begin: bool
) -> None:
    submissions = OneForward(state).submissions
    submissions.add(b"a third", 2 * LATE_MS, may_resend=True)
    assert submissions.is_overdue(NOW_MS, RESEND_MS) is is_overdue
    assert submissions.is_overdue(LATE_MS, RESEND_MS) is is_late
    began = submissions.begin_forward(1_000, LATE_MS)
    assert (began is not None) is may_begin
    if began is not None:
        expected = [3] if state is ForwardState.TAKEN else [1, 2, 3]
        assert [command.sequence for command in began.commands] == expected


def test_what_follows_a_refused_command_is_sent_again() -> None:
    one = OneForward(ForwardState.UNDER_WAY)
    one.refused()
    began = one.submissions.begin_forward(1_000, NOW_MS)
    assert began is not None
    assert [command.sequence for command in began.commands] == [2]


# ---- barriers ----


class OneRound:
    """Rounds whose current one is in a state."""

    def __init__(self, state: RoundState) -> None:
        self.rounds = BarrierRounds()
        self.promise = self.rounds.add(10 * LATE_MS)
        due = self.rounds.due()
        assert due is not None
        self.round = due
        if state is not RoundState.WAITING:
            self.asked()
        if state is RoundState.FAILED:
            self.failed()
        elif state is RoundState.ANSWERED:
            self.answered()
        assert self.state is state

    @property
    def state(self) -> RoundState:
        return self.round.state

    def asked(self) -> None:
        self.rounds.asked(self.round, NOW_MS)

    def failed(self) -> None:
        self.rounds.failed(self.round)

    def answered(self) -> None:
        self.rounds.answered(self.round, RaftIndex(7))

    def controller_changes(self) -> None:
        self.rounds.ask_again()

    def tick_soon(self) -> None:
        self.rounds.expire(NOW_MS, RESEND_MS)

    def tick_late(self) -> None:
        self.rounds.expire(LATE_MS, RESEND_MS)


def test_states_of_a_round() -> None:
    waiting, asked, failed, answered = RoundState
    events = {
        OneRound.asked: {waiting: asked},
        OneRound.failed: {waiting: waiting, asked: failed, failed: failed, answered: answered},
        OneRound.answered: {
            waiting: answered,
            asked: answered,
            failed: answered,
            answered: answered,
        },
        OneRound.controller_changes: {
            waiting: waiting,
            asked: waiting,
            failed: waiting,
            answered: answered,
        },
        OneRound.tick_soon: {
            waiting: waiting,
            asked: asked,
            failed: waiting,
            answered: answered,
        },
        OneRound.tick_late: {
            waiting: waiting,
            asked: waiting,
            failed: waiting,
            answered: answered,
        },
    }
    moved = {(before, after) for before, after in taken(events, OneRound) if before is not after}
    assert moved == ways(ROUND_NEXT)


@pytest.mark.parametrize("state", RoundState, ids=lambda state: state.name)
def test_a_round_is_kept_once_its_answer_is_applied(state: RoundState) -> None:
    one = OneRound(state)
    late = one.rounds.add(10 * LATE_MS)
    assert one.rounds.applied(RaftIndex(6)) == []
    kept = one.rounds.applied(RaftIndex(7))
    assert kept == ([one.promise] if state is RoundState.ANSWERED else [])
    assert late not in kept


# ---- the engine's own stages ----


def test_stages_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that comes in a callback, in a drain, and in a callback within a drain, is done."""
    cluster = MetadataCluster.formed()
    engine = cluster.nodes[1].engine
    stages: list[Stage] = [engine._stage]
    enter = RaftMetadataEngine._enter

    def entering(self: RaftMetadataEngine, stage: Stage) -> None:
        enter(self, stage)
        if self is engine:
            stages.append(stage)

    monkeypatch.setattr(RaftMetadataEngine, "_enter", entering)
    made: list[Promise[Any]] = []

    def propose(*_: object) -> None:
        if len(made) < 3:
            made.append(engine.propose(NoOperation()))

    engine.on_role(propose)  # called in a drain
    engine.on_image(propose)  # called in a report
    cluster.epoch += 1
    cluster.elect(1)
    cluster.turn()
    assert [promise.is_done and promise.error is None for promise in made] == [True] * 3
    found = set(pairwise(stages))
    assert found <= ways(STAGE_NEXT)
    assert found >= {
        (Stage.AT_REST, Stage.DRAINING),
        (Stage.DRAINING, Stage.DRAINING_AGAIN),
        (Stage.DRAINING_AGAIN, Stage.DRAINING),
        (Stage.DRAINING, Stage.AT_REST),
        (Stage.AT_REST, Stage.REPORTING),
        (Stage.REPORTING, Stage.AT_REST),
    }


def test_what_follows_from_a_batch_enters_the_log_with_it() -> None:
    cluster = MetadataCluster.formed()
    node, other = cluster.nodes[1], cluster.nodes[2]
    told: list[int] = []
    answers: list[Promise[Any]] = []

    def follow(image: MetadataImage) -> None:
        told.append(image.version)
        if len(told) == 1:
            answers.append(node.engine.propose(NoOperation()))

    for each in cluster.nodes.values():
        each.engine.on_batch(follow)
    before, version = node.replica.end, node.engine.image.version
    answers.append(other.engine.propose(NoOperation()))
    cluster.turn()
    assert told == [version + 1], "the controller alone is asked, and there was one batch"
    assert node.engine.image.version == version + 2
    assert node.replica.end == before + 2
    assert all(answer.is_done and answer.error is None for answer in answers)


@pytest.mark.parametrize(
    ("before", "after"),
    [way for way in product(Stage, Stage) if way not in ways(STAGE_NEXT)],
    ids=lambda stage: stage.name,
)
def test_the_engine_takes_no_other_way(before: Stage, after: Stage) -> None:
    engine = MetadataCluster.formed(voters=1).nodes[1].engine
    engine._stage = before
    with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
        engine._enter(after)


def test_a_drain_within_a_report_leaves_the_replica_alone() -> None:
    """The replica is at work then: its own state is between two others."""
    cluster = MetadataCluster.formed()
    node = cluster.nodes[1]
    ends: list[int] = []

    def drain(*_: object) -> None:
        node.engine.propose(NoOperation()) if not ends else None
        node.engine.drain()
        ends.append(node.replica.end)

    before = node.replica.end
    node.engine.on_image(drain)
    node.engine.propose(NoOperation())
    cluster.replicate()
    assert ends == [before + 1], "what the callback proposed is not appended within it"
    cluster.turn()
    assert node.replica.end > before + 1
