"""The controller: what the leader of the metadata group does besides leading it.

Validates admin calls and turns them into commands, fences brokers it no longer hears and lets them
back, records which voters leaders report. Acts only while `engine.is_leader`, and only by commands
that name the state they were computed from or the broker epoch they are about: one that comes too
late is rejected at apply and computed anew. Admin calls are planned one at a time, in order.

Which brokers it hears is judged on its own monotonic clock, never by wall clocks (`Liveness`). A
new controller has heard no broker yet, so it gives every live one a full session before it fences
it. A broker whose connection ended is given less time: a process that died closes its sockets at
once, and one that lives is heard again as soon as it is connected anew.

An admin call is answered when every live broker has applied the change (they say so in their
heartbeats), or at its timeout.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from uuid import UUID

from attrs import define, field, frozen

from raftmq.controller.balancing import AskSizes, Balancing
from raftmq.controller.leaders import (
    Evacuation,
    LeaderBalance,
    LeaderRow,
    LeaderTable,
    plan_preference,
)
from raftmq.controller.mover import Mover
from raftmq.controller.moves import Figures, Survey, figures
from raftmq.controller.node_changes import Change, drain_steps, plan_change
from raftmq.controller.replacement import plan_replacement
from raftmq.controller.security import plan_rules, plan_users
from raftmq.controller.shrinking import plan_shrink
from raftmq.controller.topic_validation import (
    NO_ID,
    Settings,
    load_of,
    plan_configs,
    plan_move,
    plan_partitions,
    plan_topic,
    planned_load_of,
)
from raftmq.controller.view_validation import deletable, is_view, plan_view
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.apply_moves import is_news
from raftmq.metadata.broker_messages import (
    AdminRequest,
    AlterConfigsCall,
    AlterUsersCall,
    BalanceCall,
    BrokerHeartbeat,
    ChangeNodesCall,
    ConfigResource,
    CreateAclsCall,
    CreatePartitionsCall,
    CreateTopicsCall,
    DeleteAclsCall,
    DeleteTopicsCall,
    Outcome,
    Outcomes,
    PlanMovesCall,
    PreferLeaderCall,
    ReplaceNodeCall,
    Reply,
    ShrinkTopicCall,
    UpdateFeaturesCall,
)
from raftmq.metadata.commands import (
    AlterConfigs,
    AnyCommand,
    CreatePartitions,
    CreateTopics,
    DeleteTopics,
    FenceBroker,
    MembersReport,
    Origin,
    PlanMoves,
    PlannedMove,
    ReportVoters,
    TopicCreation,
    UnfenceBroker,
    ViewCreation,
    VotersReport,
)
from raftmq.metadata.config_keys import MOVES_MAX
from raftmq.metadata.configs import broker_value, effective_topic_configs
from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.features import SUPPORTED, Ranges, plan_features
from raftmq.metadata.image import LEVEL_OF_MOVES, MetadataImage, TopicImage, ViewImage
from raftmq.metadata.results import MoveOutcomes, TopicOutcomes
from raftmq.ports import Clock, Random
from raftmq.promise import Promise
from raftmq.types import NodeId, TopicId


@define(slots=True)
class Heard:
    """What the controller knows of one broker."""

    broker_epoch: int
    heard_ms: float
    applied_version: int = -1
    is_unfit: bool = False
    is_reading_delays: bool = False
    lost_ms: float | None = None
    """When its connection ended, unless it was heard since."""


class Liveness:
    """Sessions of brokers, kept by the controller alone."""

    def __init__(self, session_ms: float, lost_session_ms: float | None = None) -> None:
        """`lost_session_ms` is what is left of a session when the connection has ended."""
        self._session_ms = session_ms
        self._lost_session_ms = session_ms if lost_session_ms is None else lost_session_ms
        self._heard: dict[NodeId, Heard] = {}
        self.replicas_max: dict[NodeId, int] = {}
        """What brokers last said, also in an earlier term: it changes with their files alone."""

    def begin_term(self, live: Iterable[tuple[NodeId, int]], now_ms: float) -> None:
        """Begin with (node, broker epoch) of all live brokers, as if each had just been heard."""
        self._heard = {node_id: Heard(epoch, now_ms) for node_id, epoch in live}

    def heard(
        self,
        node_id: NodeId,
        broker_epoch: int,
        applied_version: int,
        now_ms: float,
        *,
        is_unfit: bool = False,
        is_reading_delays: bool = False,
        replicas_max: int = 0,
    ) -> None:
        """A heartbeat came."""
        if replicas_max:
            self.replicas_max[node_id] = replicas_max
        known = self._heard.get(node_id)
        if known is None or known.broker_epoch != broker_epoch:
            known = self._heard[node_id] = Heard(broker_epoch, now_ms)
        known.heard_ms = now_ms
        known.lost_ms = None
        known.is_unfit = is_unfit
        known.is_reading_delays = is_reading_delays
        known.applied_version = max(known.applied_version, applied_version)

    def lost(self, node_id: NodeId, now_ms: float) -> None:
        """The connection to a broker's node ended."""
        known = self._heard.get(node_id)
        if known is not None and known.lost_ms is None:
            known.lost_ms = now_ms

    def expired(self, live: Iterable[tuple[NodeId, int]], now_ms: float) -> list[NodeId]:
        """Of the live brokers, those silent for a whole session, or for some time since a loss."""
        late = []
        for node_id, epoch in live:
            known = self._heard.get(node_id)
            if known is None or known.broker_epoch != epoch:
                self._heard[node_id] = Heard(epoch, now_ms)
            elif now_ms - known.heard_ms >= self._session_ms or (
                known.lost_ms is not None and now_ms - known.lost_ms >= self._lost_session_ms
            ):
                late.append(node_id)
        return late

    def is_silent(self, node_id: NodeId, broker_epoch: int, now_ms: float) -> bool:
        """True once a broker, fenced or not, was not heard for a whole session in this term; its
        registration counts as heard from the first question on."""
        known = self._heard.get(node_id)
        if known is None or known.broker_epoch != broker_epoch:
            known = self._heard[node_id] = Heard(broker_epoch, now_ms)
        return now_ms - known.heard_ms >= self._session_ms

    def is_heard(self, node_id: NodeId, broker_epoch: int, now_ms: float) -> bool:
        """True for a broker, fenced or not, whose heartbeats come in this term: the last one less
        than a session ago, and its connection has not ended since."""
        known = self._heard.get(node_id)
        return (
            known is not None
            and known.broker_epoch == broker_epoch
            and known.lost_ms is None
            and now_ms - known.heard_ms < self._session_ms
        )

    def applied_version(self, node_id: NodeId, broker_epoch: int) -> int:
        """The newest version that this broker said it has applied, -1 when it said nothing."""
        known = self._heard.get(node_id)
        if known is None or known.broker_epoch != broker_epoch:
            return -1
        return known.applied_version

    def unfit(self) -> set[NodeId]:
        """The brokers whose last heartbeat said that they should not lead."""
        return {node_id for node_id, known in self._heard.items() if known.is_unfit}

    def reading_delays(self) -> set[NodeId]:
        """The brokers that have still to read what is pending in their delay partitions."""
        return {node_id for node_id, known in self._heard.items() if known.is_reading_delays}


