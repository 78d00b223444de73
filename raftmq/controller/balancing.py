"""A balance that an operator asks for, from the call to the moves that are planned for it.

Sizes are known to leaders alone, so every live broker is asked for those of what it leads; one that
does not answer in time leaves them unknown. Then the plan is made by `balance.py`, a few
milliseconds in each tick, and told, or submitted as planned moves. What becomes of these is the
work of `moves.py`: they begin a few at a time, after everything that is more urgent.

A plan that a dry run showed is the one that is submitted, as long as nothing but sizes has changed
since: under load sizes change at every moment, and there are many equally good plans.

Invariants: one balance at a time; each move is compared with the partition as the plan saw it, so a
plan that has grown old changes nothing else; what an operator, a repair or a drain moves is not
touched, and while an operator's moves are planned or run nothing is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from attrs import define, evolve, field

from raftmq.controller.balance import TURN, BalanceMove, Brokers, Held, Plan, balance_steps
from raftmq.controller.leaders import Key, LeaderTable
from raftmq.controller.moves import Bounds, first_names, going_nodes, is_moving, obstacle
from raftmq.controller.placement import Candidate
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    BalanceCall,
    ChangeNodesCall,
    MoveTold,
    Outcome,
    Outcomes,
    PartitionSize,
)
from raftmq.metadata.commands import NodeState, Origin, PlanMoves, PlannedMove
from raftmq.metadata.engine import MetadataEngine
from raftmq.metadata.features import write_error
from raftmq.metadata.image import (
    LEVEL_OF_MOVES,
    MetadataImage,
    PartitionImage,
    TopicImage,
    all_partitions,
    present_nodes,
)
from raftmq.metadata.results import MoveOutcomes
from raftmq.metadata.voters import configuration_steps
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.raft.membership import Configuration
from raftmq.replication.membership import TargetMembership
from raftmq.types import NodeId, ReplicaId

AskSizes: TypeAlias = Callable[[NodeId], Promise[tuple[PartitionSize, ...]]]

SIZES_MS: Final = 2_000.0
"""A broker that has not told its sizes by then is not waited for."""
TURN_MS: Final = 4.0
MOVES_PER_COMMAND: Final = 500
NAMES_MAX: Final = 5
DRY_RUN_MS: Final = 3_600_000.0
"""An operator who looks at a dry run for longer does not take it for the present state."""


# ---- what there is to even out ----


def balance_input(
    image: MetadataImage,
    leaders: LeaderTable,
    bounds: Bounds,
    sizes: Mapping[Key, int],
    onto: Sequence[int] | None = None,
) -> Generator[None, None, tuple[list[Held], Brokers]]:
    """All partitions and brokers as `balance.py` wants them, after some short turns.

    What moves already, or is to move, counts where it will be and stays; so does what has no
    leader, since no move of it could begin, and what is on brokers that are to lose everything.
    """
    going = going_nodes(image, bounds.dead)
    partitions = []
    held: dict[NodeId, int] = {}
    for number, (topic, partition) in enumerate(all_partitions(image)):
        if number % TURN == 0:
            yield
        key = topic.topic_id, partition.index
        replicas = partition.planned or partition.replicas
        for node_id in dict.fromkeys((*partition.replicas, *partition.voters, *replicas)):
            held[node_id] = held.get(node_id, 0) + 1
        is_fixed = (
            bool(partition.planned)
            or is_moving(partition)
            or any(node_id in going for node_id in replicas)
            or bool(obstacle(image, leaders, key, partition))
        )
        partitions.append(
            Held(topic.name, partition.index, replicas, sizes.get(key), is_fixed=is_fixed)
        )
    targets: list[Candidate] = []
    others: list[Candidate] = []
    for node_id in sorted(image.brokers):
        broker = image.brokers[node_id]
        room = bounds.limit_of(node_id) - held.get(node_id, 0)
        candidate = Candidate(node_id, broker.rack, room=room)
        takes = broker.takes_replicas and not broker.is_fenced and node_id not in going
        (targets if takes else others).append(candidate)
    gaining = None if onto is None else tuple(NodeId(n) for n in onto)
    return partitions, Brokers(tuple(targets), others=tuple(others), onto=gaining)


def operator_moves(image: MetadataImage) -> list[str]:
    """Partitions that an operator moves."""
    return [
        f"{topic.name}-{partition.index}"
        for topic, partition in all_partitions(image)
        if partition.origin is Origin.OPERATOR
        and (partition.planned or partition.moving_from or is_moving(partition))
    ]


def refusal(image: MetadataImage) -> KafkaError | None:
    """Why no balance can be submitted now."""
    if reason := write_error("a balance", LEVEL_OF_MOVES, image):
        return KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
    if names := operator_moves(image):
        shown = first_names(names, NAMES_MAX)
        return KafkaError(
            f"{len(names)} moves of an operator are not done yet ({shown}): the balance comes "
            "after them. `kafka-reassign-partitions --list` shows them",
            code=ErrorCode.REASSIGNMENT_IN_PROGRESS,
        )
    return None


# ---- the groups' way ----


def group_steps(
    image: MetadataImage, topic: TopicImage, partition: PartitionImage, after: Sequence[NodeId]
) -> Iterator[str]:
    """Each configuration that a partition's group goes through, with its quorum, in words."""
    name = f"{topic.name}-{partition.index}"
    present = present_nodes(image)
    members = [
        ReplicaId(n, image.brokers[n].storage_id) for n in partition.voters if n in image.brokers
    ]
    configuration = Configuration(members)
    target = TargetMembership(tuple(after), {n: present[n] for n in after if n in present})
    end = yield from configuration_steps(
        name, configuration, present, lambda now: None if target.is_reached(now) else target
    )
    if not target.is_reached(end):
        yield f"{name}: goes no further while a member is down"


