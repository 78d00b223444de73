"""Raft cores over logs in memory and a network in a list: the smallest world they can live in.

A node does what the replica engine does, no more: it keeps the log and the journal, holds promises
back until they are durable, and can crash. Nothing happens by itself; a test or a script decides
which message is delivered, which disk is flushed and whose clock ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

from attrs import define, evolve, field

from raftmq.ports import Buggify, never
from raftmq.raft.core import RaftCore
from raftmq.raft.epoch_history import EpochHistory
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Entry, EntryKind, HardState, Message, Ready, StoredChunk
from raftmq.raft.replica_state import RaftConfig
from raftmq.types import Buffer, NodeId, RaftIndex, ReplicaId, StorageId, Term


def replica(node_id: int, storage_id: int = 0) -> ReplicaId:
    """A short-hand: node `n` with storage `n`, unless said otherwise."""
    return ReplicaId(NodeId(node_id), StorageId(storage_id or node_id))


def configuration(voters: Iterable[int], learners: Iterable[int] = ()) -> Configuration:
    """Voters and learners by node id."""
    return Configuration(tuple(map(replica, voters)), tuple(map(replica, learners)))


def entry(start: int, term: int, width: int = 1, payload: bytes = b"") -> Entry:
    """A batch of `width` positions."""
    return Entry(RaftIndex(start), RaftIndex(start + width), Term(term), EntryKind.BATCH, payload)


def entries_of(terms: Iterable[int], start: int = 0) -> list[Entry]:
    """One entry of one position per term."""
    return [
        entry(start + position, term, payload=f"{term}.{start + position}".encode())
        for position, term in enumerate(terms)
    ]


@define
class Disk:
    """What a crash leaves: log, its start, and the journal."""

    entries: list[Entry] = field(factory=list)
    log_start: RaftIndex = RaftIndex(0)
    previous_term: Term = Term(0)
    base: Configuration = field(factory=Configuration)
    hard_state: HardState = HardState()

    @property
    def log_end(self) -> RaftIndex:
        return self.entries[-1].end if self.entries else self.log_start

    def copy(self) -> Disk:
        return evolve(self, entries=list(self.entries))


@define
class Held:
    """A promise that waits for the disk."""

    message: Message
    log_end: RaftIndex
    sequence: int


class Node:
    """One replica: a core, its log, its journal."""

    def __init__(
        self,
        config: RaftConfig,
        disk: Disk,
        *,
        commit_end: int = 0,
        seed: int = 0,
        send: Callable[[Message], None],
        buggify: Buggify = never,
    ) -> None:
        self.config = config
        self.self_id = config.self_id
        self.disk = disk  # durable
        self.cache = disk.copy()  # as written, flushed or not
        self.was_cut = False  # something durable was truncated and the truncation is not flushed
        self.auto_flush = True
        self.can_read = True
        self.is_up = True
        self.seed = seed
        self.commit_hint = RaftIndex(commit_end)
        self.buggify = buggify
        self._send = send
        self._held: list[Held] = []
        self._sequence = 0
        self._flushed_sequence = 0
        self.on_ready: Callable[[Node, Ready], None] = lambda _node, _ready: None
        self.core = self._start()

    def _start(self) -> RaftCore:
        cache = self.cache
        return RaftCore(
            self.config,
            hard_state=cache.hard_state,
            epochs=epochs_of(cache),
            configuration=cache.base,
            configuration_history=[
                (each.start, Configuration.decode(each.payload))
                for each in cache.entries
                if each.kind is EntryKind.MEMBERSHIP
            ],
            flushed_end=cache.log_end,
            commit_end=max(cache.log_start, min(self.commit_hint, cache.log_end)),
            source=self,
            random=Random(self.seed),
            buggify=self.buggify,
        )

    # EntrySource

    def entries(self, start: RaftIndex, bytes_max: int) -> tuple[Entry, ...]:
        found: list[Entry] = []
        if not self.can_read:
            return ()
        size = 0
        for each in self.cache.entries:
            if each.end <= start:
                continue
            size += len(each.payload)
            if found and size > bytes_max:
                break
            found.append(each)
        return tuple(found)

    def stored(self, _start: RaftIndex, _bytes_max: int) -> StoredChunk | None:
        return None  # all is in memory

    def admit(self, *_: object, **_more: object) -> bool:
        return True

    def is_waiting(self) -> bool:
        return False

    def grown(self, _entries: object) -> None:
        """There is no limit."""

    def log_start_payload(self) -> Buffer:
        return b"log start"

    # Engine

    def drain(self) -> None:
        """Perform all effects."""
        while (ready := self.core.ready()) is not None:
            self._perform(ready)
            if self.auto_flush:
                self.flush()

    def _perform(self, ready: Ready) -> None:
        cache = self.cache
        if ready.hard_state is not None:
            assert ready.hard_state.term >= cache.hard_state.term
            cache.hard_state = ready.hard_state
            self._sequence += 1
        if ready.install is not None:
            install = ready.install
            cache.entries.clear()
            cache.log_start = install.log_start
            cache.previous_term = install.previous_term
            cache.base = Configuration.decode(install.configuration)
            self.was_cut = True
            for held in self._held:
                held.log_end = min(held.log_end, cache.log_end)
        if ready.truncate_end is not None:
            while cache.log_end > ready.truncate_end:
                cache.entries.pop()
            assert cache.log_end == ready.truncate_end, "truncated inside an entry"
            self.was_cut = True
            for held in self._held:
                held.log_end = min(held.log_end, cache.log_end)
        for each in ready.append:
            assert each.start >= cache.log_end
            cache.entries.append(each)
        assert cache.log_end == self.core.log_end
        self._held += [
            Held(message, cache.log_end, self._sequence) for message in ready.send_after_flush
        ]
        self.on_ready(self, ready)
        for message in ready.send_now:
            self._send(message)

    def flush(self) -> None:
        """All that was written becomes durable; promises made until then leave."""
        self.disk = self.cache.copy()
        self.was_cut = False
        self._flushed_sequence = self._sequence
        self.core.advance(self.cache.log_end)
        # Not before: above the flushed end a crash may bring back what a truncation dropped.
        self.commit_hint = min(self.core.commit_end, self.cache.log_end)
        held, self._held = self._held, []
        for each in held:
            assert each.log_end <= self.cache.log_end
            assert each.sequence <= self._flushed_sequence
            if each.message.term >= self.core.term:
                self._send(each.message)

    def crash(self, survives: int = 0) -> None:
        """Lose what is not durable, but for the first `survives` unflushed entries."""
        self.is_up = False
        cache, self.cache = self.cache, self.disk.copy()
        if not self.was_cut:
            unflushed = [each for each in cache.entries if each.start >= self.cache.log_end]
            self.cache.entries += unflushed[:survives]
        self.was_cut = False
        self._held.clear()

    def restart(self) -> None:
        """Come up with what the crash left."""
        self.disk = self.cache.copy()
        self.is_up = True
        self.seed += 1
        self.commit_hint = min(self.commit_hint, self.cache.log_end)
        self.core = self._start()

    def trim(self, log_start: int) -> None:
        """Drop the log below a committed position."""
        start = RaftIndex(log_start)
        previous_term = self.core.epochs.term_at_end(start)
        base = self.core.configurations.committed(start)[1]
        for disk in (self.cache, self.disk):
            disk.entries = [each for each in disk.entries if each.end > start]
            disk.log_start, disk.previous_term, disk.base = start, previous_term, base
        self.core.log_start_moved(start, previous_term)


def epochs_of(disk: Disk) -> EpochHistory:
    """The epochs of a log in memory."""
    epochs: list[tuple[Term, RaftIndex]] = []
    for each in disk.entries:
        if not epochs or epochs[-1][0] != each.term:
            epochs.append((each.term, disk.log_start if not epochs else each.start))
    return EpochHistory(
        epochs,
        log_start=disk.log_start,
        previous_term=disk.previous_term,
        log_end=disk.log_end,
    )


class Network:
    """Nodes by number, and the messages between them."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.flight: list[Message] = []
        self.cut: list[tuple[int, int]] = []  # (from, to) pairs that lose everything
        self.on_send: Callable[[Message, bool], None] = lambda _message, _is_lost: None

    def add(
        self, node_id: int, disk: Disk, *, seed: int = 0, commit_end: int = 0, **settings: Any
    ) -> Node:
        """A node with this disk; further settings are the core's."""
        buggify = settings.pop("buggify", never)
        self_id = settings.pop("self_id", replica(node_id))
        node = Node(
            RaftConfig(self_id, **settings),
            disk,
            commit_end=commit_end,
            seed=seed,
            send=self.send,
            buggify=buggify,
        )
        self.nodes[node_id] = node
        return node

    def core(self, node_id: int) -> RaftCore:
        """The core of one node."""
        return self.nodes[node_id].core

    def send(self, message: Message) -> None:
        """Take a message on its way, or lose it."""
        is_lost = (message.sender.node_id, message.to.node_id) in self.cut
        self.on_send(message, is_lost)
        if not is_lost:
            self.flight.append(message)

    def deliver(self, message: Message) -> None:
        """Hand one message in flight to its receiver."""
        self.flight.remove(message)
        node = self.nodes.get(message.to.node_id)
        if node is not None and node.is_up:
            node.core.step(message)
            node.drain()

    def settle(self, wanted: Callable[[Message], bool] = lambda _message: True) -> None:
        """Deliver what is in flight, oldest first, and what that causes, until nothing is left."""
        for node in list(self.nodes.values()):
            if node.is_up:
                node.drain()
        for _ in range(10_000):
            message = next((each for each in self.flight if wanted(each)), None)
            if message is None:
                return
            self.deliver(message)
        raise AssertionError("the group does not come to rest")

    def tick(self, *node_ids: int, count: int = 1) -> None:
        """Let time pass on these nodes, or on all, delivering nothing."""
        for _ in range(count):
            for node_id in node_ids or tuple(self.nodes):
                node = self.nodes[node_id]
                if node.is_up:
                    node.core.tick()
                    node.drain()

    def partition(self, *sides: Iterable[int]) -> None:
        """Lose all messages between nodes of different sides, in both directions."""
        groups = [tuple(side) for side in sides]
        self.cut = [
            (one, other)
            for group in groups
            for one in group
            for other_group in groups
            if other_group is not group
            for other in other_group
        ]

    def heal(self) -> None:
        """Lose nothing more."""
        self.cut = []

    def elect(self, node_id: int) -> RaftCore:
        """Make a node stand for election and deliver everything."""
        core = self.core(node_id)
        core.campaign()
        self.nodes[node_id].drain()
        self.settle()
        assert core.is_leader, f"{node_id} was not elected"
        return core


def group(
    voters: Iterable[int],
    learners: Iterable[int] = (),
    *,
    logs: dict[int, list[int]] | None = None,
    terms: dict[int, int] | None = None,
    **settings: Any,
) -> Network:
    """A network with one node per member; `logs` are the terms of its first entries."""
    network = Network()
    base = configuration(voters, learners)
    for member in base.members:
        node_id = int(member.node_id)
        entries = entries_of((logs or {}).get(node_id, []))
        term = (terms or {}).get(node_id, entries[-1].term if entries else 0)
        disk = Disk(entries, base=base, hard_state=HardState(Term(term)))
        network.add(node_id, disk, seed=node_id, **settings)
    return network
