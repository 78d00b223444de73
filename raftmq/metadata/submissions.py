"""What waits in the metadata engine, each with its state: this node's own commands and the forward
that carries them, the controller's queue of commands, and rounds of read barriers.

Pure: clock, peers and replica are the engine's (`raft_engine.py`). It asks here what is to be sent,
and tells what came of it. The three tables say every way from one state to another.

Invariants: a node's commands are one stream, numbered; they are sent in order, and one forward at a
time is under way. A command is answered once: by the log, by a later command of this node, by a
refusal before it entered any log, or by its deadline. Callers of a barrier share the round that
begins after their call, never one that began before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final, TypeAlias

from attrs import define, field
from msgspec import Struct

from raftmq.errors import KafkaError, RequestTimedOutError
from raftmq.foreign import CLOCK_MS_MAX
from raftmq.metadata.apply import apply
from raftmq.metadata.apply_brokers import disk_error
from raftmq.metadata.authority import authority_error
from raftmq.metadata.commands import RegisterBroker, decode_envelope
from raftmq.metadata.engine import CommandNotAppliedError
from raftmq.metadata.features import Ranges, check_supported, write_error
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import Rejection, Result
from raftmq.promise import Promise
from raftmq.records import NewRecord
from raftmq.types import NodeId, Offset, RaftIndex

REFUSAL_LENGTH_MAX: Final = 300


# ---- own commands ----


class CommandState(IntEnum):
    """Where an own command without an answer is."""

    UNSENT = 0
    """In no log: it can still be refused for certain."""
    SENT = 1
    """It may be in a log; it is sent again under its number after a loss or to a new controller."""
    ABANDONED = 2
    """It may be in a log and is not sent again: a later command tells what became of it."""


COMMAND_NEXT: Final[Mapping[CommandState, frozenset[CommandState]]] = {
    CommandState.UNSENT: frozenset({CommandState.SENT}),
    CommandState.SENT: frozenset({CommandState.SENT, CommandState.ABANDONED}),
    CommandState.ABANDONED: frozenset(),
}


@define(eq=False)
class Submission:
    """One command of this node, encoded once.

    Attributes:
        may_resend: False where it makes sense from the present controller only.
    """

    sequence: int
    data: bytes
    promise: Promise[Any]
    deadline_ms: float
    may_resend: bool
    state: CommandState = CommandState.UNSENT

    def become(self, state: CommandState) -> None:
        """Go on to another state."""
        assert state in COMMAND_NEXT[self.state], f"a command: {self.state.name} to {state.name}"
        self.state = state


class ForwardState(IntEnum):
    """What is known of one forward of commands to the controller."""

    UNDER_WAY = 0
    TAKEN = 1
    """By the controller, all of it or the commands before the one that it refused."""
    FAILED = 2
    """It was not taken, or is lost: at the next tick all commands are sent again."""
    GIVEN_UP = 3
    """All commands are sent again: whatever is heard of it now says nothing."""


FORWARD_NEXT: Final[Mapping[ForwardState, frozenset[ForwardState]]] = {
    ForwardState.UNDER_WAY: frozenset(
        {ForwardState.TAKEN, ForwardState.FAILED, ForwardState.GIVEN_UP}
    ),
    ForwardState.TAKEN: frozenset(),
    ForwardState.FAILED: frozenset({ForwardState.GIVEN_UP}),
    ForwardState.GIVEN_UP: frozenset(),
}


@define(eq=False)
class Forward:
    """Commands on their way to the controller."""

    commands: list[Submission]
    began_ms: float
    state: ForwardState = ForwardState.UNDER_WAY

    def become(self, state: ForwardState) -> None:
        """Go on to another state."""
        assert state in FORWARD_NEXT[self.state], f"a forward: {self.state.name} to {state.name}"
        self.state = state


class Submissions:
    """This node's commands that have no answer yet, in the order of their sequences."""

    def __init__(self) -> None:
        self.commands: dict[int, Submission] = {}
        self.last_sequence = 0
        self._sent_sequence = 0  # commands up to here were sent since the last `send_all_again`
        self._forward: Forward | None = None
        self._answers: list[tuple[Promise[Any], Result]] = []  # given with the next image

    @property
    def has_unsent(self) -> bool:
        """True while a command's turn to be sent is still to come."""
        return self._sent_sequence < self.last_sequence and bool(self.commands)

    def add(self, data: bytes, deadline_ms: float, may_resend: bool) -> Promise[Any]:
        """Add a command, encoded with the sequence after the last one."""
        self.last_sequence += 1
        promise: Promise[Any] = Promise()
        self.commands[self.last_sequence] = Submission(
            self.last_sequence, data, promise, deadline_ms, may_resend
        )
        return promise

    def next_unsent(self, bytes_max: int) -> list[Submission]:
        """The next commands to send, in order, at least one; they count as sent now."""
        chosen: list[Submission] = []
        for sequence, command in self.commands.items():
            if sequence <= self._sent_sequence or command.state is CommandState.ABANDONED:
                continue
            bytes_max -= len(command.data)
            if chosen and bytes_max < 0:
                break
            chosen.append(command)
            command.become(CommandState.SENT)
            self._sent_sequence = sequence
        return chosen

    # ---- the forward ----

    def begin_forward(self, bytes_max: int, now_ms: float) -> Forward | None:
        """The next forward; None without commands to send, or while there is one already."""
        if self._forward is not None:
            return None
        commands = self.next_unsent(bytes_max)
        if not commands:
            return None
        self._forward = Forward(commands, now_ms)
        return self._forward

    def forward_taken(self, forward: Forward) -> None:
        """The controller took all of it."""
        forward.become(ForwardState.TAKEN)
        self._forward = None

    def forward_refused(self, forward: Forward, number: int, error: KafkaError) -> None:
        """The controller took the commands before that one, and none after it."""
        self.forward_taken(forward)
        refused = forward.commands[number]
        self._sent_sequence = refused.sequence
        if self.commands.get(refused.sequence) is refused:
            self.fail(refused, error)

    def is_overdue(self, now_ms: float, resend_ms: float) -> bool:
        """True when the forward failed, or was not answered within `resend_ms`."""
        forward = self._forward
        return forward is not None and (
            forward.state is ForwardState.FAILED or forward.began_ms <= now_ms - resend_ms
        )

    def send_all_again(self) -> None:
        """What was sent may be lost: send all of it again, in order."""
        if self._forward is not None:
            self._forward.become(ForwardState.GIVEN_UP)
            self._forward = None
        self._sent_sequence = 0

    def abandon_unrepeatable(self) -> bool:
        """Give up what made sense from the former controller only.

        What was sent may be in a log that wins all the same. A command of this node that follows
        it tells: once that is applied, the former ones were applied before, or never will be.

        Returns:
            True when such a command is wanted.
        """
        is_told_by_later = False
        for command in [c for c in self.commands.values() if not c.may_resend]:
            if command.state is CommandState.UNSENT:
                self.fail(command, CommandNotAppliedError("the controller changed meanwhile"))
            elif command.state is CommandState.SENT:
                command.become(CommandState.ABANDONED)
                is_told_by_later = True
        return is_told_by_later

    # ---- answers ----

    def fail(self, command: Submission, error: KafkaError) -> None:
        """Answer a command now, without the log."""
        del self.commands[command.sequence]
        command.promise.fail(error)

    def expire(self, now_ms: float) -> None:
        """Fail what waited too long."""
        for command in list(self.commands.values()):
            if command.deadline_ms <= now_ms:
                self.fail(command, RequestTimedOutError("the command's outcome is unknown"))

    def applied(self, sequence: int, result: Result) -> None:
        """The log has a command of this node: `settle` gives its result."""
        for overtaken in [s for s in self.commands if s < sequence]:
            # Sequences only rise at apply: those passed over can never be applied any more.
            error = CommandNotAppliedError("overtaken by a later command")
            self._answers.append((self.commands.pop(overtaken).promise, error))
        command = self.commands.pop(sequence, None)
        if command is not None:
            self._answers.append((command.promise, result))

    def restored(self, last_sequence: int) -> None:
        """A snapshot holds this node's commands up to there, but not their results."""
        for sequence in [s for s in self.commands if s <= last_sequence]:
            error = RequestTimedOutError("applied or not, before the snapshot that came")
            self._answers.append((self.commands.pop(sequence).promise, error))

    def incarnation_ended(self) -> None:
        """No command of this incarnation can be applied any more."""
        for command in self.commands.values():
            error = CommandNotAppliedError("of an incarnation that is over")
            self._answers.append((command.promise, error))
        self.commands.clear()

    def settle(self) -> None:
        """Answer what the log decided; once the image that shows it is published."""
        answers, self._answers = self._answers, []
        for promise, result in answers:
            if isinstance(result, Rejection):
                promise.fail(KafkaError(result.message, code=result.code))
            elif isinstance(result, KafkaError):
                promise.fail(result)
            else:
                promise.resolve(result)


