"""What the client knows of the cluster: brokers, topics, leaders; and when to ask again.

Owns the cache and the refresh policy. Leader epochs never go back: an answer of a broker that lags
does not undo what a newer one (or a produce answer, KIP-951) taught. Never does I/O: `calls()`
gives the requests that are due.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final
from uuid import UUID

from attrs import define, field, frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.call import Call, struct_call
from raftmq_client.core.trouble import Trouble
from raftmq_client.errors import (
    AuthenticationError,
    BrokerError,
    ClientError,
    TimedOutError,
    UsageError,
)

NO_LEADER: Final = -1
DOUBT_MS: Final = 10_000.0
"""How long answers must say an older leader epoch than the known one until they are believed."""
LOG: Final = logging.getLogger("raftmq_client.connection")


@frozen
class Broker:
    """A broker as clients reach it."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


@frozen
class PartitionInfo:
    """Where one partition lives."""

    topic: str
    partition: int
    leader: int
    leader_epoch: int
    replicas: tuple[int, ...] = ()
    in_sync: tuple[int, ...] = ()
    offline: tuple[int, ...] = ()
    error_code: int = 0


@frozen
class TopicInfo:
    """A topic and its partitions, by number."""

    name: str
    topic_id: UUID | None
    is_internal: bool
    partitions: tuple[PartitionInfo, ...]
    error_code: int = 0
    retired: tuple[PartitionInfo, ...] = ()
    """Those that it lists no more and that can still be read (raftmq: a topic that shrank)."""
    retired_view: str = ""
    """The topic that shows these alone, under the same numbers."""

    @property
    def readable(self) -> tuple[PartitionInfo, ...]:
        """All that there is to read, by number."""
        return (*self.partitions, *self.retired)

    def has(self, number: int) -> bool:
        """Whether there is such a partition to read."""
        return any(item.partition == number for item in self.readable)


def without_views(topics: Iterable[TopicInfo]) -> list[TopicInfo]:
    """These but for the views that show again what others of these list no more."""
    known = list(topics)
    views = {topic.retired_view for topic in known}
    return [topic for topic in known if topic.name not in views]


@frozen
class ClusterInfo:
    """A whole Metadata answer."""

    cluster_id: str | None
    controller: int
    brokers: tuple[Broker, ...]
    topics: tuple[TopicInfo, ...]


_FINAL_CODES: Final = frozenset(
    {ErrorCode.INVALID_TOPIC_EXCEPTION, ErrorCode.TOPIC_AUTHORIZATION_FAILED}
)
"""Of a topic: asking on brings nothing."""
_TOPIC: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}")


def is_topic(name: object) -> bool:
    """Whether a topic can be called that, by Kafka's rule."""
    return isinstance(name, str) and name not in (".", "..") and bool(_TOPIC.fullmatch(name))


def check_topic(name: object) -> None:
    """Whether a topic can be called that, by Kafka's rule.

    One request asks about all topics of a client: a name that cannot be said must not get there.

    Raises:
        UsageError: no topic can.
    """
    if not is_topic(name):
        said = ascii(name)
        raise UsageError(
            "a topic is a name of 1 to 249 letters, digits, '.', '_' and '-', not"
            f" {said if len(said) < 60 else said[:60] + '...'}"
        )


def read_metadata(response: Struct) -> ClusterInfo:
    """Make our own types of a Metadata answer."""
    topics = []
    for topic in response.topics or ():
        topic_id = topic.topic_id if isinstance(topic.topic_id, UUID) else None
        topics.append(
            TopicInfo(
                name=topic.name or "",
                topic_id=topic_id,
                is_internal=bool(topic.is_internal),
                partitions=_partitions(topic.name, topic.partitions),
                error_code=topic.error_code,
                retired=_partitions(topic.name, topic.retired_partitions),
                retired_view=topic.retired_view,
            )
        )
    brokers = tuple(Broker(b.node_id, b.host, b.port, b.rack) for b in response.brokers or ())
    return ClusterInfo(response.cluster_id, response.controller_id, brokers, tuple(topics))


