"""Fetch: the session says which partitions are wanted (`fetch_sessions.py`), a `Reading` looks at
them once, and a `ParkedFetch` waits where that found too little.

A reading reads spans below the high watermark within the request's limits. What is not in memory is
first a job for a worker, and an offset beyond a leader's end is confirmed before it is called out
of range. Where a reading finds less than `min_bytes`, or something to make ready or to confirm, the
fetch waits until `max_wait_ms` is over. Its states are `FetchState`, the ways between them `NEXT`;
what it finally answers was read at that moment, once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Concatenate, Final, ParamSpec
from uuid import UUID

from raftmq.counts import TopicCounts
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.credentials import masked
from raftmq.partition.look_ups import FIRST_EPOCH
from raftmq.partition.parked import Deadline
from raftmq.partition.partition import Partition
from raftmq.partition.ports import NO_OFFSET, FileSpan
from raftmq.ports import Runnable
from raftmq.promise import Promise
from raftmq.protocol.fetch import (
    AbortedTransaction,
    DivergingEpoch,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopicResponse,
    pieces_size,
)
from raftmq.records import split_batches, sum_anew
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.fetch_sessions import FetchContext, TopicKey, Wanted
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Abandonable, Work, all_at_once
from raftmq.types import Offset, RaftIndex

TOPIC_IDS_FROM: Final = 13
FOLLOWERS_FROM: Final = 11
LEADER_HINTS_FROM: Final = 12
ENDPOINTS_FROM: Final = 16
MAX_WAIT_MS_MAX: Final = 300_000
READ_COMMITTED: Final = 1
MASKED_BYTES_MAX: Final = 1 << 20
"""Of the metadata log in one answer, which is read and looked through on the loop."""
BYTES_MAX: Final = 64 << 20
"""Most bytes of one answer, whatever the client allows; it asks for more at once."""
COLD_ROUNDS_MAX: Final = 4
"""After so many rounds of workers (for the index, the bytes, their check, and once more where
memory was so short that they left it again) the loop itself reads what is missing."""
_MOVED: Final = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


def handle(
    broker: Broker,
    context: RequestContext,
    request: FetchRequest,
    reading_type: type[Reading] | None = None,
) -> FetchResponse | Promise[FetchResponse]:
    """Read what there is; wait when that is too little."""
    version = context.api_version
    if request.replica_id >= 0:
        # Replicas of raftmq do not use Fetch, and no client may claim to be one.
        return _refuse_all(broker, ErrorCode.INVALID_REQUEST)
    try:
        session = broker.sessions.begin(request, uses_topic_ids=version >= TOPIC_IDS_FROM)
    except KafkaError as error:
        return _refuse_all(broker, error.code)
    reading = (reading_type or Reading)(broker, context, request, session)
    min_bytes, wait_ms = request.min_bytes, min(request.max_wait_ms, MAX_WAIT_MS_MAX)
    if reading.is_large:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.look(broker.clock.monotonic_ms() + wait_ms)
        return parked
    reading.read()
    if reading.jobs:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.check(wait_ms)
        return parked
    waits = reading.next_leaders()
    if waits is not None:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.await_leaders(waits)
        return parked
    if reading.beyond:
        parked = ParkedFetch(broker, reading, min_bytes)
        parked.finish()
        return parked
    if reading.is_urgent or reading.size >= min_bytes or wait_ms <= 0:
        return reading.respond()
    parked = ParkedFetch(broker, reading, min_bytes)
    parked.park(wait_ms)
    return parked


def _refuse_all(broker: Broker, code: ErrorCode) -> FetchResponse:
    broker.metrics.api("fetch").error(code)
    return FetchResponse(error_code=code)


class Reading:
    """One look at all wanted partitions."""

    __slots__ = (
        "_broker",
        "_committed_only",
        "_ends",
        "_found",
        "_hold",
        "_listener",
        "_may_wait",
        "_request",
        "_session",
        "_version",
        "answers",
        "beyond",
        "is_urgent",
        "jobs",
        "partitions",
        "size",
    )

    def __init__(
        self,
        broker: Broker,
        context: RequestContext,
        request: FetchRequest,
        session: FetchContext,
    ) -> None:
        self._broker = broker
        self._version = context.api_version
        self._hold = context.hold
        self._listener = context.listener_name
        self._request = request
        self._committed_only = request.isolation_level == READ_COMMITTED
        self._session = session
        self.answers: list[tuple[Wanted, FetchPartitionResponse]] = []
        self._ends: list[int] = []
        self.partitions: list[tuple[Partition, int]] = []
        """Those found here, with the offset wanted."""
        self.size = 0
        self.is_urgent = False
        """True for an error or a hint that the client must learn at once."""
        self.jobs: list[tuple[Partition, Runnable]] = []
        """What a worker must read or check before a partition can be served."""
        self.beyond: dict[int, Partition] = {}
        """Leaders that were asked beyond their log's end, by the place of their answer."""
        self._found: list[tuple[TopicCounts, int, int]] = []  # messages and bytes of an answer

    @property
    def is_large(self) -> bool:
        """True when a look at all of them is too much for one turn of the loop."""
        return len(self._session.wanted) > TURN_PARTITIONS

    def read(self, *, may_wait: bool = False) -> None:
        """Look at every partition, within the request's limits."""
        all_at_once(self.steps(may_wait=may_wait))

    def steps(self, *, may_wait: bool = False) -> Work[None]:
        """As `read`, in short turns."""
        self._may_wait = may_wait
        self.answers = []
        self.partitions = []
        self._ends = []
        self.jobs = []
        self.beyond = {}
        self._found = []
        self.size = 0
        self.is_urgent = not self._session.wanted
        left = min(self._request.max_bytes, BYTES_MAX)
        for count, wanted in enumerate(self._session.wanted, 1):
            if count % TURN_PARTITIONS == 0:
                yield None
            answer = self.read_one(wanted, left)
            self.answers.append((wanted, answer))
            if answer.records:
                size = pieces_size(answer.records)
                left -= size
                self.size += size

    def not_leading(self, place: int) -> None:
        """The leader that was asked beyond its log's end turns out to have been replaced."""
        wanted, _ = self.answers[place]
        self.answers[place] = wanted, self._refuse(wanted, ErrorCode.NOT_LEADER_OR_FOLLOWER)

    def respond(self) -> FetchResponse:
        """The answer to what was read last."""
        response = FetchResponse(session_id=self._session.session_id)
        for counts, messages, size in self._found:
            counts.messages_out += messages
            counts.bytes_out += size
        by_topic: dict[TopicKey, FetchTopicResponse] = {}
        hinted: list[int] = []
        by_id = self._version >= TOPIC_IDS_FROM
        for wanted, answer in self._session.select(self.answers):
            topic = by_topic.get(wanted.topic)
            if topic is None:
                key = wanted.topic
                if isinstance(key, str):
                    topic = FetchTopicResponse(key, None, [])
                else:
                    topic = FetchTopicResponse(None if by_id else "", key, [])
                by_topic[key] = topic
                response.topics.append(topic)
            topic.partitions.append(answer)
            if answer.error_code:
                self._broker.metrics.api("fetch").error(answer.error_code)
            if answer.current_leader is not None:
                hinted.append(answer.current_leader.leader_id)
        if hinted and self._version >= ENDPOINTS_FROM:
            response.node_endpoints = self._broker.endpoints(hinted, self._listener)
        return response

    def next_leaders(self) -> Promise[None] | None:
        """Resolves when the new leaders are known of what this node has just ceased to lead; None
        when they are: a client that is told of no new leader backs off before it asks again."""
        if not self.is_urgent:
            return None
        moved = [
            (*named(wanted), wanted.request.partition)
            for wanted, answer in self.answers
            if answer.error_code in _MOVED
        ]
        return self._broker.next_leaders(moved, self._hold) if moved else None

    def has_moved(self) -> bool:
        """True when the end of a partition has moved since it was looked at."""
        return any(
            self._end_of(partition) != end
            for (partition, _), end in zip(self.partitions, self._ends, strict=True)
        )

    def _end_of(self, partition: Partition) -> Offset:
        """Where this reader must stop."""
        return partition.stable_end if self._committed_only else partition.readable_end

    def has_news(self, min_bytes: int) -> bool:
        """After a wake: read again, only where that can change the answer; True to answer now."""
        if any(partition.fetches.is_over for partition, _ in self.partitions):
            self.read(may_wait=True)
            return True
        if not self._may_differ() and (min_bytes or not self._is_old()):
            return False
        self.read(may_wait=True)
        return self.is_urgent or self.size >= min_bytes

    def _is_old(self) -> bool:
        """True when a reader of committed records would be told a high watermark of before."""
        return self._committed_only and any(
            partition.readable_end != answer.high_watermark
            for (partition, _), (_, answer) in zip(self.partitions, self.answers, strict=True)
        )

    def _may_differ(self) -> bool:
        """True unless looking again would find what was found last."""
        # Each was found: a fetch with a refused partition is answered at once and never waits.
        for (partition, offset), (wanted, answer) in zip(
            self.partitions, self.answers, strict=True
        ):
            end = self._end_of(partition)
            if end > offset or end == NO_OFFSET or not partition.serves_fetches:
                return True
            replica, epoch = partition.replica, wanted.request.current_leader_epoch
            if replica.log_start_offset != answer.log_start_offset:
                return True
            if epoch >= 0 and max(epoch, FIRST_EPOCH) != replica.leader_epoch:
                return True
        return False

    def read_one(self, wanted: Wanted, left: int) -> FetchPartitionResponse:
        """Look at one partition, with so many bytes left for it."""
        request = wanted.request
        broker = self._broker
        name, topic_id = named(wanted)
        found = broker.find_readable(name, topic_id, request.partition)
        if isinstance(found, ErrorCode):
            return self._refuse(wanted, found)
        self.partitions.append((found, request.fetch_offset))
        self._ends.append(self._end_of(found))
        is_first = self.size == 0
        if found.is_internal:
            left = min(left, MASKED_BYTES_MAX)
        result = found.read(
            Offset(request.fetch_offset),
            min(request.partition_max_bytes, left),
            current_epoch=request.current_leader_epoch,
            last_fetched_epoch=request.last_fetched_epoch,
            may_follow=self._version >= FOLLOWERS_FROM,
            at_least_one=is_first,
            may_wait=self._may_wait,
            committed_only=self._committed_only,
        )
        if result.job is not None:
            self.jobs.append((found, result.job))
        if result.code is not ErrorCode.NONE:
            is_beyond = result.code is ErrorCode.OFFSET_OUT_OF_RANGE and found.is_leader
            if is_beyond and request.fetch_offset > result.high_watermark:
                self.beyond[len(self.answers)] = found
            answer = self._refuse(wanted, result.code)
            answer.high_watermark = result.high_watermark
            answer.log_start_offset = result.log_start_offset
            return answer
        answer = FetchPartitionResponse(
            request.partition,
            ErrorCode.NONE,
            result.high_watermark,
            result.last_stable_offset,
            result.log_start_offset,
            [AbortedTransaction(row.producer_id, row.first_offset) for row in result.aborted]
            if self._committed_only
            else None,
            -1,
            _masked(result.spans) if found.is_internal else result.pieces or result.spans,
        )
        if result.diverging is not None:
            self.is_urgent = True
            answer.diverging_epoch = DivergingEpoch(*result.diverging)
        elif self._request.rack_id and self._version >= FOLLOWERS_FROM and found.is_leader:
            at_end = request.fetch_offset >= self._ends[-1]
            closest = None if at_end else broker.closest_replica(found, self._request.rack_id)
            if closest is not None:
                self.is_urgent = True
                answer.preferred_read_replica = closest
                answer.records = ()
        if answer.records:
            self._found.append((found.counts, result.record_count, result.size))
        return answer

    def _refuse(self, wanted: Wanted, code: ErrorCode) -> FetchPartitionResponse:
        self.is_urgent = True
        request = wanted.request
        answer = FetchPartitionResponse(request.partition, code, records=())
        if code in _MOVED and self._version >= LEADER_HINTS_FROM:
            name, topic_id = named(wanted)
            answer.current_leader = self._broker.leader_hint(name, topic_id, request.partition)
        return answer