def described(image: MetadataImage, move: BalanceMove, *, with_steps: bool) -> MoveTold:
    """The move as it is shown to people."""
    topic = image.topics[move.topic]
    steps: tuple[str, ...] = ()
    if with_steps and move.arriving:
        partition = topic.partition(move.partition)
        assert partition is not None, "a move is planned of what is there"
        steps = tuple(group_steps(image, topic, partition, move.after))
    return MoveTold(
        topic=move.topic,
        partition=move.partition,
        before=move.before,
        after=move.after,
        why=move.why,
        copied_bytes=-1 if move.copied_bytes is None else move.copied_bytes,
        steps=steps,
    )


def share_texts(answer: Outcomes) -> list[str]:
    """What a balance says, for the steps of another call."""
    verdict, *rows = answer
    if verdict.code is not ErrorCode.NONE:
        return [f"no partitions yet: {verdict.message}; `raftmq cluster balance` moves some later"]
    texts = []
    for row in rows:
        move = row.move
        if move is None:
            continue
        name = f"{move.topic}-{move.partition}"
        size = "" if move.copied_bytes < 0 else f", {move.copied_bytes} bytes"
        there, then = (",".join(map(str, nodes)) for nodes in (move.before, move.after))
        texts.append(f"{name}: from {there} to {then} ({move.why}{size})")
        texts += move.steps
        if row.code is not ErrorCode.NONE:
            texts.append(f"{name}: not planned: {row.message or row.code.name}")
    return texts


def planned_move(image: MetadataImage, move: BalanceMove) -> PlannedMove:
    """A move as a part of a command."""
    topic = image.topics[move.topic]
    return PlannedMove(
        topic_id=topic.topic_id,
        partition=move.partition,
        creation_epoch=topic.group_id(move.partition).creation_epoch,
        replicas=move.after,
        expected=move.before,
    )


def _resized(move: BalanceMove, sizes: Mapping[tuple[str, int], int | None]) -> BalanceMove:
    """A move with the bytes that it costs now."""
    size = sizes[move.topic, move.partition]
    copies = len(move.arriving)
    return evolve(move, copied_bytes=None if copies and size is None else copies * (size or 0))


# ---- one call ----


@define(eq=False)
class _Job:
    call: BalanceCall
    joining: tuple[NodeId, ...]
    promise: Promise[Outcomes]
    deadline_ms: float
    sizes_deadline_ms: float
    waits_for: dict[NodeId, None] = field(factory=dict)
    sizes: dict[Key, int] = field(factory=dict)
    making: Generator[None, None, None] | None = None
    moves: list[MoveTold] = field(factory=list)
    commands: list[PlannedMove] = field(factory=list)
    message: str = "planned"
    is_submitted: bool = False


_Row: TypeAlias = tuple[str, int, tuple[NodeId, ...], bool]
"""A partition: its topic, number, replicas, and whether it stays where it is."""
_Shape: TypeAlias = tuple[list[_Row], Brokers]


def _shape_of(partitions: Sequence[Held], brokers: Brokers) -> _Shape:
    """What a plan comes of, but for sizes."""
    return [(h.topic, h.partition, h.replicas, h.is_fixed) for h in partitions], brokers