def _partitions(topic: str | None, rows: Sequence[Struct] | None) -> tuple[PartitionInfo, ...]:
    return tuple(
        PartitionInfo(
            topic=topic or "",
            partition=item.partition_index,
            leader=item.leader_id,
            leader_epoch=item.leader_epoch,
            replicas=tuple(item.replica_nodes or ()),
            in_sync=tuple(item.isr_nodes or ()),
            offline=tuple(item.offline_replicas or ()),
            error_code=item.error_code,
        )
        for item in sorted(rows or (), key=lambda item: item.partition_index)
    )


def metadata_request(topics: Sequence[str] | None, *, create: bool) -> Callable[[int], Struct]:
    """A Metadata request for some topics, or for all (None)."""

    def build(version: int) -> Struct:
        if topics is None:
            wanted: list[Struct] | None = [] if version == 0 else None
        else:
            wanted = [Struct(name=name) for name in topics]
        if version < 4:
            return Struct(topics=wanted)
        may_create = create and topics is not None
        return Struct(topics=wanted, allow_auto_topic_creation=may_create)

    return build


@define
class MetadataOptions:
    """How eagerly metadata is asked for."""

    max_age_ms: float = 300_000
    backoff_ms: float = 50
    backoff_max_ms: float = 1_000
    timeout_ms: float = 2_000
    allow_auto_create: bool = True
    idle_ms: float = float("inf")
    """Topics that nobody used for so long are forgotten until they are wanted again, and so is at
    once one that was deleted while nobody used it: who keeps asking has it created anew."""