def refused(name: str, error: KafkaError) -> Outcome:
    """The outcome of a topic that is refused."""
    return Outcome(name=name, code=error.code, message=error.message)


def refused_resource(resource: ConfigResource, error: KafkaError) -> Outcome:
    """The outcome of a resource whose change is refused."""
    return Outcome(
        name=resource.resource_name,
        resource_type=resource.resource_type,
        code=error.code,
        message=error.message,
    )


def unnamed(row: Outcome) -> Outcome:
    """A validated topic has no id: it was not created."""
    return Outcome(
        name=row.name,
        code=row.code,
        message=row.message,
        topic_id=NO_ID,
        partitions=row.partitions,
        replication_factor=row.replication_factor,
    )


def merged(rows: Sequence[Outcome], result: TopicOutcomes) -> Outcomes:
    """What was planned, with what became of it at apply."""
    by_id = {outcome.topic_id: outcome for outcome in result.topics}
    rows_now = []
    for row in rows:
        applied = None if row.topic_id is None else by_id.get(row.topic_id)
        if row.code is ErrorCode.NONE and applied is not None and applied.code is not row.code:
            row = Outcome(name=row.name, code=applied.code, message=applied.message)
        rows_now.append(row)
    return tuple(rows_now)


def _created(name: str, topic_id: TopicId, partitions: int, factor: int) -> Outcome:
    """The outcome of a topic or view that is about to be there."""
    return Outcome(name=name, topic_id=topic_id, partitions=partitions, replication_factor=factor)