def changed_texts(before: _Shape, after: _Shape) -> list[str]:
    """What differs between two states that plans come of, in words."""
    texts = []
    known = {(topic, number): (nodes, stays) for topic, number, nodes, stays in before[0]}
    for topic, number, nodes, stays in after[0]:
        old = known.pop((topic, number), None)
        name = f"{topic}-{number}"
        if old is None:
            texts.append(f"{name} was made")
        elif old[0] != nodes:
            there, here = (",".join(map(str, replicas)) for replicas in (old[0], nodes))
            texts.append(f"{name} went from {there} to {here}")
        elif old[1] != stays:
            texts.append(f"{name} {'cannot be moved now' if stays else 'can be moved again'}")
    texts += [f"{topic}-{number} was deleted" for topic, number in known]
    could, can = ({b.node_id: b for b in brokers.targets} for brokers in (before[1], after[1]))
    texts += [f"node {n} takes replicas" for n in can if n not in could]
    texts += [f"node {n} takes no replicas any more" for n in could if n not in can]
    texts += [
        f"node {n} has another rack" for n in can if n in could and could[n].rack != can[n].rack
    ]
    if not texts:  # what else changes a broker's room is named already
        texts = [f"node {n} has other room" for n in can if n in could and could[n] != can[n]]
    return texts


