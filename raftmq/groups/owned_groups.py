"""Groups that this node coordinates: how it claims, loads and stores them, and drops them.

Owns the table of loaded groups and the way to the metadata group. It claims a group with an applied
command before it is served, proposes what the state machine wants stored, and answers only what was
applied. After any doubt (a command failed, or its outcome is unknown) it forgets the group: the
next claim's epoch fences whatever is still on its way, and the group is loaded anew from the image.

Invariants: at most one coordinator's commands are accepted per group (the coordinator epoch, judged
at apply); without an applied barrier for half the shortest session it says NOT_COORDINATOR and lets
no session expire.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

import msgspec

from raftmq.errors import ErrorCode, KafkaError
from raftmq.groups.group import Group
from raftmq.groups.model import GroupConfig, Phase
from raftmq.groups.offsets import CommitQueue
from raftmq.metadata.commands import (
    UNDATED,
    ClaimGroup,
    Generation,
    GroupCommand,
    ReleaseGroup,
    ReplaceMember,
)
from raftmq.metadata.image import GroupsImage, candidate, holder
from raftmq.partition.parked import Deadline, Deadlines
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.types import NodeId, TopicId

T = TypeVar("T")

COMMAND_TIMEOUT_MS: Final = 10_000.0
BARRIER_INTERVAL_MS: Final = 1_000.0
COMMITS_IN_FLIGHT_MAX: Final = 2
TICKS_PER_ROUND: Final = 10
"""In so many ticks every group is visited once."""
TIMER_MS_MIN: Final = 10.0
"""After a timer of a group its next one is set no sooner than this."""
GIVE_EVERY_MS: Final = 500.0
GIVE_MAX: Final = 100
"""Claims that are handed over at a time, by a broker that is to coordinate nothing."""
_REBALANCE_PHASES: Final = (Phase.PREPARING, Phase.COMPLETING)
_REJECTIONS: Final = (
    ErrorCode.NOT_COORDINATOR,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.UNKNOWN_MEMBER_ID,
    ErrorCode.FENCED_INSTANCE_ID,
    ErrorCode.NON_EMPTY_GROUP,
    ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.INVALID_PRODUCER_ID_MAPPING,
    ErrorCode.INVALID_TXN_STATE,
    ErrorCode.CONCURRENT_TRANSACTIONS,
)
"""Codes with which a group's command is rejected at apply."""


class ClusterImage(Protocol):
    """The part of the metadata image that a coordinator reads."""

    @property
    def groups(self) -> GroupsImage:
        """All groups."""
        ...

    @property
    def level(self) -> int:
        """The level of what nodes store and say together."""
        ...

    def live_epoch(self, node_id: NodeId) -> int | None:
        """The broker epoch of a registered, unfenced broker."""
        ...

    def sources(self) -> Mapping[str, str]:
        """The names of views without offsets of their own, each with that of its topic."""
        ...

    def committed_id(self, name: str) -> TopicId | None:
        """The id of the topic, or of the view with offsets of its own, of that name."""
        ...

    def coordinators(self) -> Sequence[NodeId]:
        """The brokers that may coordinate groups."""
        ...


class CommandSink(Protocol):
    """The metadata engine, as far as groups need it."""

    @property
    def image(self) -> ClusterImage:
        """The newest applied state on this node."""
        ...

    def propose(self, command: Any, *, timeout_ms: float | None = None) -> Promise[Any]:
        """Get a command applied; kept once this node's image shows it. Failed: unknown."""
        ...

    def read_barrier(self, timeout_ms: float | None = None) -> Promise[None]:
        """Kept once this node has applied all that was committed before the call."""
        ...


