"""The node's part of catch-up without threads and streams: done at once, sent as other frames."""

from __future__ import annotations

from collections.abc import Callable

from raftmq.ports import DiskError, Runnable
from raftmq.raft.messages import StoredChunk
from raftmq.replication.catch_up import CatchUpRate
from raftmq.replication.multiraft import SendFrame, SendStored, Stream
from raftmq.types import Buffer, NodeId
from tests.log.helpers import FakeClock


class InlineCatchUp:
    """Runs jobs at once, with the limit that it is given."""

    def __init__(self, rate: CatchUpRate | None = None) -> None:
        self.rate = rate or CatchUpRate(FakeClock(), 0)

    def run(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        error: DiskError | None = None
        try:
            job.run()
        except DiskError as failure:
            error = failure
        done(error)

    def run_long(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        self.run(job, done)

    def has_room(self, _to: NodeId, _size_bytes: int) -> bool:
        return True


def stored_as_frames(send: SendFrame) -> SendStored:
    """Reads a chunk's span and sends it behind its head, among the other frames."""

    def send_stored(to: NodeId, head: list[Buffer], chunk: StoredChunk) -> bool:
        if (span := chunk.span) is not None:
            try:
                head.append(span.file.pread(span.size, span.position))
            except DiskError:
                return False  # asked for again; the log meets the same error then
        return send(to, head, Stream.BULK)

    return send_stored
