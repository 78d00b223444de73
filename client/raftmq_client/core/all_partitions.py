"""All partitions of some topics for a consumer that is in no group: nobody else shares them.

Owns which topics are wanted, and gives the fetcher their partitions as metadata tells of them: what
is created later is read, too, and so is what a topic lists no more. What an answer leaves out
stays, with its position: a broker that has just started may know few topics. Sends nothing itself;
metadata asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from raftmq.types import TopicPartition
from raftmq_client.core.call import Call
from raftmq_client.core.fetcher import FetcherCore
from raftmq_client.core.metadata import MetadataCore, without_views


class AllPartitions:
    """Keeps a fetcher reading every partition of the wanted topics."""

    def __init__(self, fetcher: FetcherCore, metadata: MetadataCore) -> None:
        self._fetcher = fetcher
        self._metadata = metadata
        self._topics: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self._seen_version = -1

    def want(self, topics: Iterable[str] | re.Pattern[str]) -> None:
        """Read these topics, or all whose whole name a pattern matches, from now on."""
        self._seen_version = -1
        if isinstance(topics, re.Pattern):
            self._topics, self._pattern = (), topics
            self._metadata.want_all()
        else:
            self._topics, self._pattern = tuple(dict.fromkeys(topics)), None
            self._metadata.want(self._topics)

    def calls(self, _now: float) -> list[Call]:
        """Look at metadata that is new; there is nothing to send."""
        version = self._metadata.version
        is_wanted = self._pattern is not None or bool(self._topics)
        if is_wanted and version and version != self._seen_version:
            self._seen_version = version
            self._fetcher.assign(self._partitions())
        return []

    def deadline(self) -> float:
        """Never by itself: an answer about metadata wakes everybody."""
        return float("inf")

    def _partitions(self) -> list[TopicPartition]:
        before = [key for key in self._fetcher.readers if self._is_chosen(key.topic)]
        topics = [
            topic
            for topic in self._metadata.topics.values()
            if self._is_chosen(topic.name) and not (self._pattern and topic.is_internal)
            if topic.name not in self._metadata.errors  # a view that there was
        ]
        told = [
            TopicPartition(topic.name, item.partition)
            for topic in without_views(topics)
            for item in topic.readable
        ]
        return list(dict.fromkeys([*before, *told]))

    def _is_chosen(self, name: str) -> bool:
        if self._pattern is None:
            return name in self._topics
        return self._pattern.fullmatch(name) is not None
