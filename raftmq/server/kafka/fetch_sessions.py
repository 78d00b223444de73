"""Incremental fetch sessions (KIP-227): what a client fetches, remembered between its requests.

A bounded cache. A new session takes a free place, or that of a session unused for two minutes, or
that of a smaller one older than two minutes; otherwise the client fetches without a session, which
always works. A session answers only what is new: records, an error, a moved watermark or log start.

Invariants: the epoch of a session rises by one with each request; a client that skips or repeats
one must start a new session. Partitions that gave records move to the back, so that none starves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, TypeAlias
from uuid import UUID

from raftmq.errors import ErrorCode, KafkaError
from raftmq.ports import Buggify, Clock, Random
from raftmq.protocol.fetch import FetchPartition, FetchPartitionResponse, FetchRequest

SESSIONS_MAX: Final = 1000
SESSION_PARTITIONS_MAX: Final = 1_000_000
EVICTION_MS: Final = 120_000

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_EPOCH_MAX: Final = (1 << 31) - 1

TopicKey: TypeAlias = str | UUID | None
"""A topic as the request named it; None for the zero id."""


class Wanted:
    """One partition of a fetch; in a session, with what the client was last told of it."""

    __slots__ = ("high_watermark", "log_start_offset", "request", "topic")

    def __init__(self, topic: TopicKey, request: FetchPartition) -> None:
        self.topic = topic
        self.request = request
        self.high_watermark = -1
        self.log_start_offset = -1

    def is_news(self, answer: FetchPartitionResponse) -> bool:
        """True when an incremental answer must name this partition; notes what the answer says."""
        is_news = (
            bool(answer.records)
            or answer.error_code != ErrorCode.NONE
            or answer.high_watermark != self.high_watermark
            or answer.log_start_offset != self.log_start_offset
            or answer.diverging_epoch is not None
            or answer.preferred_read_replica >= 0
        )
        self.high_watermark = answer.high_watermark
        self.log_start_offset = answer.log_start_offset
        if answer.error_code != ErrorCode.NONE:
            self.high_watermark = -1  # the next answer names it again, error or not
        return is_news


class Session:
    """One client's session."""

    __slots__ = ("created_ms", "epoch", "id", "partitions", "used_ms", "uses_topic_ids")

    def __init__(self, session_id: int, uses_topic_ids: bool, now_ms: float) -> None:
        self.id = session_id
        self.uses_topic_ids = uses_topic_ids
        self.epoch = 1
        self.created_ms = now_ms
        self.used_ms = now_ms
        self.partitions: dict[tuple[TopicKey, int], Wanted] = {}

    def update(self, request: FetchRequest) -> None:
        """Add, change and forget partitions as an incremental request says."""
        for wanted in wanted_of(request):
            key = (wanted.topic, wanted.request.partition)
            known = self.partitions.get(key)
            if known is None:
                self.partitions[key] = wanted
            else:
                known.request = wanted.request
        for topic in request.forgotten:
            name = topic.topic_id if self.uses_topic_ids else topic.name
            for partition in topic.partitions:
                self.partitions.pop((name, partition), None)

    def filter(
        self, answers: Iterable[tuple[Wanted, FetchPartitionResponse]]
    ) -> list[tuple[Wanted, FetchPartitionResponse]]:
        """Keep what is news; partitions that gave records move to the back."""
        kept = []
        for wanted, answer in answers:
            if not wanted.is_news(answer):
                continue
            kept.append((wanted, answer))
            key = (wanted.topic, wanted.request.partition)
            if answer.records and self.partitions.get(key) is wanted:
                del self.partitions[key]
                self.partitions[key] = wanted
        return kept