def _masked(spans: Sequence[FileSpan]) -> list[bytearray]:
    """Batches of the metadata log without secrets of users. What is masked keeps its length, so
    only the sums of the batches are other ones."""
    pieces = []
    for span in spans:
        data = span.file.pread(span.size, span.position)
        piece = bytearray(masked(data))
        if piece != data:
            for _, batch in split_batches(piece):
                sum_anew(batch)
        pieces.append(piece)
    return pieces


def named(wanted: Wanted) -> tuple[str | None, UUID | None]:
    """The name or the id of a topic, whichever a request gives."""
    key = wanted.topic
    return (key, None) if isinstance(key, str) else (None, key)


P = ParamSpec("P")
Step = Callable[Concatenate["ParkedFetch", P], None]


def _costs_its_fetch(step: Step[P]) -> Step[P]:
    """Let a bug in a step fail that fetch alone: the step may have been called by the engine, which
    must go on."""

    def guarded(fetch: ParkedFetch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            step(fetch, *args, **kwargs)
        except Exception as error:
            if fetch.is_done:
                raise  # the bug is in what was done with the answer
            fetch._become(FetchState.ANSWERED)
            fetch.fail(error)

    return guarded


class FetchState(Enum):
    """What a fetch that could not be answered at once does."""

    LOOKING = "partitions are read, or workers make them ready for that"
    PARKED = "it waits at its partitions, and for its time"
    CONFIRMING = "it waits for the name of a leader, or for proof that this node led when it looked"
    ANSWERED = "it is settled"


NEXT: Final[Mapping[FetchState, frozenset[FetchState]]] = {
    FetchState.LOOKING: frozenset({FetchState.PARKED, FetchState.CONFIRMING, FetchState.ANSWERED}),
    FetchState.PARKED: frozenset({FetchState.LOOKING, FetchState.ANSWERED}),
    FetchState.CONFIRMING: frozenset({FetchState.CONFIRMING, FetchState.ANSWERED}),
    FetchState.ANSWERED: frozenset(),
}
"""All ways from one state to another; only `ParkedFetch._become` takes them."""


class ParkedFetch(Abandonable[FetchResponse]):
    """A fetch that waits for `min_bytes`, a change of leadership, or its time."""

    __slots__ = (
        "_broker",
        "_min_bytes",
        "_parked_at",
        "_reading",
        "_rounds",
        "_until_ms",
        "_wait",
        "state",
    )

    def __init__(self, broker: Broker, reading: Reading, min_bytes: int) -> None:
        super().__init__()
        self._broker = broker
        self._reading = reading
        self._min_bytes = min_bytes
        self._parked_at: list[Partition] = []
        self._wait: Deadline | None = None
        self._rounds = 0
        self._until_ms = 0.0
        self.state = FetchState.LOOKING

    def _become(self, state: FetchState) -> None:
        assert state in NEXT[self.state], f"a fetch goes from {self.state} to {state}"
        if self.state is FetchState.PARKED:
            self._unpark()
        self.state = state

    def _settle(self, response: FetchResponse) -> None:
        self._become(FetchState.ANSWERED)
        self.resolve(response)

    def check(self, wait_ms: float) -> None:
        """Let workers read and check what is cold, then look again."""
        left = len(self._reading.jobs)
        self._rounds += 1

        def settled_for(partition: Partition, job: Runnable) -> Callable[[Promise[None]], None]:
            def settled(done: Promise[None]) -> None:
                nonlocal left
                left -= 1
                if done.error is None:
                    partition.prepared(job)
                # An error of the disk shows again when the partition is read.
                if left == 0 and self.state is FetchState.LOOKING:
                    self._look(wait_ms)

            return settled

        self._broker.metrics.read_aheads += left
        for partition, job in self._reading.jobs:
            promise = self._broker.workers.submit(job.run)
            promise.when_done(settled_for(partition, job))

    @_costs_its_fetch
    def _look(self, wait_ms: float) -> None:
        reading = self._reading
        if reading.is_large:
            self.look(self._broker.clock.monotonic_ms() + wait_ms)
            return
        # Once an index is read it says where the bytes are, and these may need a read and a check.
        reading.read(may_wait=self._rounds >= COLD_ROUNDS_MAX)
        self._judge(wait_ms)

    def look(self, until_ms: float) -> None:
        """Look at many partitions in short turns, and again for as long as there is too little."""
        reading = self._reading

        def looked(done: Promise[None]) -> None:
            if self.state is not FetchState.LOOKING:
                return
            if done.error is not None:
                self._become(FetchState.ANSWERED)
                self.fail(done.error)
            else:
                self._judge(until_ms - self._broker.clock.monotonic_ms())

        self._until_ms = until_ms
        work = reading.steps(may_wait=self._rounds >= COLD_ROUNDS_MAX)
        result = self._broker.scheduler.run(work)
        assert isinstance(result, Promise), "so many partitions take more than a turn"
        result.when_done(looked)

    @_costs_its_fetch
    def _judge(self, wait_ms: float) -> None:
        reading = self._reading
        if reading.jobs:
            self.check(wait_ms)
        elif reading.is_urgent or reading.size >= self._min_bytes or wait_ms <= 0:
            self.answer()
        else:
            self.park(wait_ms)

    def park(self, wait_ms: float) -> None:
        """Wait at every partition; where too many wait already, answer what there is."""
        broker = self._broker
        if broker.metrics.parked_fetches >= broker.config.parked_fetches_max:
            self._settle(self._reading.respond())
            return
        self._become(FetchState.PARKED)
        self._parked_at = [partition for partition, _ in self._reading.partitions]
        for partition in self._parked_at:
            partition.fetches.park(self)
        self._wait = broker.deadlines.after(wait_ms, self.expire)
        broker.metrics.parked_fetches += 1
        if self._reading.is_large and self._reading.has_moved():
            self.woken()  # one moved while the others were looked at

    @_costs_its_fetch
    def woken(self) -> None:
        """A partition moved: answer if there is enough now. Harmless when this fetch is no longer
        parked: a partition with many parked fetches wakes some of them later."""
        if self.state is not FetchState.PARKED:
            return
        reading = self._reading
        if reading.is_large:
            is_over = any(p.fetches.is_over for p, _ in reading.partitions)
            self._become(FetchState.LOOKING)
            self.look(0.0 if is_over else self._until_ms)
        elif reading.has_news(self._min_bytes):
            self._become(FetchState.LOOKING)
            self.answer()

    def await_leaders(self, waits: Promise[None]) -> None:
        """Answer when the leaders are known of what this node does not lead any more."""

        def known(_done: Promise[None]) -> None:
            if self.state is FetchState.CONFIRMING:
                self._reading.read(may_wait=True)
                self.finish()

        self._become(FetchState.CONFIRMING)
        waits.when_done(known)

    @_costs_its_fetch
    def finish(self) -> None:
        """Answer what was read last.

        A leader that was replaced, and does not know it yet, lacks what its successor has; a
        consumer that it told "out of range" would begin elsewhere, and read records twice or never.
        So an offset beyond a log's end is called out of range only when a read barrier proves that
        this node still led when it looked.
        """
        reading = self._reading
        left = len(reading.beyond)
        if not left:
            self._settle(reading.respond())
            return

        def settled_at(place: int) -> Callable[[Promise[RaftIndex]], None]:
            def settled(barrier: Promise[RaftIndex]) -> None:
                nonlocal left
                left -= 1
                if barrier.error is not None:
                    reading.not_leading(place)
                if left == 0 and self.state is FetchState.CONFIRMING:
                    reading.beyond = {}
                    self.answer()

            return settled

        self._become(FetchState.CONFIRMING)
        for place, partition in reading.beyond.items():
            partition.replica.read_barrier().when_done(settled_at(place))

    @_costs_its_fetch
    def answer(self) -> None:
        """Answer what was read last, once the leaders are known of what is not led here."""
        waits = self._reading.next_leaders()
        if waits is None:
            self.finish()
        else:
            self.await_leaders(waits)

    def abandon(self) -> None:
        """The client is gone."""
        if self.state is not FetchState.ANSWERED:
            self._settle(FetchResponse())

    @_costs_its_fetch
    def expire(self) -> None:
        """Its time is over."""
        reading = self._reading
        self._become(FetchState.LOOKING)
        if reading.is_large:
            self.answer()
            return
        reading.has_news(0)  # reads again where that can change the answer
        self.finish()

    def _unpark(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.cancel()
        for partition in self._parked_at:
            partition.fetches.unpark(self)
        self._parked_at = []
        self._broker.metrics.parked_fetches -= 1
