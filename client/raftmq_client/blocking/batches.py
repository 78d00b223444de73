"""Reads one partition as the batches that were written, for those who decode in bulk.

Owns an engine of its own, prefetches while the caller works, and makes no object per record.
Retries, leader changes and transactions are the fetcher's (`core/fetcher.py`); batches come in
order, with their checksums checked. Reads committed records only, and never resets a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self
from uuid import UUID

from raftmq.errors import ErrorCode
from raftmq.records import BatchHeader
from raftmq.types import TopicPartition
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core.admin import EARLIEST, LATEST, READ_COMMITTED
from raftmq_client.core.admin_flow import AdminFlows
from raftmq_client.core.build import build_client
from raftmq_client.core.fetcher import FetcherCore, FetcherOptions, Reset
from raftmq_client.core.security import SecurityChoice

_MAX_WAIT_MS: Final = 500


class BatchReader:
    """Batches of one partition from an offset on: `with BatchReader(...) as reader: ...`.

    Not thread safe: one thread reads. The first batch may begin below `start`, the last ones may
    reach beyond `end`, where fetching stops.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        partition: TopicPartition,
        start: int,
        *,
        client_id: str = "raftmq-batches",
        security: SecurityChoice = None,
        rack: str = "",
        end: int | None = None,
        fetch_bytes: int = 8 << 20,
        request_timeout_ms: float = 30_000,
    ) -> None:
        options = FetcherOptions(
            reset=Reset.NONE,
            isolation=READ_COMMITTED,
            max_wait_ms=_MAX_WAIT_MS,
            max_bytes=fetch_bytes,
            partition_bytes_max=fetch_bytes,
            # One answer waits while the one before it is decoded; most are nearly full.
            partition_buffer_bytes=fetch_bytes // 2,
            buffer_bytes_max=fetch_bytes * 2,
            request_timeout_ms=request_timeout_ms,
            rack=rack,
        )
        self._partition = partition
        self._end = end
        client = build_client(bootstrap, client_id, security, may_create_topics=False)
        self._engine = Engine(client, name=client_id)
        self._fetcher = FetcherCore(options, self._engine.client.metadata)
        self._engine.client.cores.append(self._fetcher)
        self._fetcher.assign([partition])
        self._fetcher.seek(partition, start)
        self._engine.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop fetching."""
        self._engine.close()

    @property
    def position(self) -> int:
        """Everything below it was handed out, or is not for consumers."""
        with self._engine.lock:
            position = self._fetcher.readers[self._partition].position
        assert position is not None, "Reset.NONE never gives a position up"
        return position

    def seek(self, offset: int) -> None:
        """Go on at another offset."""
        with self._engine.lock:
            self._engine.check()
            self._fetcher.seek(self._partition, offset)
            self._engine.wake()

    def read(self, timeout: float = 1.0) -> list[tuple[BatchHeader, memoryview]]:
        """Batches that are there, or that come within `timeout` seconds; maybe none.

        Raises:
            NoOffsetError: the position is below the log start or above the log end.
            ClientError: the partition cannot go on.
        """
        engine, fetcher = self._engine, self._fetcher
        metadata = engine.client.metadata
        with engine.lock:
            engine.check()
            engine.wait_for(
                lambda: fetcher.has_records or metadata.refusal is not None,
                now_ms() + timeout * 1000,
            )
            if metadata.refusal is not None:
                raise metadata.refusal
            taken = fetcher.take_batches(self._partition)
            reader = fetcher.readers[self._partition]
            reader.is_paused = self._end is not None and reader.fetch_offset >= self._end
            engine.wake()  # room for more
            return taken

    def bounds(self, timeout: float = 10.0) -> tuple[int, int]:
        """The log start and the last stable offset, from the leader."""
        flows = AdminFlows(self._engine.client, now_ms, timeout * 1000)
        found = []
        for which in (EARLIEST, LATEST):
            wanted = {self._partition: which}
            answer = self._engine.run(flows.list_offsets(wanted, isolation=READ_COMMITTED))
            found.append(answer[self._partition].offset)
        return found[0], found[1]

    def topic_id(self, timeout: float = 10.0) -> UUID | None:
        """The topic's id as a broker tells it now.

        Raises:
            BrokerError: there is no such topic.
        """
        flows = AdminFlows(self._engine.client, now_ms, timeout * 1000)
        return self._engine.run(flows.topic(self._partition.topic)).topic_id

    @property
    def trouble(self) -> str:
        """Why nothing comes, for people."""
        with self._engine.lock:
            return self._engine.client.metadata.why_not(self._partition.topic)

    @property
    def is_unknown(self) -> bool:
        """True while the brokers' last word is that there is no such topic or partition."""
        topic, number = self._partition
        with self._engine.lock:
            code = self._engine.client.metadata.errors.get(topic)
            info = self._engine.client.metadata.topics.get(topic)
        if code is not None or info is None:
            return code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        return not info.has(number)