@define
class MetadataCore:
    """The cache and its refresh."""

    options: MetadataOptions = field(factory=MetadataOptions)
    brokers: dict[int, Broker] = field(factory=dict)
    topics: dict[str, TopicInfo] = field(factory=dict)
    errors: dict[str, int] = field(factory=dict)
    """Topics that the last answer refused, with their code."""
    controller: int = NO_LEADER
    cluster_id: str | None = None
    version: int = 0
    """Counts answers; lets others notice change."""
    last_error: ClientError | None = None
    unreachable: str = ""
    """Why no broker could be asked, while none can."""
    _wanted: dict[str, None] = field(factory=dict)  # a dict keeps their order
    _used_at: dict[str, float] = field(factory=dict)
    _denied_at: dict[str, float] = field(factory=dict)
    _leaders: dict[TopicPartition, tuple[int, int]] = field(factory=dict)  # (leader, epoch)
    _doubted_since: dict[TopicPartition, float] = field(factory=dict)
    _wants_all: bool = False
    _is_due: bool = True
    _trouble: Trouble = field(
        factory=lambda: Trouble(logging.getLogger("raftmq_client.metadata")), repr=False
    )
    _is_asking: bool = False
    _asked: int = 0
    _answered_up_to: int = 0
    _not_before: float = 0.0
    _failures: int = 0
    _fresh_until: float = 0.0

    def want(self, topics: Iterable[str]) -> None:
        """Keep these topics in the cache from now on."""
        for topic in topics:
            if topic not in self._wanted:
                check_topic(topic)
                self._wanted[topic] = None
                self._is_due = True

    def used(self, topic: str, now: float) -> None:
        """Somebody works with this topic: do not forget it for a while."""
        self._used_at[topic] = now
        if topic not in self._wanted:
            self.want((topic,))

    def want_all(self) -> None:
        """Keep every topic of the cluster in the cache from now on."""
        self._wants_all = True
        self._is_due = True

    def invalidate(self) -> None:
        """Something is stale: ask again as soon as the back-off allows."""
        self._is_due = True

    def forget(self, topic: str) -> None:
        """Nobody wants this topic any more; what was said of it may be true no longer."""
        self._wanted.pop(topic, None)
        self._used_at.pop(topic, None)
        self._denied_at.pop(topic, None)
        self.errors.pop(topic, None)

    def final_refusal(self, topics: Iterable[str]) -> BrokerError | None:
        """Why one of these topics can never be used so; None where waiting may help."""
        for topic in topics if self.errors else ():
            code = self.errors.get(topic)
            if code in _FINAL_CODES:
                return BrokerError(code, about=f"topic {topic!r}")
        return None

    @property
    def next_question(self) -> int:
        """The number of the request that is sent next: its answer is newer than this moment."""
        return self._asked + 1

    def has_answered(self, question: int) -> bool:
        """Whether that request, or a later one, was answered; if not, it will be asked."""
        if self._answered_up_to >= question:
            return True
        self._is_due = self._is_due or self._asked < question
        return False

    @property
    def refusal(self) -> AuthenticationError | None:
        """Set while no broker lets us in: nothing else will be learned."""
        error = self.last_error
        return error if isinstance(error, AuthenticationError) else None

    def why_not(self, topic: str) -> str:
        """Why a topic is not known, for people."""
        code = self.errors.get(topic)
        if code:
            return BrokerError(code).code.name
        return str(self.last_error or self.unreachable or "no metadata")

    def is_settled(self, topic: str) -> bool:
        """Whether waiting tells no more: the topic is known, or no broker lets us in."""
        return self.partition_count(topic) is not None or self.refusal is not None

    def not_found(self, topic: str) -> ClientError:
        """What a question about a topic ends with that waiting did not answer."""
        if self.refusal is not None:
            return self.refusal.fresh()
        code = self.errors.get(topic)
        if code:
            return BrokerError(code, about=f"topic {topic!r}")
        message = f"topic {topic!r} could not be found in time: {self.why_not(topic)}"
        return TimedOutError(message, sent=False)

    def partition_count(self, topic: str) -> int | None:
        """How many partitions a topic has; None when not (yet) known."""
        info = self.topics.get(topic)
        return len(info.partitions) if info is not None and info.partitions else None

    def leader(self, topic: str, partition: int) -> tuple[int, int] | None:
        """(node, leader epoch) of a partition's leader; None when unknown or its node is."""
        known = self._leaders.get(TopicPartition(topic, partition))
        if known is None or known[0] == NO_LEADER or known[0] not in self.brokers:
            return None
        return known

    def learn_leader(
        self, topic: str, partition: int, leader: int, epoch: int, nodes: Iterable[Broker] = ()
    ) -> bool:
        """Take a hint from an answer (KIP-951); True when it is news."""
        for broker in nodes:
            self.brokers[broker.node_id] = broker
        key = TopicPartition(topic, partition)
        known = self._leaders.get(key)
        if leader < 0 or (known is not None and known[1] >= epoch):
            return False
        self._leaders[key] = (leader, epoch)
        return True

    def calls(self, now: float) -> list[Call]:
        """The Metadata request, when one is due."""
        if self._is_asking or now < self._not_before:
            return []
        if not self._is_due and now < self._fresh_until:
            return []
        self._forget_idle(now)
        self._is_asking = True
        self._asked += 1
        self._is_due = False
        self._not_before = now + self.options.backoff_ms
        names = None if self._wants_all else list(self._wanted)
        is_news = any(name not in self.topics or name in self.errors for name in names or ())
        request = metadata_request(names, create=self.options.allow_auto_create and is_news)
        return [
            struct_call(
                ApiKey.METADATA,
                request,
                self._answered,
                min_version=1,
                timeout_ms=self.options.timeout_ms,
                is_expendable=True,
            )
        ]

    def deadline(self) -> float:
        """When `calls` should next be asked."""
        if self._is_asking:
            return float("inf")
        return self._not_before if self._is_due else max(self._fresh_until, self._not_before)

    def apply(self, info: ClusterInfo, now: float) -> None:
        """Merge an answer into the cache."""
        if info.brokers:
            self.brokers = {broker.node_id: broker for broker in info.brokers}
        self.controller = info.controller
        self.cluster_id = info.cluster_id
        for topic in info.topics:
            self._apply_topic(topic, now)
        self.version += 1
        self._answered_up_to = self._asked
        self._fresh_until = now + self.options.max_age_ms

    def _apply_topic(self, topic: TopicInfo, now: float) -> None:
        if topic.error_code != ErrorCode.NONE:
            if topic.name in self._wanted:
                code = BrokerError(topic.error_code).code.name
                self._trouble.tell(topic.name, f"topic {topic.name!r} is not there: {code}", now)
            self.errors[topic.name] = topic.error_code
            self._denied_at[topic.name] = now
            self._is_due = True
            return
        self._trouble.over(topic.name, f"topic {topic.name!r} is there")
        self.errors.pop(topic.name, None)
        self._denied_at.pop(topic.name, None)
        known = self.topics.get(topic.name)
        if known is not None and known.topic_id != topic.topic_id:
            # Deleted and created anew: epochs start over.
            self._forget_leaders(known)
        self.topics[topic.name] = topic
        for partition in topic.readable:
            key = TopicPartition(topic.name, partition.partition)
            if self._is_believed(key, partition.leader_epoch, now):
                self._leaders[key] = (partition.leader, partition.leader_epoch)
        # Of what is retired, whoever reads it asks.
        if any(self.leader(topic.name, item.partition) is None for item in topic.partitions):
            self._is_due = True

    def _is_believed(self, key: TopicPartition, epoch: int, now: float) -> bool:
        """Whether an answer of this epoch says who leads.

        A lower epoch than the known one is of a broker that is behind. If all answers keep saying
        it, the known one is wrong: of a damaged answer, or of a cluster that was set up anew.
        """
        known = self._leaders.get(key)
        if known is None or epoch >= known[1]:
            self._doubted_since.pop(key, None)
            return True
        if now - self._doubted_since.setdefault(key, now) < DOUBT_MS:
            return False
        del self._doubted_since[key]
        return True

    def _forget_idle(self, now: float) -> None:
        if self.options.idle_ms == float("inf"):
            return
        for name in [*self._wanted]:
            used_at = self._used_at.setdefault(name, now)
            is_gone = name in self.topics and used_at < self._denied_at.get(name, used_at)
            if not is_gone and now - used_at < self.options.idle_ms:
                continue
            del self._wanted[name], self._used_at[name]
            self.errors.pop(name, None)
            self._denied_at.pop(name, None)
            topic = self.topics.pop(name, None)
            if topic is not None:
                self._forget_leaders(topic)

    def _forget_leaders(self, topic: TopicInfo) -> None:
        for partition in topic.readable:
            key = TopicPartition(topic.name, partition.partition)
            self._leaders.pop(key, None)
            self._doubted_since.pop(key, None)

    def _forget_deleted(self, info: ClusterInfo) -> None:
        """Of an answer about all topics, what is not in it is gone."""
        known = {topic.name for topic in info.topics}
        for name in [name for name in self.topics if name not in known]:
            del self.topics[name]
        for key in [key for key in self._leaders if key.topic not in known]:
            del self._leaders[key]
            self._doubted_since.pop(key, None)

    def _answered(self, response: Any, error: ClientError | None, now: float) -> None:
        self._is_asking = False
        if error is None and getattr(response, "error_code", None):
            error = BrokerError(response.error_code, about="metadata")
        if error is not None:
            self.last_error = error
            self._failures += 1
            self._is_due = True
        else:
            self.last_error = None
            if self.unreachable:
                LOG.info("brokers can be reached (again)")
            self.unreachable = ""
            info = read_metadata(response)
            self.apply(info, now)
            if self._wants_all:
                self._forget_deleted(info)
            # Leaderless or refused topics are asked for again, ever more slowly.
            self._failures = self._failures + 1 if self._is_due else 0
        backoff = self.options.backoff_ms * 2 ** min(self._failures, 10)
        self._not_before = max(self._not_before, now + min(backoff, self.options.backoff_max_ms))
        if not self._failures:
            self._not_before = min(self._not_before, now + self.options.backoff_ms)
