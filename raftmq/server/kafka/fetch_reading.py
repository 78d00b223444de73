"""One look of a Fetch at all partitions that it wants, and the answer to what was found.

Reads spans below the high watermark within the request's limits; what is cold is a job for a worker
first, and what lies beyond a leader's end is to be confirmed before it is said. Never waits:
`fetch_waiting.py` looks again when it is worth while. Which partitions are wanted, and of which the
client is told, is for the session to say (`fetch_sessions.py`).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from raftmq.counts import TopicCounts
from raftmq.errors import ErrorCode
from raftmq.partition.partition import FIRST_EPOCH, Partition
from raftmq.ports import Runnable
from raftmq.promise import Promise
from raftmq.protocol.fetch import (
    DivergingEpoch,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopicResponse,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.fetch_sessions import FetchContext, TopicKey, Wanted
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, all_at_once
from raftmq.types import Offset

TOPIC_IDS_FROM: Final = 13
FOLLOWERS_FROM: Final = 11
LEADER_HINTS_FROM: Final = 12
ENDPOINTS_FROM: Final = 16
BYTES_MAX: Final = 64 << 20
"""More than this in one answer serves nobody: the client asks again at once."""

_MOVED: Final = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)


class Reading:
    """One look at all wanted partitions."""

    __slots__ = (
        "_broker",
        "_ends",
        "_found",
        "_hold",
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
        self._request = request
        self._session = session
        self.answers: list[tuple[Wanted, FetchPartitionResponse]] = []
        self._ends: list[int] = []
        self.partitions: list[tuple[Partition, int]] = []
        """Those found here, with the offset wanted."""
        self.size = 0
        self.is_urgent = False
        """An error or a hint that the client must learn at once."""
        self.jobs: list[tuple[Partition, Runnable]] = []
        """What a worker must read or check before it can be served."""
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
            answer = self._read_one(wanted, left)
            self.answers.append((wanted, answer))
            if answer.records:
                for span in answer.records:
                    left -= span.size
                    self.size += span.size

    def not_leading(self, place: int) -> None:
        """Who was asked beyond its log's end turns out to have been replaced."""
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
            response.node_endpoints = self._broker.endpoints(hinted)
        return response

    def next_leaders(self) -> Promise[None] | None:
        """Kept when it is known who leads what this node has just ceased to lead; None when that is
        so already: a client that is told "not here" alone backs off before it asks again."""
        if not self.is_urgent:
            return None
        moved = [
            (*_named(wanted), wanted.request.partition)
            for wanted, answer in self.answers
            if answer.error_code in _MOVED
        ]
        return self._broker.next_leaders(moved, self._hold) if moved else None

    def has_moved(self) -> bool:
        """True when a partition's end is another than it was when it was looked at."""
        return any(
            partition.readable_end != end
            for (partition, _), end in zip(self.partitions, self._ends, strict=True)
        )

    def has_news(self, min_bytes: int) -> bool:
        """After a wake: read again only where that can change the answer."""
        if any(partition.fetches.is_over for partition, _ in self.partitions):
            self.read(may_wait=True)
            return True
        if not self._may_differ():
            return False
        self.read(may_wait=True)
        return self.is_urgent or self.size >= min_bytes

    def _may_differ(self) -> bool:
        """True unless looking again would find what was found last."""
        # Nothing was refused, else it would not have been waited with: each was found.
        for (partition, offset), (wanted, answer) in zip(
            self.partitions, self.answers, strict=True
        ):
            if partition.readable_end > offset or not partition.serves_fetches:
                return True
            replica, epoch = partition.replica, wanted.request.current_leader_epoch
            if replica.log_start_offset != answer.log_start_offset:
                return True
            if epoch >= 0 and max(epoch, FIRST_EPOCH) != replica.leader_epoch:
                return True
        return False

    def _read_one(self, wanted: Wanted, left: int) -> FetchPartitionResponse:
        request = wanted.request
        broker = self._broker
        key = wanted.topic
        name, topic_id = (key, None) if isinstance(key, str) else (None, key)
        found = broker.find_partition(name, topic_id, request.partition)
        if isinstance(found, ErrorCode):
            return self._refuse(wanted, found)
        self.partitions.append((found, request.fetch_offset))
        self._ends.append(found.readable_end)
        is_first = self.size == 0
        result = found.read(
            Offset(request.fetch_offset),
            min(request.partition_max_bytes, left),
            current_epoch=request.current_leader_epoch,
            last_fetched_epoch=request.last_fetched_epoch,
            may_follow=self._version >= FOLLOWERS_FROM,
            at_least_one=is_first,
            may_wait=self._may_wait,
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
            result.high_watermark,
            result.log_start_offset,
            [] if self._request.isolation_level == 1 else None,
            -1,
            result.spans,
        )
        if result.diverging is not None:
            self.is_urgent = True
            answer.diverging_epoch = DivergingEpoch(*result.diverging)
        elif self._request.rack_id and self._version >= FOLLOWERS_FROM and found.is_leader:
            closest = broker.closest_replica(found, self._request.rack_id, request.fetch_offset)
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
            name, topic_id = _named(wanted)
            answer.current_leader = self._broker.leader_hint(name, topic_id, request.partition)
        return answer


def _named(wanted: Wanted) -> tuple[str | None, UUID | None]:
    key = wanted.topic
    return (key, None) if isinstance(key, str) else (None, key)
