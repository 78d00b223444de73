"""Fetch sessions as clients have them (KIP-227): what a node remembers of somebody's fetches.

A request names only what the node does not remember; an answer only what is new. Pure values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from attrs import Factory, frozen

from raftmq.errors import ErrorCode
from raftmq.protocol.fetch import FetchPartition, FetchRequest, FetchTopic, ForgottenTopic

Where = tuple[str, int]

FETCH_BYTES: Final = 4_096
WAIT_MS: Final = 100
SESSION_LOST: Final = (
    ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
    ErrorCode.INVALID_FETCH_SESSION_EPOCH,
)


@frozen
class Session:
    """What a node remembers of one client."""

    session_id: int = 0
    epoch: int = 0
    known: Mapping[Where, int] = Factory(dict)

    def request(self, asked: Mapping[Where, int]) -> FetchRequest:
        """A request for these positions."""
        topics: dict[str, FetchTopic] = {}
        for (topic, index), offset in asked.items():
            if self.known.get((topic, index)) != offset:
                wanted = topics.setdefault(topic, FetchTopic(topic, None, []))
                wanted.partitions.append(
                    FetchPartition(index, fetch_offset=offset, partition_max_bytes=FETCH_BYTES)
                )
        forgotten: dict[str, ForgottenTopic] = {}
        for topic, index in self.known:
            if (topic, index) not in asked:
                left = forgotten.setdefault(topic, ForgottenTopic(topic, None, []))
                left.partitions.append(index)
        return FetchRequest(
            max_wait_ms=WAIT_MS,
            session_id=self.session_id,
            session_epoch=self.epoch,
            topics=list(topics.values()),
            forgotten=list(forgotten.values()),
        )

    def after(self, asked: Mapping[Where, int], session_id: int) -> Session:
        """The session once that was answered."""
        return Session(session_id, self.epoch + 1, dict(asked))


NO_SESSION: Final = Session()