def settled(outcome: Outcome, is_known: bool, is_led: bool) -> Outcome:
    """An outcome, after the wait for live brokers to know of it and for leaders."""
    if outcome.code is not ErrorCode.NONE:
        return outcome
    if not is_known:
        return Outcome(
            name=outcome.name,
            resource_type=outcome.resource_type,
            code=ErrorCode.REQUEST_TIMED_OUT,
            message="done, but not every live broker has applied it yet",
            topic_id=outcome.topic_id,
        )
    return Outcome(
        name=outcome.name,
        message=outcome.message,
        resource_type=outcome.resource_type,
        topic_id=outcome.topic_id,
        partitions=outcome.partitions,
        replication_factor=outcome.replication_factor,
        is_led=is_led,
        rules=outcome.rules,
    )


CALLS_MAX: Final = 1_000
TOPICS_PER_CALL_MAX: Final = 1_000
PARTITIONS_PER_CALL_MAX: Final = 10_000
REPORTS_TURN: Final = 1_000
"""Partitions whose voters one tick looks at."""
_NOTHING_DONE: Final = (ErrorCode.NOT_CONTROLLER, ErrorCode.INVALID_UPDATE_VERSION)


@frozen(slots=True)
class ControllerConfig:
    """Times of the controller.

    Attributes:
        session_ms: a broker silent for so long is fenced.
        lost_session_ms: the same for one whose connection has ended meanwhile.
        balance_ms: how often preferred leaders are given their partitions back.
        create_wait_ms: how long creating waits for leaders beyond the brokers' knowing.
        static: Kafka settings of this node's file.
        voters_count: voters of the metadata group, where it is no Raft group.
        moves_max: partitions that change their replicas at a time.
        replicas_max: partition replicas of one broker that does not say its own.
        supported: levels of features, of this version.
    """

    session_ms: float = 2_000
    lost_session_ms: float = 2_000
    create_wait_ms: float = 1_000
    balance_ms: float = 1_000
    static: Mapping[str, str] = field(factory=dict)
    voters_count: int = 1
    moves_max: int = 4
    replicas_max: int = 20_000
    supported: Ranges = field(factory=lambda: SUPPORTED)


@define(eq=False)
class _Call:
    request: AdminRequest
    promise: Promise[Outcomes]
    deadline_ms: float


@define(eq=False)
class _Wait:
    """An answer held back until live brokers know `version` and the topics have leaders."""

    version: int
    topic_ids: tuple[TopicId, ...]
    deadline_ms: float
    leaders_deadline_ms: float
    done: Callable[[bool, bool], None]  # (known everywhere, all led)


Plan = tuple[AnyCommand | None, Callable[[Any], Outcomes]]