class OwnedGroups:
    """See the module."""

    def __init__(
        self,
        node_id: NodeId,
        engine: CommandSink,
        clock: Clock,
        config: GroupConfig,
        deadlines: Deadlines | None,
        latest_now_ms: Callable[[], int | None],
    ) -> None:
        self.node_id = node_id
        self.config = config
        self._engine = engine
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._claims: dict[str, list[Callable[[ErrorCode], None]]] = {}
        self._confirmed_at_ms = -1e18
        self._was_confirmed = False
        self._barrier_asked_at_ms: float | None = None
        self._session_ms_min = self.config.session_timeout_ms_min
        self._is_draining = False
        self._given: dict[str, None] = {}  # claims that are on their way to other nodes
        self._give_at_ms = 0.0
        self._unvisited: list[str] = []  # groups that `tick` has still to visit in this round
        self._shortest_ms: int | None = None  # session of the groups visited in this round
        self._deadlines = deadlines
        self._timers: dict[str, Deadline] = {}  # by group, no later than it is due
        self.commits = CommitQueue(
            self._propose_timed,
            _error_of,
            clock=clock,
            later=None if deadlines is None else deadlines.after,
            linger_ms=config.commit_linger_ms,
            # With timers, one may be written while the one before it is being committed.
            in_flight_max=1 if deadlines is None else COMMITS_IN_FLIGHT_MAX,
        )
        self._latest_now_ms = latest_now_ms

    # ---- where a group lives ----

    def find(self, name: str) -> NodeId | None:
        """The node that coordinates the group, or should claim it; None without live brokers."""
        image = self._engine.image
        current = holder(image.groups.get(name), image.live_epoch)
        if current is not None:
            return current
        return candidate(name, image.coordinators())

    def _is_mine(self, name: str) -> bool:
        is_leaving = self._is_draining or name in self._given
        return not is_leaving and self.find(name) == self.node_id

    def _serve(
        self,
        name: str,
        act: Callable[[Group], Promise[T]],
        refuse: Callable[[ErrorCode], T],
        missing: ErrorCode | None,
    ) -> Promise[T]:
        """Run `act` on the group, claimed first if need be.

        `missing` answers for a group that does not exist; None makes one.
        """
        if len(name.encode()) > self.config.group_id_bytes_max:
            return Promise.resolved(refuse(ErrorCode.INVALID_GROUP_ID))
        group = self._current(name)
        if group is not None:
            if not self._is_confirmed():
                return Promise.resolved(refuse(ErrorCode.NOT_COORDINATOR))
            return act(group)
        if not self._is_mine(name):
            return Promise.resolved(refuse(ErrorCode.NOT_COORDINATOR))
        is_unknown = self._engine.image.groups.get(name) is None and name not in self._claims
        if missing is not None and is_unknown:
            return Promise.resolved(refuse(missing))
        promise: Promise[T] = Promise()

        def claimed(error: ErrorCode) -> None:
            loaded = self._groups.get(name)
            if loaded is None:
                promise.resolve(refuse(error or ErrorCode.NOT_COORDINATOR))
            else:
                act(loaded).when_done(partial(_forward, promise))

        waiting = self._claims.get(name)
        if waiting is not None:
            waiting.append(claimed)
        else:
            self._claims[name] = [claimed]
            self._claim(name)
        return promise

    def _current(self, name: str) -> Group | None:
        """The loaded group, unless the image shows that the claim is no longer ours."""
        group = self._groups.get(name)
        if group is None:
            return None
        state = self._engine.image.groups.get(name)
        if (
            state is None
            or state.coordinator != self.node_id
            or state.coordinator_epoch != group.coordinator_epoch
        ):
            self._drop(group, ErrorCode.NOT_COORDINATOR)
            return None
        return group

    def _claim(self, name: str) -> None:
        epoch = self._engine.image.live_epoch(self.node_id)
        if epoch is None:
            self._claim_ended(name, ErrorCode.NOT_COORDINATOR)
            return
        command = ClaimGroup(group=name, node_id=self.node_id, broker_epoch=epoch)
        proposed_at_ms = self._clock.monotonic_ms()

        def done(promise: Promise[Any]) -> None:
            error = _error_of(promise)
            if error is ErrorCode.NONE:
                error = self._load(name, promise.result().coordinator_epoch, proposed_at_ms)
            elif error is not ErrorCode.NOT_COORDINATOR:
                error = ErrorCode.COORDINATOR_NOT_AVAILABLE
            self._claim_ended(name, error)

        self._engine.propose(command, timeout_ms=COMMAND_TIMEOUT_MS).when_done(done)

    def _load(self, name: str, coordinator_epoch: int, proposed_at_ms: float) -> ErrorCode:
        state = self._engine.image.groups.get(name)
        if state is None or state.coordinator_epoch != coordinator_epoch or self._is_draining:
            return ErrorCode.NOT_COORDINATOR  # taken over between the claim and now
        assert name not in self._groups, "one claim at a time"
        assert state.coordinator == self.node_id, "the epoch is ours"
        self._confirm(proposed_at_ms)
        group = Group.load(state, self.config, self._clock.monotonic_ms())
        self._groups[name] = group
        self._note_session(group)
        self._set_timer(group)
        return ErrorCode.NONE

    def _claim_ended(self, name: str, error: ErrorCode) -> None:
        for waiting in self._claims.pop(name):
            waiting(error)

    def _drop(self, group: Group, error: ErrorCode) -> None:
        """Forget a group; the next request claims it anew or is sent elsewhere."""
        if self._groups.get(group.name) is group:
            del self._groups[group.name]
            self._cancel_timer(group.name)
        if group.phase is not Phase.DEAD:
            group.close(error)
        self._perform(group)

    # ---- doubt ----

    def unconfirmed_ms(self) -> float:
        """Age of the newest proof that this node's claims are valid; 0 while it has no groups.

        Above half the shortest session, members are answered NOT_COORDINATOR.
        """
        return self._confirmed_age_ms() if self._groups else 0.0

    def _confirmed_age_ms(self) -> float:
        return self._clock.monotonic_ms() - self._confirmed_at_ms

    def _is_confirmed(self) -> bool:
        return self._confirmed_age_ms() <= self._session_ms_min / 2

    def _confirm(self, as_of_ms: float) -> None:
        """All that was committed before `as_of_ms` is applied here: our claims were valid then."""
        self._confirmed_at_ms = max(self._confirmed_at_ms, as_of_ms)

    def _note_session(self, group: Group) -> None:
        shortest = group.session_timeout_ms_min
        if shortest is not None:
            self._session_ms_min = min(self._session_ms_min, shortest)

    def _ask_barrier(self, now_ms: float) -> None:
        interval_ms = min(BARRIER_INTERVAL_MS, self._session_ms_min / 8)
        if self._barrier_asked_at_ms is not None or now_ms - self._confirmed_at_ms < interval_ms:
            return
        self._barrier_asked_at_ms = now_ms

        def done(promise: Promise[None]) -> None:
            self._barrier_asked_at_ms = None
            if promise.error is None:
                self._confirm(now_ms)

        self._engine.read_barrier(timeout_ms=self._session_ms_min / 2).when_done(done)

    def _stamp_ms(self) -> int:
        """The time of an event, for expiry. UNDATED while this node has only its own clock: one
        that is behind would let offsets expire too early."""
        latest_ms = self._latest_now_ms()
        return UNDATED if latest_ms is None else latest_ms

    # ---- performing ----

    def _perform(self, group: Group) -> None:
        """Propose the state machine's commands and give its answers."""
        effects = group.take_effects()
        for command in effects.commands:
            self.commits.flush(group.name)  # made in the generation before
            if isinstance(command, Generation):
                command = msgspec.structs.replace(command, timestamp_ms=self._stamp_ms())
            self._propose(command).when_done(partial(self._stored, group, command))
        for promise, result in effects.answers:
            promise.resolve(result)
        self._set_timer(group)

    def _propose(self, command: GroupCommand) -> Promise[ErrorCode]:
        """Propose a command; kept with its outcome."""
        outcome: Promise[ErrorCode] = Promise()
        self._propose_timed(command).when_done(lambda done: outcome.resolve(_error_of(done)))
        return outcome

    def _propose_timed(self, command: GroupCommand) -> Promise[Any]:
        """Propose a command; once applied, it proves that our claims were valid before it."""
        proposed_at_ms = self._clock.monotonic_ms()
        promise = self._engine.propose(command, timeout_ms=COMMAND_TIMEOUT_MS)

        def done(_promise: Promise[Any]) -> None:
            if _error_of(promise) is ErrorCode.NONE:
                self._confirm(proposed_at_ms)

        promise.when_done(done)
        return promise

    def _stored(self, group: Group, command: GroupCommand, outcome: Promise[ErrorCode]) -> None:
        if self._groups.get(group.name) is not group:
            return
        error = outcome.result()
        if error is not ErrorCode.NONE:
            is_taken = error is ErrorCode.NOT_COORDINATOR
            self._drop(group, error if is_taken else ErrorCode.COORDINATOR_NOT_AVAILABLE)
            return
        now_ms = self._clock.monotonic_ms()
        if isinstance(command, Generation):
            group.generation_applied(command, now_ms)
        elif isinstance(command, ReplaceMember):
            group.member_replaced(command)
        self._perform(group)

    # ---- time ----

    def tick(self, now_ms: float) -> None:
        """Let time pass: sessions, rebalances, barriers, expiry. Call it every 50 ms or so.

        Groups in a rebalance are visited each time, the others in turns, all of them within
        `TICKS_PER_ROUND`: a thousand idle groups cost next to nothing. With deadlines a group is
        visited when it is due as well, so that a session's end shows at once.
        """
        if self._groups:
            self._ask_barrier(now_ms)
        is_confirmed = self._is_confirmed()
        if is_confirmed and not self._was_confirmed:
            self._extend_sessions(now_ms)
        self._was_confirmed = is_confirmed
        for name in self._due():
            group = self._current(name)
            if group is not None and is_confirmed:
                group.tick(now_ms)
                self._perform(group)
                sessions_ms = (self._shortest_ms, group.session_timeout_ms_min)
                self._shortest_ms = min((ms for ms in sessions_ms if ms is not None), default=None)

    def _due(self) -> list[str]:
        """The groups to visit now."""
        if not self._unvisited:
            self._unvisited = list(self._groups)
            self._session_ms_min = self._shortest_ms or self.config.session_timeout_ms_min
            self._shortest_ms = None
        count = -(-len(self._groups) // TICKS_PER_ROUND)
        chosen, self._unvisited = self._unvisited[:count], self._unvisited[count:]
        rebalancing = [
            name for name, group in self._groups.items() if group.phase in _REBALANCE_PHASES
        ]
        return list(dict.fromkeys([*chosen, *rebalancing]))

    def _set_timer(self, group: Group) -> None:
        """Set the group's timer to when it is due. A heartbeat that comes later makes the timer too
        early, never too late: it fires in vain then, once in a session."""
        if self._deadlines is None or self._groups.get(group.name) is not group:
            return
        due_ms = group.next_due_ms
        timer = self._timers.get(group.name)
        if due_ms is None:
            self._cancel_timer(group.name)
        elif timer is None or timer.at_ms > due_ms + TIMER_MS_MIN:
            self._cancel_timer(group.name)
            delay_ms = max(due_ms - self._clock.monotonic_ms(), TIMER_MS_MIN)
            timer = self._deadlines.after(delay_ms, partial(self._timer_fired, group.name))
            self._timers[group.name] = timer

    def _cancel_timer(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()

    def _timer_fired(self, name: str) -> None:
        del self._timers[name]
        group = self._current(name)
        # In doubt, and until sessions are extended after it, the group waits for a tick.
        if group is None or not (self._was_confirmed and self._is_confirmed()):
            return
        now_ms = self._clock.monotonic_ms()
        if (due_ms := group.next_due_ms) is not None and due_ms <= now_ms:
            group.tick(now_ms)
            self._perform(group)
        else:
            self._set_timer(group)

    def _extend_sessions(self, now_ms: float) -> None:
        """Members may have tried to reach us in vain: give each a full session from now on."""
        for group in self._groups.values():
            for member in group.members.values():
                member.deadline_ms = max(
                    member.deadline_ms, now_ms + member.request.session_timeout_ms
                )

    def drain(self) -> list[Promise[Any]]:
        """Release every claim, for a clean stop; kept once other nodes may claim."""
        self._is_draining = True
        self.commits.flush_all()
        for group in list(self._groups.values()):
            self._drop(group, ErrorCode.NOT_COORDINATOR)
        image = self._engine.image
        others = [node_id for node_id in image.coordinators() if node_id != self.node_id]
        return [self._release(name, others) for name in self._claimed()]

    def give_away(self, now_ms: float) -> None:
        """Hand claims over, a few at a time: this broker lives on, and is to coordinate nothing."""
        if now_ms < self._give_at_ms:
            return
        self._give_at_ms = now_ms + GIVE_EVERY_MS
        others = [n for n in self._engine.image.coordinators() if n != self.node_id]
        if not others:
            return
        for name in islice(self._claimed(), GIVE_MAX - len(self._given)):
            if name in self._given:
                continue
            self.commits.flush(name)
            if (group := self._groups.get(name)) is not None:
                self._drop(group, ErrorCode.NOT_COORDINATOR)
            self._given[name] = None
            # Whatever came of it: if the claim is still here, the next round gives it away.
            self._release(name, others).when_done(
                lambda _done, name=name: self._given.pop(name, None)  # type: ignore[misc]
            )

    def _claimed(self) -> Iterator[str]:
        """The groups that this node claims, as far as it knows."""
        groups = self._engine.image.groups
        return (n for n in groups.names() if groups.groups[n].coordinator == self.node_id)

    def _release(self, name: str, others: Sequence[NodeId]) -> Promise[Any]:
        successor = candidate(name, others)
        release = ReleaseGroup(
            group=name,
            coordinator_epoch=self._engine.image.groups.groups[name].coordinator_epoch,
            successor=NodeId(-1) if successor is None else successor,
        )
        return self._engine.propose(release, timeout_ms=COMMAND_TIMEOUT_MS)


def _error_of(promise: Promise[Any]) -> ErrorCode:
    """The outcome of a proposed command; not applied and unknown are treated alike."""
    error = promise.error
    if error is None:
        return ErrorCode.NONE
    if isinstance(error, KafkaError) and error.code in _REJECTIONS:
        return error.code
    return ErrorCode.COORDINATOR_NOT_AVAILABLE


def _forward(target: Promise[T], source: Promise[T]) -> None:
    target.resolve(source.result())