class Balancing:
    """The balance that this controller works at."""

    def __init__(
        self, engine: MetadataEngine, leaders: LeaderTable, ask_sizes: AskSizes, clock: Clock
    ) -> None:
        """`ask_sizes` asks a broker for the sizes of what it leads."""
        self._engine = engine
        self._leaders = leaders
        self._ask_sizes = ask_sizes
        self._clock = clock
        self._job: _Job | None = None
        self._told: tuple[_Shape, Plan] | None = None
        """The plan of the last dry run, with what it came of."""
        self._term_began_ms = -DRY_RUN_MS

    def begin(self, call: BalanceCall, joining: tuple[NodeId, ...] = ()) -> Promise[Outcomes]:
        """Begin a balance; it is answered once its moves are planned, or known. Brokers that are
        `joining` count as active in it."""
        promise: Promise[Outcomes] = Promise()
        now_ms = self._clock.monotonic_ms()
        image = self._engine.image
        error = refusal(image)
        if self._job is not None:
            error = KafkaError(
                "another balance is being planned: try again in a moment",
                code=ErrorCode.REASSIGNMENT_IN_PROGRESS,
            )
        if error is not None and not (
            call.dry_run and error.code is ErrorCode.REASSIGNMENT_IN_PROGRESS and self._job is None
        ):
            promise.resolve((Outcome(name="verdict", code=error.code, message=error.message),))
            return promise
        deadline_ms = now_ms + max(1, call.timeout_ms)
        job = self._job = _Job(call, joining, promise, deadline_ms, now_ms + SIZES_MS)
        live = [broker.node_id for broker in image.live_brokers()]
        job.waits_for = dict.fromkeys(live)
        for node_id in live:
            self._ask(job, node_id)
        return promise

    def with_share(self, call: ChangeNodesCall, changed: Promise[Outcomes]) -> Promise[Outcomes]:
        """Plan the share of brokers once they are added, or would be; the answer names the moves
        as further steps. Where it cannot be planned now, it says how to do it later."""
        promise: Promise[Outcomes] = Promise()
        node_ids = tuple(NodeId(n) for n in call.node_ids)

        def added(changed: Promise[Outcomes]) -> None:
            if changed.error is not None:
                promise.fail(changed.error)
                return
            rows = changed.result()
            if rows[0].code is not ErrorCode.NONE:
                promise.resolve(rows)
                return
            share = BalanceCall(onto=node_ids, dry_run=call.dry_run, timeout_ms=call.timeout_ms)

            def planned(answer: Promise[Outcomes]) -> None:
                error = answer.error
                if isinstance(error, KafkaError) and error.code is ErrorCode.NOT_CONTROLLER:
                    promise.fail(error)  # the next one finds them added, and plans their share
                    return
                steps = (
                    [f"their share of the partitions is not planned for certain: {error}"]
                    if error is not None
                    else share_texts(answer.result())
                )
                more = (Outcome(name="step", message=text) for text in steps)
                promise.resolve((*rows, *more))

            self.begin(share, node_ids).when_done(planned)

        changed.when_done(added)
        return promise

    def tick(self, now_ms: float, bounds: Bounds) -> None:
        """Go on with it for a few milliseconds."""
        job = self._job
        if job is None or job.is_submitted:
            return
        if now_ms >= job.deadline_ms:
            self._job = None
            job.promise.fail(KafkaError("no plan in time", code=ErrorCode.REQUEST_TIMED_OUT))
            return
        if job.making is None:
            if job.waits_for and now_ms < job.sizes_deadline_ms:
                return
            job.making = self._make(
                job,
                self._engine.image.with_states(dict.fromkeys(job.joining, NodeState.ACTIVE)),
                bounds,
            )
        end_ms = self._clock.monotonic_ms() + TURN_MS
        while self._clock.monotonic_ms() < end_ms:
            try:
                next(job.making)
            except StopIteration:
                self._made(job)
                return

    def begin_term(self, now_ms: float) -> None:
        """This node has become the controller; what an earlier one told is not known."""
        self._term_began_ms = now_ms
        self._told = None

    def end_term(self) -> None:
        """This node is the controller no more: nothing was done, unless it is on its way."""
        job, self._job = self._job, None
        if job is not None and not job.is_submitted:
            job.promise.fail(KafkaError(code=ErrorCode.NOT_CONTROLLER))

    def _ask(self, job: _Job, node_id: NodeId) -> None:
        def done(promise: Promise[tuple[PartitionSize, ...]]) -> None:
            job.waits_for.pop(node_id, None)
            if promise.error is None:
                job.sizes |= {(s.topic_id, s.partition): s.size_bytes for s in promise.result()}

        self._ask_sizes(node_id).when_done(done)

    def _make(self, job: _Job, image: MetadataImage, bounds: Bounds) -> Generator[None, None, None]:
        partitions, brokers = yield from balance_input(
            image, self._leaders, bounds, job.sizes, job.call.onto
        )
        shape = _shape_of(partitions, brokers)
        yield
        if self._told is not None and self._told[0] == shape:
            sizes = {(held.topic, held.partition): held.size_bytes for held in partitions}
            plan = tuple(_resized(move, sizes) for move in self._told[1])
        else:
            if not job.call.dry_run:
                job.message = self._why_anew(shape, job)
            plan = yield from balance_steps(partitions, brokers)
        self._told = (shape, plan) if job.call.dry_run else None
        for number, move in enumerate(plan):
            if number % TURN == 0:
                yield
            job.moves.append(described(image, move, with_steps=job.call.dry_run))
            job.commands.append(planned_move(image, move))

    def _why_anew(self, shape: _Shape, job: _Job) -> str:
        """What there is to say of a plan that is not the one of a dry run."""
        if self._told is not None:
            changed = changed_texts(self._told[0], shape) or ["the call is another one"]
            return f"planned (anew: since the dry run {first_names(changed, NAMES_MAX)})"
        passed_ms = self._clock.monotonic_ms() - self._term_began_ms
        if job.call.onto is not None or passed_ms >= DRY_RUN_MS:
            return job.message
        return (
            f"planned (the controller is another one since {passed_ms / 1000:.0f} s: a dry run "
            "before that may have told another plan)"
        )

    def _made(self, job: _Job) -> None:
        rows = tuple(Outcome(name="move", move=move) for move in job.moves)
        if job.call.dry_run or not rows:
            self._job = None
            late = refusal(self._engine.image) if rows else None
            message = "would move" if rows else "nothing to move"
            if late is not None:
                message += f", but not now: {late.message}"
            job.promise.resolve((Outcome(name="verdict", message=message), *rows))
            return
        job.is_submitted = True
        self._submit(job, rows, 0, [])

    def _submit(self, job: _Job, rows: Outcomes, at: int, known: list[Outcome]) -> None:
        """Submit the moves from the `at`-th on, some at a time."""
        if at >= len(job.commands):
            self._end(job)
            verdict = Outcome(name="verdict", message=job.message)
            job.promise.resolve((verdict, *known))
            return
        end = at + MOVES_PER_COMMAND
        command = PlanMoves(moves=tuple(job.commands[at:end]), origin=Origin.BALANCE)

        def done(promise: Promise[Any]) -> None:
            if promise.error is not None:
                self._end(job)
                job.promise.fail(promise.error)
                return
            result: MoveOutcomes = promise.result()
            for row, outcome in zip(rows[at:end], result.moves, strict=True):
                known.append(
                    Outcome(
                        name="move",
                        code=outcome.code,
                        message=outcome.message or None,
                        move=row.move,
                    )
                )
            self._submit(job, rows, end, known)

        left_ms = max(1.0, job.deadline_ms - self._clock.monotonic_ms())
        self._engine.propose(command, timeout_ms=left_ms, may_resend=False).when_done(done)

    def _end(self, job: _Job) -> None:
        if self._job is job:
            self._job = None
