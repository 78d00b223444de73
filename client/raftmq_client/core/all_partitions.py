"""All partitions of some topics for a consumer that is in no group: nobody else shares them.

Owns which topics are wanted, and gives the fetcher their partitions as metadata tells of them: what
is created later is read, too, what was deleted is no longer. Sends nothing itself; metadata asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from raftmq.types import TopicPartition
from raftmq_client.core.call import Call
from raftmq_client.core.fetcher import FetcherCore
from raftmq_client.core.metadata import MetadataCore


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
        known = self._metadata.topics
        names = self._topics if self._pattern is None else tuple(known)
        return [
            TopicPartition(name, item.partition)
            for name in names
            if name in known and self._is_chosen(name)
            for item in known[name].partitions
        ]

    def _is_chosen(self, name: str) -> bool:
        if self._pattern is None:
            return True
        return not self._metadata.topics[name].is_internal and bool(self._pattern.fullmatch(name))