class FetchContext:
    """One request, with or without a session."""

    __slots__ = ("_is_incremental", "_session", "session_id", "wanted")

    def __init__(
        self, wanted: list[Wanted], session: Session | None, *, is_incremental: bool
    ) -> None:
        self.wanted = wanted
        self._session = session
        self._is_incremental = is_incremental
        self.session_id = NO_SESSION if session is None else session.id

    def select(
        self, answers: list[tuple[Wanted, FetchPartitionResponse]]
    ) -> list[tuple[Wanted, FetchPartitionResponse]]:
        """The answers that are sent to the client."""
        if self._session is None:
            return answers
        kept = self._session.filter(answers)
        return kept if self._is_incremental else answers


def wanted_of(request: FetchRequest) -> list[Wanted]:
    """The partitions that a request names."""
    return [
        Wanted(topic.name if topic.name is not None else topic.topic_id, partition)
        for topic in request.topics
        for partition in topic.partitions
    ]


class FetchSessions:
    """All sessions of this node."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        *,
        sessions_max: int = SESSIONS_MAX,
        partitions_max: int = SESSION_PARTITIONS_MAX,
        buggify: Buggify,
    ) -> None:
        self._clock = clock
        self._random = random
        self._buggify = buggify
        self._sessions_max = sessions_max
        self._partitions_max = partitions_max
        self._sessions: dict[int, Session] = {}  # longest unused first
        self._partitions = 0  # of all sessions

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, request: FetchRequest, *, uses_topic_ids: bool) -> FetchContext:
        """Find or make the session of a request.

        Raises:
            KafkaError: FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH or
                FETCH_SESSION_TOPIC_ID_ERROR: the client must start afresh.
        """
        session_id, epoch = request.session_id, request.session_epoch
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            if session_id != NO_SESSION:
                self._remove(session_id)
            wanted = wanted_of(request)
            session = None
            if epoch == INITIAL_EPOCH:
                session = self._create(wanted, uses_topic_ids)
            return FetchContext(wanted, session, is_incremental=False)
        if session_id in self._sessions and self._buggify("fetch.session_evicted"):
            self._remove(session_id)
        session = self._sessions.get(session_id)
        if session is None:
            raise KafkaError(code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.uses_topic_ids != uses_topic_ids:
            raise KafkaError(code=ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        if session.epoch != epoch:
            raise KafkaError(code=ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        session.used_ms = self._clock.monotonic_ms()
        del self._sessions[session_id]
        self._sessions[session_id] = session
        before = len(session.partitions)
        session.update(request)
        self._partitions += len(session.partitions) - before
        if self._partitions > self._partitions_max:
            self._remove(session_id)
            raise KafkaError(code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        return FetchContext(list(session.partitions.values()), session, is_incremental=True)

    def _create(self, wanted: list[Wanted], uses_topic_ids: bool) -> Session | None:
        now_ms = self._clock.monotonic_ms()
        if not wanted or not self._make_room(len(wanted), now_ms):
            return None
        session_id = self._random.randrange(1, 1 << 31)
        while session_id in self._sessions:
            session_id = self._random.randrange(1, 1 << 31)
        session = Session(session_id, uses_topic_ids, now_ms)
        for one in wanted:
            session.partitions[(one.topic, one.request.partition)] = one
        self._sessions[session_id] = session
        self._partitions += len(session.partitions)
        return session

    def _remove(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._partitions -= len(session.partitions)

    def _make_room(self, partition_count: int, now_ms: float) -> bool:
        sessions = self._sessions
        if self._partitions + partition_count > self._partitions_max:
            return False
        if len(sessions) < self._sessions_max:
            return True
        oldest = next(iter(sessions.values()), None)
        if oldest is None:
            return False  # no sessions at all are allowed
        if now_ms - oldest.used_ms > EVICTION_MS:
            self._remove(oldest.id)
            return True
        settled = [s for s in sessions.values() if now_ms - s.created_ms > EVICTION_MS]
        smallest = min(settled, key=lambda s: len(s.partitions), default=None)
        if smallest is None or len(smallest.partitions) >= partition_count:
            return False
        self._remove(smallest.id)
        return True