# ---- the controller's queue ----

Unauthorized: TypeAlias = Callable[[NodeId, str, str], None]
"""on_unauthorized(sender, kind, why): a node sent a command that it may not send."""


class CommandQueue:
    """On the controller: commands that every node can apply, until they are in the log.

    One batch at a time is under way, so that what comes meanwhile shares the next one.
    """

    def __init__(self, on_unauthorized: Unauthorized) -> None:
        """`on_unauthorized` is told of each command that its sender may not send."""
        self._on_unauthorized = on_unauthorized
        self.commands: list[bytes] = []
        self.size_bytes = 0
        self._in_flight_end: Offset | None = None
        self.trial: MetadataImage | None = None
        """The image as the queue and the batch under way will leave it; None: as it is."""

    @property
    def is_in_flight(self) -> bool:
        """True while a batch is in the log that is not applied yet."""
        return self._in_flight_end is not None

    def take(
        self,
        command: bytes,
        submitter: NodeId,
        image: MetadataImage,
        supported: Ranges,
        *,
        is_own: bool,
    ) -> str:
        """Take a command of `submitter` if every node can apply it; else say why not.

        It forwards its own ones alone, to the controller itself: what says another node is a lie.
        Of another node than this one (`is_own` False) only what `authority.py` lets it send.

        It is tried on the newest image there will be when its turn has come. What raises there
        would end every node, at each of its starts, once it is in the log.
        """
        if self.trial is None or (self._in_flight_end is None and not self.commands):
            self.trial = image
        before = self.trial
        try:
            envelope = decode_envelope(command)
            if envelope.node_id != submitter:
                return f"node {submitter} speaks as {envelope.node_id}"
            if envelope.incarnation > incarnation_max(before, envelope.node_id):
                return f"no process of node {envelope.node_id} is so late: {envelope.incarnation}"
            if reason := _too_early(before, envelope.command):
                return reason
            if not is_own and (reason := authority_error(before, submitter, envelope.command)):
                self._on_unauthorized(submitter, type(envelope.command).__name__, reason)
                return reason
            trial, result = apply(before, envelope, Offset(before.version + 1))
            if trial.features is not before.features:
                check_supported(trial, supported)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not enter the log
            text = f"{type(error).__name__}: {error}"[:REFUSAL_LENGTH_MAX]
            return f"this command cannot be applied: {text}"
        # What raises the level is of the new level itself.
        if reason := write_error(type(envelope.command).__name__, envelope.version, trial):
            return result.message if isinstance(result, Rejection) else reason
        self.trial = trial
        self.commands.append(command)
        self.size_bytes += len(command)
        return ""

    def next_batch(self, bytes_max: int) -> list[NewRecord]:
        """The records of the next batch, at least one; none while one is under way."""
        records: list[NewRecord] = []
        if self._in_flight_end is not None:
            return records
        size = 0
        for command in self.commands:
            size += len(command)
            if records and size > bytes_max:
                break
            records.append(NewRecord(None, command))
        return records

    def appended(self, count: int, end: Offset) -> None:
        """The first `count` commands are in the log, below `end`."""
        self.size_bytes -= sum(map(len, self.commands[:count]))
        del self.commands[:count]
        self._in_flight_end = end

    def applied(self, end: Offset) -> None:
        """What is below `end` is applied."""
        if self._in_flight_end is not None and end >= self._in_flight_end:
            self._in_flight_end = None

    def clear(self) -> None:
        """Another controller, or term: the nodes that sent these commands send them again."""
        self.commands.clear()
        self.size_bytes = 0
        self._in_flight_end = None
        self.trial = None


