"""What a node is built on: all that differs between a process and the simulation.

`composition.py` builds the same node on any of it. The real one (trio, sockets, threads, files) is
made by `node.py`, the simulated one by `jepsen_like`. Owns no behaviour.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from attrs import field, frozen

from raftmq.config import Address
from raftmq.counts import Histogram
from raftmq.metadata.features import SUPPORTED, Ranges
from raftmq.partition.produce_checks import OpeningWorkers
from raftmq.ports import Buggify, Clock, Disk, DiskError, Random, Runnable, never
from raftmq.promise import Promise
from raftmq.raft.messages import StoredChunk
from raftmq.replication.catch_up import CatchUp, CatchUpRate
from raftmq.runtime.clock import CoreTimes
from raftmq.runtime.data_folder import DataFolder
from raftmq.runtime.peer_hello import PeerIdentity
from raftmq.runtime.peer_streams import StreamCounts
from raftmq.runtime.threads import WorkerPool
from raftmq.server.audit import AuditSink
from raftmq.types import Buffer, NodeId

T = TypeVar("T")


class Tasks(Protocol):
    """How waiting code is run: by trio in a node, on virtual time in the simulation."""

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for this long; at least for one turn."""
        ...

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run `work` where it holds up nothing else; returns or raises what it does."""
        ...

    async def wait(self, promise: Promise[T]) -> T:
        """The promise's value, once it is settled; raises what it failed with."""
        ...

    async def together(self, tasks: Iterable[Callable[[], Awaitable[None]]]) -> None:
        """Run all of them at once, until the last one ends."""
        ...


class PeerEvents(Protocol):
    """What links report to their node."""

    def frame_received(self, sender: PeerIdentity, kind: int, payload: memoryview) -> None:
        """A whole frame arrived.

        Raises:
            RemoteProtocolError: the connection that it came by is to be closed.
        """
        ...

    def peer_introduced(self, identity: PeerIdentity) -> None:
        """A peer gave its identity, on a stream to it or from it."""
        ...

    def peer_lost(self, node_id: NodeId) -> None:
        """The stream to a peer ended."""
        ...

    def fail(self, reason: str) -> None:
        """The node cannot go on: an invariant broke."""
        ...


class Links(Protocol):
    """The connections to and from all peers, as `runtime/peer_links.py` describes them."""

    block_to: frozenset[NodeId]
    block_from: frozenset[NodeId]

    @property
    def refusals(self) -> Mapping[str, int]: ...
    def send(self, node_id: NodeId, kind: int, pieces: Sequence[Buffer]) -> bool: ...
    def send_stored(self, node_id: NodeId, head: Sequence[Buffer], chunk: StoredChunk) -> bool: ...
    def has_room_for_stored(self, node_id: NodeId, size_bytes: int) -> bool: ...
    def is_connected(self, node_id: NodeId) -> bool: ...
    def has_ended(self, node_id: NodeId) -> bool: ...
    def set_addresses(self, addresses: Mapping[NodeId, Address]) -> None: ...
    def set_formation(self, formation_id: str) -> None: ...
    def demand(self, oldest: int, why: str) -> None: ...
    def version(self, node_id: NodeId) -> int: ...
    def queued_bytes(self) -> dict[NodeId, int]: ...
    def streams(self) -> Iterable[tuple[NodeId, str]]: ...
    def counts(self, node_id: NodeId, name: str) -> StreamCounts: ...


class FlushPool(Protocol):
    """Where fdatasync happens."""

    latency: Histogram

    def submit(self, job: Runnable, done: Callable[[DiskError | None], None]) -> None:
        """Run the job elsewhere, then `done(error)` on the loop."""
        ...

    def longest_ms(self) -> float:
        """How long ago the oldest job that has not come back was submitted; 0 where none is out."""
        ...

    def close(self) -> None:
        """Take no more jobs; return when all submitted ones are done."""
        ...


class ClosingOpeners(OpeningWorkers, Protocol):
    """Threads that walk produced batches; can be closed."""

    def close(self) -> None:
        """Begin nothing more."""
        ...


class RatedCatchUp(CatchUp, Protocol):
    """Catch-up with its limit; can be closed."""

    def close(self) -> None:
        """Begin nothing more."""
        ...


@frozen(slots=True, kw_only=True)
class Environment:
    """What one node is built on.

    Attributes:
        connect: makes the links, which then report to the given `PeerEvents`.
        make_catch_up: makes the node's part in catch-up over these links.
        batch_openers: walk produced batches, some of which take long.
        disk_space: (size, free) of the file system below the data folder, in bytes.
        make_lock: makes locks for what worker threads share with the loop.
        core_times: how long the loop's thread ran, and was ready and had no core, so far.
        core_stolen_ms: how long the host took the cores away, so far.
        audit_sink: where lines of the audit go; None where none is kept.
        buggify: makes rarely taken branches frequent; never, outside the simulation.
        supported: levels of features, of this node's version.
    """

    disk: Disk
    folder: DataFolder
    clock: Clock
    random: Random
    tasks: Tasks
    flusher: FlushPool
    workers: WorkerPool
    connect: Callable[[PeerEvents], Links]
    make_catch_up: Callable[[Links, CatchUpRate], RatedCatchUp]
    batch_openers: ClosingOpeners
    disk_space: Callable[[], tuple[int, int]]
    make_lock: Callable[[], AbstractContextManager[Any]]
    core_times: Callable[[], CoreTimes]
    core_stolen_ms: Callable[[], float]
    audit_sink: AuditSink | None
    buggify: Buggify = never
    supported: Ranges = field(factory=lambda: SUPPORTED)