class Controller:
    """Runs on every node, acts on one."""

    def __init__(
        self,
        node_id: NodeId,
        engine: MetadataEngine,
        leaders: LeaderTable,
        *,
        clock: Clock,
        random: Random,
        config: ControllerConfig,
        move_leadership: Callable[[TopicId, int, NodeId], object],
        ask_sizes: AskSizes,
    ) -> None:
        """`move_leadership` asks the leader of a partition to hand over to a node, `ask_sizes` a
        broker for the sizes of what it leads."""
        self._move_leadership = move_leadership
        self._balancing = Balancing(engine, leaders, ask_sizes, clock)
        self._balance = LeaderBalance()
        self._evacuation = Evacuation()
        self._balance_due_ms = 0.0
        self._node_id = node_id
        self._engine = engine
        self._leaders = leaders
        self._clock = clock
        self._random = random
        self.config = config
        self._liveness = Liveness(self.config.session_ms, self.config.lost_session_ms)
        self._settings = Settings(
            node_id,
            self.config.static,
            self._voters_count,
            self.config.replicas_max,
            self._liveness.replicas_max,
        )
        self._epoch = -1  # of this node's term as controller; -1: it is none
        self._calls: deque[_Call] = deque()
        self._is_planning = False
        self._waits: list[_Wait] = []
        self._changing: dict[NodeId, bool] = {}  # fence and unfence commands under way
        self._unreported: dict[tuple[TopicId, int], None] = {}  # their rows may be news
        self._is_reporting = False
        self.mover = self._new_mover()
        leaders.on_change(self._leader_changed)
        engine.on_image(self._image_changed)

    @property
    def is_active(self) -> bool:
        """True while this node is the controller."""
        return self._engine.is_leader

    def move_figures(self) -> dict[Origin, Figures]:
        """How many moves of replicas there are, as long as this node is the controller."""
        return self.mover.figures() if self.is_active else figures(Survey(), self._leaders)

    # ---- driven by the node ----

    def tick(self) -> None:
        """Begin or end a term, fence brokers that are silent, answer calls that waited too long."""
        now_ms = self._clock.monotonic_ms()
        if not self._check_term(now_ms):
            return
        live = self._live_epochs()
        for node_id in self._liveness.expired(live, now_ms):
            self._set_fenced(node_id, is_fenced=True)
        self._check_waits()
        self._report_voters()
        self._plan_next()
        self.mover.tick(now_ms)
        self._balancing.tick(now_ms, self.mover.bounds)
        self._balance_leaders(now_ms)

    def peer_lost(self, node_id: NodeId) -> None:
        """The connection to a node ended: unless it is heard again soon, it is gone."""
        self._liveness.lost(node_id, self._clock.monotonic_ms())

    def heartbeat(self, beat: BrokerHeartbeat) -> Reply:
        """A broker says that it is alive."""
        now_ms = self._clock.monotonic_ms()
        if not self._check_term(now_ms):
            return self._not_controller()
        image = self._engine.image
        broker = image.brokers.get(beat.node_id)
        if broker is None or broker.epoch != beat.broker_epoch:
            return Reply(ErrorCode.STALE_BROKER_EPOCH, self._node_id)
        self._liveness.heard(
            beat.node_id,
            beat.broker_epoch,
            beat.applied_version,
            now_ms,
            is_unfit=beat.is_unfit,
            is_reading_delays=beat.is_reading_delays,
            replicas_max=beat.replicas_max,
        )
        if beat.is_draining:
            if not broker.is_fenced:
                self._set_fenced(beat.node_id, is_fenced=True)
        elif broker.is_fenced and beat.applied_version >= broker.epoch:
            self._set_fenced(beat.node_id, is_fenced=False)
        self._check_waits()
        return Reply(ErrorCode.NONE, self._node_id, is_fenced=broker.is_fenced)

    def call(self, request: AdminRequest) -> Promise[Outcomes]:
        """Decide an admin call. The promise fails with NOT_CONTROLLER when nothing was done here,
        with REQUEST_TIMED_OUT when the outcome is unknown."""
        promise: Promise[Outcomes] = Promise()
        now_ms = self._clock.monotonic_ms()
        if not self._check_term(now_ms):
            promise.fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))
            return promise
        if len(self._calls) >= CALLS_MAX:
            promise.fail(KafkaError(code=ErrorCode.THROTTLING_QUOTA_EXCEEDED))
            return promise
        if isinstance(request, BalanceCall):
            return self._balancing.begin(request)
        if isinstance(request, ChangeNodesCall) and request.change == Change.ADD:
            changed = self._queue(request, now_ms)
            return self._balancing.with_share(request, changed)
        return self._queue(request, now_ms)

    def _queue(self, request: AdminRequest, now_ms: float) -> Promise[Outcomes]:
        promise: Promise[Outcomes] = Promise()
        deadline_ms = now_ms + max(1, request.timeout_ms)
        self._calls.append(_Call(request, promise, deadline_ms))
        self._plan_next()
        return promise

    # ---- terms ----

    def _check_term(self, now_ms: float) -> bool:
        epoch = self._engine.controller_epoch if self._engine.is_leader else -1
        if epoch == self._epoch:
            return epoch >= 0
        self._epoch = epoch
        self._changing.clear()
        self._unreported.clear()
        self._is_reporting = False
        self._balancing.end_term()
        calls, self._calls = self._calls, deque()
        if self._is_planning:
            calls.popleft()  # its command is under way and settles it
        self._is_planning = False
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.done(True, True)  # the change is applied; only the other brokers were waited for
        for call in calls:
            if not call.promise.is_done:
                call.promise.fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))
        if epoch < 0:
            return False
        self._liveness.begin_term(self._live_epochs(), now_ms)
        self._balancing.begin_term(now_ms)
        self._balance = LeaderBalance()
        self._evacuation = Evacuation()
        self.mover = self._new_mover()
        for row in self._leaders.rows():
            self._leader_changed(row, False)
        return True

    def _voters_count(self) -> int:
        configuration = self._engine.configuration
        return self.config.voters_count if configuration is None else len(configuration.voters)

    def _new_mover(self) -> Mover:
        static = {MOVES_MAX: str(self.config.moves_max), **self.config.static}
        return Mover(
            self._node_id,
            self._engine,
            self._leaders,
            static,
            self._settings.limit_of,
            self._liveness.is_silent,
        )

    def _live_epochs(self) -> list[tuple[NodeId, int]]:
        return [(b.node_id, b.epoch) for b in self._engine.image.live_brokers()]

    def _not_controller(self) -> Reply:
        controller = self._engine.controller_id
        return Reply(ErrorCode.NOT_CONTROLLER, NodeId(-1) if controller is None else controller)

    # ---- brokers ----

    def _set_fenced(self, node_id: NodeId, *, is_fenced: bool) -> None:
        if self._changing.get(node_id) is not None:
            return
        self._changing[node_id] = is_fenced
        epoch = self._engine.image.brokers[node_id].epoch
        command = (FenceBroker if is_fenced else UnfenceBroker)(node_id=node_id, broker_epoch=epoch)
        term = self._epoch

        def done(_promise: Promise[Any]) -> None:
            # Whatever came of it: the next tick or heartbeat looks at the state again.
            if term == self._epoch:
                self._changing.pop(node_id, None)

        self._engine.propose(command, may_resend=False).when_done(done)

    def _leader_changed(self, row: LeaderRow, _is_own: bool) -> None:
        if self._epoch >= 0:
            self._unreported[row.key] = None
        if self._waits:
            self._check_waits()

    def _news_of(self, key: tuple[TopicId, int]) -> MembersReport | None:
        """What the newest row of a partition says of its members, if the image does not."""
        image = self._engine.image
        known = image.partition_by_id(*key)
        if known is None:
            return None
        row = self._leaders.of(key[0], known)
        if row is None or not row.is_firsthand:
            return None  # data is ordered away by it: only the leader's own word will do
        voters = tuple(sorted(row.voters))
        if not voters or row.leader_epoch < known.voters_epoch:
            return None
        if image.level >= LEVEL_OF_MOVES:
            report = MembersReport(
                row.topic_id,
                row.partition,
                row.creation_epoch,
                row.leader_epoch,
                voters,
                tuple(sorted(row.members)),
                row.seen_version,
            )
            return report if is_news(image, report) else None
        if known.voters == voters:
            return None
        return MembersReport(
            row.topic_id, row.partition, known.creation_epoch, row.leader_epoch, voters, voters, -1
        )

    def _report_voters(self) -> None:
        if self._is_reporting or not self._unreported:
            return
        keys = list(islice(self._unreported, REPORTS_TURN))
        for key in keys:
            del self._unreported[key]
        reports = tuple(report for key in keys if (report := self._news_of(key)) is not None)
        if not reports:
            return
        self._is_reporting = True
        term = self._epoch

        def done(_promise: Promise[Any]) -> None:
            # Whatever came of it: a row that came meanwhile may say what the image said before.
            if term == self._epoch:
                self._is_reporting = False
                self._unreported |= {(r.topic_id, r.partition): None for r in reports}

        if self._engine.image.level >= LEVEL_OF_MOVES:
            command = ReportVoters(reports=(), members=reports)
        else:
            older = (
                VotersReport(r.topic_id, r.partition, r.leader_epoch, r.voters) for r in reports
            )
            command = ReportVoters(reports=tuple(older))
        self._engine.propose(command, may_resend=False).when_done(done)

    def _balance_leaders(self, now_ms: float) -> None:
        if now_ms < self._balance_due_ms:
            return
        self._balance_due_ms = now_ms + self.config.balance_ms
        image = self._engine.image
        unfit = self._liveness.unfit() | set(image.shunned())
        moves = self._evacuation.due(image, self._leaders, now_ms, unfit=unfit)
        enabled = broker_value(
            image, self._node_id, self.config.static, "auto.leader.rebalance.enable"
        )
        if enabled is not None and enabled.lower() == "true":
            reading = self._liveness.reading_delays()
            moves += self._balance.due(
                image, self._leaders, now_ms, unfit=unfit, reading_delays=reading
            )
        for move in moves:
            self._move_leadership(move.topic_id, move.partition, move.to)

    # ---- waiting ----

    def _wait(
        self,
        version: int,
        topic_ids: tuple[TopicId, ...],
        deadline_ms: float,
        done: Callable[[bool, bool], None],
    ) -> None:
        leaders_ms = min(deadline_ms, self._clock.monotonic_ms() + self.config.create_wait_ms)
        self._waits.append(_Wait(version, topic_ids, deadline_ms, leaders_ms, done))
        self._check_waits()

    def _image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        if before.structure_version == after.structure_version:
            return
        if self._epoch >= 0 and before.topics is not after.topics:
            self._look_at_targets(before, after)
        if self._waits:
            self._check_waits()

    def _look_at_targets(self, before: MetadataImage, after: MetadataImage) -> None:
        """What leaders say of their members may be news for another target."""
        for name, topic in after.topics.items():
            known = before.topics.get(name)
            if known is topic or known is None:
                continue
            for new in topic.held:
                old = known.partition(new.index)
                if old is not None and old.target_version != new.target_version:
                    self._unreported[topic.topic_id, new.index] = None

    def _check_waits(self) -> None:
        if not self._waits:
            return
        now_ms = self._clock.monotonic_ms()
        known_version = min(
            (self._liveness.applied_version(*row) for row in self._live_epochs()), default=-1
        )
        waits, self._waits = self._waits, []
        for wait in waits:
            is_known = known_version >= wait.version
            is_led = all(self._is_led(topic_id) for topic_id in wait.topic_ids)
            if is_known and (is_led or now_ms >= wait.leaders_deadline_ms):
                wait.done(True, is_led)
            elif now_ms >= wait.deadline_ms:
                wait.done(is_known, is_led)
            else:
                self._waits.append(wait)

    def _is_led(self, topic_id: TopicId) -> bool:
        topic = self._engine.image.topic_by_id(topic_id)
        if topic is None:
            return True  # deleted meanwhile: nothing to wait for
        return all(
            self._leaders.of(topic_id, partition) is not None for partition in topic.partitions
        )

    # ---- admin calls ----

    def _plan_next(self) -> None:
        while self._calls and not self._is_planning:
            call = self._calls[0]
            image = self._engine.image
            command, outcomes_of = self._plan(image, call.request)
            if command is None:
                self._calls.popleft()
                call.promise.resolve(outcomes_of(None))
            else:
                self._submit(call, image.version, command, outcomes_of)

    def _submit(
        self,
        call: _Call,
        version: int,
        command: AnyCommand,
        outcomes_of: Callable[[Any], Outcomes],
    ) -> None:
        self._is_planning = True
        term = self._epoch
        left_ms = max(1.0, call.deadline_ms - self._clock.monotonic_ms())

        def done(promise: Promise[Any]) -> None:
            error = promise.error
            if term != self._epoch:
                _settle_after_term(call, error, lambda: outcomes_of(promise.result()))
                return
            self._is_planning = False
            if isinstance(error, KafkaError) and error.code is ErrorCode.INVALID_UPDATE_VERSION:
                # Many reports may stand between plan and apply, as after a restart: the state
                # moved on, judge by the newer one for as long as the client waits.
                if self._clock.monotonic_ms() < call.deadline_ms:
                    self._plan_next()
                    return
                error = KafkaError("the state kept changing", code=ErrorCode.REQUEST_TIMED_OUT)
            self._calls.popleft()
            if error is not None:
                call.promise.fail(error)
            else:
                self._answer(call, outcomes_of(promise.result()))
            self._plan_next()

        # Each planned move is judged by itself when it is applied: reports of leaders, of which
        # there are many while partitions move, do not hold up the next ones.
        is_free = isinstance(command, PlanMoves)
        self._engine.propose(
            command,
            expected_version=-1 if is_free else version,
            timeout_ms=left_ms,
            may_resend=False,
        ).when_done(done)

    def _answer(self, call: _Call, outcomes: Outcomes) -> None:
        if isinstance(call.request, PreferLeaderCall):
            call.promise.resolve(outcomes)  # nobody relies on other brokers knowing of it
            return
        created: tuple[TopicId, ...] = ()
        if isinstance(call.request, CreateTopicsCall | CreatePartitionsCall):
            created = tuple(
                o.topic_id for o in outcomes if o.code is ErrorCode.NONE and o.topic_id is not None
            )

        def done(is_known: bool, is_led: bool) -> None:
            if not call.promise.is_done:
                call.promise.resolve(
                    tuple(settled(outcome, is_known, is_led) for outcome in outcomes)
                )

        self._wait(self._engine.image.structure_version, created, call.deadline_ms, done)

    def _plan(self, image: MetadataImage, request: AdminRequest) -> Plan:
        if isinstance(request, CreateTopicsCall):
            return self._plan_topics(image, request)
        if isinstance(request, DeleteTopicsCall):
            return self._plan_deletion(image, request)
        if isinstance(request, CreatePartitionsCall):
            return self._plan_partitions(image, request)
        if isinstance(request, UpdateFeaturesCall):
            update, rows = plan_features(image, self.config.supported, request)
            return update, lambda _result: rows
        if isinstance(request, ChangeNodesCall):
            engine = self._engine
            known = engine.configuration, engine.first_voters
            change, rows = plan_change(
                image, *known, request, self._moves_of, self._is_heard, self._node_id
            )
            return change, lambda _result: rows
        if isinstance(request, ReplaceNodeCall):
            engine = self._engine
            known = engine.configuration, engine.first_voters
            command, outcomes = plan_replacement(
                image, *known, request, self._settings.limit_of, self._is_heard, self._node_id
            )
            return command, lambda _result: outcomes
        if isinstance(request, PlanMovesCall):
            return self._plan_moves(image, request)
        if isinstance(request, CreateAclsCall | DeleteAclsCall):
            return plan_rules(image, request)
        if isinstance(request, AlterUsersCall):
            users, rows = plan_users(image, request)
            return users, lambda _result: rows
        if isinstance(request, ShrinkTopicCall):
            configs = effective_topic_configs(
                image, request.name, self._node_id, self.config.static
            )
            new_ids = self._topic_id(image), self._topic_id(image)
            shrink, rows = plan_shrink(image, request, new_ids, configs)
            return shrink, lambda _result: rows
        if isinstance(request, PreferLeaderCall):
            order, rows = plan_preference(image, self._leaders, request)
            return order, lambda _result: rows
        assert not isinstance(request, BalanceCall), "it is planned in turns"
        return self._plan_configs(image, request)

    def _is_heard(self, node_id: NodeId, broker_epoch: int) -> bool:
        return self._liveness.is_heard(node_id, broker_epoch, self._clock.monotonic_ms())

    def _moves_of(self, image: MetadataImage, node_ids: Sequence[NodeId]) -> list[str]:
        """Which replicas the state `image` moves off these nodes."""
        return drain_steps(image, self._leaders, self.mover.bounds, node_ids)

    def _plan_topics(self, image: MetadataImage, request: CreateTopicsCall) -> Plan:
        views = (name for name, view in image.views.items() if view.condition)
        taken = {name.replace(".", "_"): name for name in sorted([*image.topics, *views])}
        load = load_of(image)
        count = 0
        creations: list[TopicCreation] = []
        made: list[ViewCreation] = []
        rows: list[Outcome] = []
        for new in request.topics[:TOPICS_PER_CALL_MAX]:
            existing = image.topics.get(new.name)
            if request.is_auto and existing is not None:
                rows.append(Outcome(name=new.name, topic_id=existing.topic_id))
                continue
            try:
                if is_view(new):
                    topic_id = self._topic_id(image)
                    view, base = plan_view(image, taken, new, topic_id, self._settings, made)
                    taken[new.name.replace(".", "_")] = new.name
                    made.append(view)
                    rows.append(_created(new.name, topic_id, base.width, base.replication_factor))
                    continue
                # Before it is placed, which costs as much as it has partitions.
                wide = max(1, new.partitions)
                if count + wide > PARTITIONS_PER_CALL_MAX >= wide:
                    raise KafkaError(
                        "Excessively large number of partitions per request.",
                        code=ErrorCode.POLICY_VIOLATION,
                    )
                creation = plan_topic(
                    image, taken, load, new, self._topic_id(image), self._settings
                )
                if count + len(creation.replicas) > PARTITIONS_PER_CALL_MAX:
                    raise KafkaError(
                        "Excessively large number of partitions per request.",
                        code=ErrorCode.POLICY_VIOLATION,
                    )
            except KafkaError as error:
                rows.append(refused(new.name, error))
                continue
            taken[new.name.replace(".", "_")] = new.name
            load.add(creation.replicas)
            count += len(creation.replicas)
            creations.append(creation)
            placed = creation.replicas
            rows.append(_created(new.name, creation.topic_id, len(placed), len(placed[0])))
        rows += [
            Outcome(name=new.name, code=ErrorCode.POLICY_VIOLATION, message="too many topics")
            for new in request.topics[TOPICS_PER_CALL_MAX:]
        ]
        if request.validate_only or not (creations or made):
            kept = rows
            if request.validate_only:
                kept = [unnamed(row) for row in rows]
            return None, lambda _result: tuple(kept)
        command = CreateTopics(topics=tuple(creations), views=tuple(made))
        return command, lambda result: merged(rows, result)

    def _plan_deletion(self, image: MetadataImage, request: DeleteTopicsCall) -> Plan:
        enabled = broker_value(image, self._node_id, self.config.static, "delete.topic.enable")
        is_enabled = str(enabled).lower() == "true"
        rows: list[Outcome] = []
        topic_ids: list[TopicId] = []
        views: list[TopicId] = []
        named: list[tuple[str, TopicId, TopicImage | ViewImage | None]] = []
        for name in request.names:
            named.append((name, NO_ID, image.topics.get(name) or image.views.get(name)))
        for topic_id in map(TopicId, request.topic_ids):
            known = image.topic_by_id(topic_id) or image.view_by_id(topic_id)
            named.append(("", topic_id, known))
        for name, topic_id, topic in named:
            if topic is not None and not is_enabled:
                code = ErrorCode.TOPIC_DELETION_DISABLED
                rows.append(Outcome(name=topic.name, code=code, topic_id=topic.topic_id))
            elif isinstance(topic, ViewImage):
                try:
                    views.append(deletable(image, topic))
                except KafkaError as error:
                    rows.append(refused(topic.name, error))
                    continue
                rows.append(Outcome(name=topic.name, topic_id=topic.topic_id))
            elif topic is not None:
                rows.append(Outcome(name=topic.name, topic_id=topic.topic_id))
                topic_ids.append(topic.topic_id)
            elif name:
                rows.append(Outcome(name=name, code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
            else:
                unknown = ErrorCode.UNKNOWN_TOPIC_ID
                rows.append(Outcome(name="", code=unknown, topic_id=topic_id))
        if not (topic_ids or views):
            return None, lambda _result: tuple(rows)
        command = DeleteTopics(
            topic_ids=tuple(dict.fromkeys(topic_ids)), views=tuple(dict.fromkeys(views))
        )
        return command, lambda result: merged(rows, result)

    def _plan_partitions(self, image: MetadataImage, request: CreatePartitionsCall) -> Plan:
        additions = []
        rows = []
        load = load_of(image)
        for new in request.topics:
            try:
                addition = plan_partitions(image, load, new, self._settings)
            except KafkaError as error:
                rows.append(refused(new.name, error))
                continue
            load.add(addition.replicas)
            additions.append(addition)
            rows.append(Outcome(name=new.name, topic_id=addition.topic_id, partitions=new.count))
        if request.validate_only or not additions:
            return None, lambda _result: tuple(rows)
        command = CreatePartitions(additions=tuple(additions))
        return command, lambda result: merged(rows, result)

    def _plan_moves(self, image: MetadataImage, request: PlanMovesCall) -> Plan:
        load = planned_load_of(image)
        rows: list[Outcome] = []
        moves: dict[int, PlannedMove] = {}
        for at, wanted in enumerate(request.moves):
            try:
                move = plan_move(
                    image,
                    load,
                    wanted,
                    self._settings,
                    allow_factor_change=request.allow_factor_change,
                )
            except KafkaError as error:
                rows.append(refused(wanted.topic, error))
                continue
            rows.append(Outcome(name=wanted.topic))
            if move is not None:
                moves[at] = move
        if request.dry_run or not moves:
            return None, lambda _result: tuple(rows)

        def outcomes_of(result: MoveOutcomes) -> Outcomes:
            for at, outcome in zip(moves, result.moves, strict=True):
                if outcome.code is not ErrorCode.NONE:
                    rows[at] = Outcome(
                        name=rows[at].name, code=outcome.code, message=outcome.message
                    )
            return tuple(rows)

        return PlanMoves(moves=tuple(moves.values())), outcomes_of

    def _plan_configs(self, image: MetadataImage, request: AlterConfigsCall) -> Plan:
        changes = []
        rows = []
        for resource in request.resources:
            try:
                change = plan_configs(image, resource, self._settings)
            except KafkaError as error:
                rows.append(refused_resource(resource, error))
                continue
            rows.append(Outcome(name=resource.resource_name, resource_type=resource.resource_type))
            if change.set or change.delete:
                changes.append(change)
        if request.validate_only or not changes:
            return None, lambda _result: tuple(rows)
        return AlterConfigs(changes=tuple(changes)), lambda _result: tuple(rows)

    def _topic_id(self, image: MetadataImage) -> TopicId:
        """A random id, in RFC 4122's form of version 4 as Kafka's are; neither zero nor in use."""
        while True:
            topic_id = TopicId(UUID(int=self._random.getrandbits(128), version=4))
            if topic_id not in image.topic_names and image.view_by_id(topic_id) is None:
                return topic_id


def _settle_after_term(
    call: _Call, error: Exception | None, outcomes: Callable[[], Outcomes]
) -> None:
    """Answer a call whose command was under way when this node ceased to be the controller."""
    if error is None:
        call.promise.resolve(outcomes())
    elif isinstance(error, KafkaError) and error.code in _NOTHING_DONE:
        call.promise.fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))  # the next one may try
    else:
        call.promise.fail(error)