def _too_early(image: MetadataImage, command: Struct) -> str:
    """Why a command must not enter the log yet, though every node could apply it."""
    if isinstance(command, RegisterBroker):
        return disk_error(image, command.node_id, command.storage)
    return ""


def incarnation_max(image: MetadataImage, node_id: NodeId) -> int:
    """The highest incarnation that is believed of a node's commands.

    A process takes what its clock says, or the one after the last that was applied. A command that
    claims the end of the range would leave no higher one: the node could submit nothing any more.
    """
    last, _ = image.submitters.get(node_id, (0, 0))
    return max(CLOCK_MS_MAX, last + 1)


# ---- barriers ----


class RoundState(IntEnum):
    """How far a round of read barriers is."""

    WAITING = 0
    """To be asked, as soon as the controller is known."""
    ASKED = 1
    FAILED = 2
    """The controller could not say: it is asked again at the next tick."""
    ANSWERED = 3
    """Kept once everything below its index is applied."""


ROUND_NEXT: Final[Mapping[RoundState, frozenset[RoundState]]] = {
    # An answer to an earlier asking will do: it came after the round's callers.
    RoundState.WAITING: frozenset({RoundState.ASKED, RoundState.ANSWERED}),
    RoundState.ASKED: frozenset({RoundState.WAITING, RoundState.FAILED, RoundState.ANSWERED}),
    RoundState.FAILED: frozenset({RoundState.WAITING, RoundState.ANSWERED}),
    RoundState.ANSWERED: frozenset(),
}


