"""The clients that still write to retired partitions, as they name themselves.

Each node notes the clients that write to it as the leader of such a partition. Operators learn from
that which programs have to be started again before the seal, or have failed since. Nothing is
decided by it. What is kept is bounded: the latest writers of some partitions, with names cut short.
"""

from __future__ import annotations

from typing import Any, Final

from attrs import frozen

from raftmq.metadata.image import MetadataImage, TopicImage
from raftmq.ports import Clock
from raftmq.server.kafka.request_context import RequestContext
from raftmq.types import TopicId, TopicPartition

PARTITIONS_MAX: Final = 100
WRITERS_MAX: Final = 32
"""Of one partition."""
NAME_MAX: Final = 100
FORGOTTEN_MS: Final = 3_600_000.0


@frozen(slots=True)
class _Writer:
    client_id: str
    software: str
    host: str


class RetiredWriters:
    """The latest writers to retired partitions that one node has seen."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[tuple[TopicId, int], dict[_Writer, float]] = {}  # the latest stand last

    def note(self, image: MetadataImage, at: TopicPartition, context: RequestContext) -> None:
        """A client sends records for this partition, which its leader takes or refuses."""
        topic = image.topics.get(at.topic)
        if topic is None or at.partition < len(topic.partitions):
            return
        writer = _Writer(
            (context.client_id or "")[:NAME_MAX], context.connection.software, context.host
        )
        key = topic.topic_id, at.partition
        writers = self._seen.pop(key, {})
        self._seen[key] = writers
        writers.pop(writer, None)
        writers[writer] = self._clock.monotonic_ms()
        if len(writers) > WRITERS_MAX:
            del writers[next(iter(writers))]
        if len(self._seen) > PARTITIONS_MAX:
            del self._seen[next(iter(self._seen))]

    def of(self, topic: TopicImage, index: int) -> list[dict[str, Any]]:
        """Who wrote within the last hour, the latest first; nobody where it is listed again."""
        if index < len(topic.partitions):
            return []
        now_ms = self._clock.monotonic_ms()
        return [
            {
                "client_id": writer.client_id,
                "software": writer.software,
                "host": writer.host,
                "ago_s": round((now_ms - at_ms) / 1000, 1),
            }
            for writer, at_ms in reversed(self._seen.get((topic.topic_id, index), {}).items())
            if now_ms - at_ms < FORGOTTEN_MS
        ]
