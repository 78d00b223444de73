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

NO_EPOCHS: Final[Mapping[Where, int]] = {}
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
    known: Mapping[Where, tuple[int, int]] = Factory(dict)
    """Positions, and the leader epochs that they were asked with."""

    def request(
        self, asked: Mapping[Where, int], epochs: Mapping[Where, int] = NO_EPOCHS
    ) -> FetchRequest:
        """A request for these positions, with the leader epochs that the asker knows (KIP-320)."""
        topics: dict[str, FetchTopic] = {}
        for (topic, index), offset in asked.items():
            epoch = epochs.get((topic, index), -1)
            if self.known.get((topic, index)) != (offset, epoch):
                wanted = topics.setdefault(topic, FetchTopic(topic, None, []))
                wanted.partitions.append(
                    FetchPartition(
                        index,
                        current_leader_epoch=epoch,
                        fetch_offset=offset,
                        partition_max_bytes=FETCH_BYTES,
                    )
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

    def after(
        self, asked: Mapping[Where, int], session_id: int, epochs: Mapping[Where, int] = NO_EPOCHS
    ) -> Session:
        """The session once that was answered."""
        known = {where: (offset, epochs.get(where, -1)) for where, offset in asked.items()}
        return Session(session_id, self.epoch + 1, known)


NO_SESSION: Final = Session()