@define(eq=False)
class Round:
    """Callers of one round with their deadlines, and the answer to it."""

    promises: list[tuple[Promise[None], float]] = field(factory=list)
    state: RoundState = RoundState.WAITING
    asked_ms: float = 0.0
    index: RaftIndex = RaftIndex(0)

    def become(self, state: RoundState) -> None:
        """Go on to another state."""
        assert state in ROUND_NEXT[self.state], f"a round: {self.state.name} to {state.name}"
        self.state = state


class BarrierRounds:
    """The round under way, and the one whose callers came too late for it."""

    def __init__(self) -> None:
        self._current: Round | None = None
        self._next: Round | None = None

    @property
    def has_next(self) -> bool:
        """True while callers wait for a round that cannot begin yet."""
        return self._next is not None

    @property
    def is_due(self) -> bool:
        """True when `due` gives a round."""
        first = self._current or self._next
        return first is not None and first.state is RoundState.WAITING

    def add(self, deadline_ms: float) -> Promise[None]:
        """Wait for the next round."""
        promise: Promise[None] = Promise()
        if self._next is None:
            self._next = Round()
        self._next.promises.append((promise, deadline_ms))
        return promise

    def due(self) -> Round | None:
        """The round that should be asked now; `asked` says that it is."""
        if self._current is None:
            self._current, self._next = self._next, None
        current = self._current
        return current if current is not None and current.state is RoundState.WAITING else None

    def asked(self, due: Round, now_ms: float) -> None:
        """The question is on its way."""
        due.become(RoundState.ASKED)
        due.asked_ms = now_ms

    def failed(self, asked: Round) -> None:
        """An asking of this round came to nothing; another one may be on its way."""
        if asked is self._current and asked.state is RoundState.ASKED:
            asked.become(RoundState.FAILED)

    def answered(self, asked: Round, index: RaftIndex) -> bool:
        """What is below `index` was committed when the round was asked; False: it is over."""
        if asked is not self._current or asked.state is RoundState.ANSWERED:
            return False
        asked.become(RoundState.ANSWERED)
        asked.index = index
        return True

    def ask_again(self) -> None:
        """The controller changed: the question may be lost."""
        current = self._current
        if current is not None and current.state in (RoundState.ASKED, RoundState.FAILED):
            current.become(RoundState.WAITING)

    def applied(self, applied_end: RaftIndex) -> list[Promise[None]]:
        """The promises that are kept now that everything below `applied_end` is applied."""
        current = self._current
        if (
            current is None
            or current.state is not RoundState.ANSWERED
            or applied_end < current.index
        ):
            return []
        self._current = None
        return [promise for promise, _ in current.promises]

    def expire(self, now_ms: float, resend_ms: float) -> None:
        """Fail callers that waited too long; ask again what failed or has no answer."""
        for waiting in (self._current, self._next):
            if waiting is None:
                continue
            late = [promise for promise, deadline in waiting.promises if deadline <= now_ms]
            waiting.promises = [row for row in waiting.promises if row[1] > now_ms]
            for promise in late:
                promise.fail(RequestTimedOutError("no majority of the metadata group answered"))
        current = self._current
        if current is None:
            return
        if not current.promises:
            self._current = None
        elif current.state is RoundState.FAILED or (
            current.state is RoundState.ASKED and now_ms - current.asked_ms >= resend_ms
        ):
            current.become(RoundState.WAITING)
