"""How a new cluster agrees on its first metadata voters: single-decree Paxos, once in its life.

The configs name the voters by node id; a Raft voter is a node *with its storage*, and storage ids
are drawn at first start. So the nodes named in the configs decide, by majority, on one list of
(node id, storage id); a voter that has not shown up yet stands in it with storage id 0 and is
admitted under its own later, as any replaced disk is. Sans-IO: messages in, messages out.

Invariants: an acceptor's promise and acceptance are saved before they are answered; once chosen, a
list never changes; nodes whose configs differ in cluster id or voter list never count each other.
A wiped node that meets one formed peer learns the list and forms nothing: it asks every node that
it hears, since all nodes that its config names may have been replaced since. Those that took their
places stand in no config and come by themselves. So a node takes no part in a round before it has
listened for `wait_ms`, nor before a node that it hears for the first time had time to answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, TypeAlias
from zlib import crc32

import msgspec

from raftmq.errors import RemoteProtocolError
from raftmq.foreign import NODE_ID_MAX, POSITION_MAX, decode_foreign
from raftmq.metadata.state_machine import Skip
from raftmq.ports import Random
from raftmq.types import NodeId, ReplicaId, StorageId

UNBOUND_STORAGE: Final = StorageId(0)
"""Stands for the storage of a voter that had not shown up when the cluster formed."""
GRACE_MS: Final = 400
"""How long a proposer that hears a majority waits for the rest of the voters."""
ROUND_MS: Final = 500
ANSWER_MS: Final = 1_000
"""How long a node that was heard for the first time is given to say that it knows a cluster."""

_Node: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=NODE_ID_MAX)]
Ballot: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0, le=POSITION_MAX)], _Node]
NO_BALLOT: Final[Ballot] = (0, 0)
Value: TypeAlias = tuple[tuple[_Node, int], ...]
HEARD_MAX: Final = 64
"""So many nodes are asked whether the cluster is formed; the voters in any case."""
AWAITED_MAX: Final = 16
"""A node that knows fewer nodes than these waits for the answer of another one; for a voter's in
any case. Nobody has proved who it is: whoever can dial could hold up a new cluster."""
BALLOT_JUMP_MAX: Final = 1 << 32
"""So far above the one promised here a ballot is believed; a round takes half a second."""


class TermReset(msgspec.Struct, frozen=True):
    """A term that this node forgot by an operator's order, for the record.

    `group` is TOPIC_ID:PARTITION:CREATION_EPOCH, `vote` NODE:STORAGE or nothing; `tokens` are what
    was found on the voters' disks.
    """

    group: str
    term: int
    vote: str
    new_term: int
    tokens: tuple[str, ...]


class FormationState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an acceptor must not forget.

    `recoveries` are the lists of survivors of unsafe recoveries, one after the other; `recovering`
    is one that is not finished, and keeps the node from starting. `skips` are metadata commands
    that this node passes over by an operator's order, `term_resets` terms that it forgot by one.
    """

    promised: Ballot = NO_BALLOT
    accepted: Ballot = NO_BALLOT
    accepted_value: Value = ()
    chosen: Value = ()
    recoveries: tuple[str, ...] = ()
    recovering: str = ""
    skips: tuple[Skip, ...] = ()
    term_resets: tuple[TermReset, ...] = ()


class Prepare(msgspec.Struct, tag="prepare", frozen=True):
    """Phase 1a, with what the sender's config says."""

    ballot: Ballot
    voters: tuple[int, ...]


class Promised(msgspec.Struct, tag="promised", frozen=True):
    """Phase 1b."""

    ballot: Ballot
    accepted: Ballot
    accepted_value: Value


class Accept(msgspec.Struct, tag="accept", frozen=True):
    """Phase 2a."""

    ballot: Ballot
    value: Value


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """Phase 2b."""

    ballot: Ballot


class Outbid(msgspec.Struct, tag="outbid", frozen=True):
    """A higher ballot was promised."""

    ballot: Ballot


class Mismatch(msgspec.Struct, tag="mismatch", frozen=True):
    """The voter lists of the two configs differ."""

    voters: tuple[int, ...]


class Ask(msgspec.Struct, tag="ask", frozen=True):
    """Is the cluster formed? A formed node answers with `Chosen`, others not at all."""


class Chosen(msgspec.Struct, tag="chosen", frozen=True, omit_defaults=True):
    """The decision, and the unsafe recoveries since."""

    value: Value
    recoveries: tuple[str, ...] = ()


FormationMessage: TypeAlias = (
    Prepare | Promised | Accept | Accepted | Outbid | Mismatch | Ask | Chosen
)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FormationMessage)


def formation_id_of(value: Value, recoveries: Sequence[str] = ()) -> str:
    """Name a formation: two clusters of one name but with other first disks differ in it, and so do
    a recovered cluster and the nodes that it gave up."""
    checksum = crc32(_encoder.encode(value))
    for survivors in recoveries:
        checksum = crc32(f"{checksum:08x} recovered {survivors}".encode())
    return f"{checksum:08x}"


class Formation:
    """One node's part in forming the cluster.

    Attributes:
        chosen: the first voters once decided, else None.
        voters: the node ids that this node's config names, sorted.
        mismatches: peers whose config names other voters, with their list.
    """

    def __init__(
        self,
        node_id: NodeId,
        storage_id: StorageId,
        voters: Sequence[NodeId],
        *,
        state: FormationState,
        save: Callable[[FormationState], None],
        send: Callable[[NodeId, bytes], None],
        random: Random,
        wait_ms: float = 0.0,
    ) -> None:
        """`wait_ms`: so long a node listens for a cluster that it belonged to before it helps to
        form a new one; 0 where that is certainly new."""
        self._node_id = node_id
        self.voters: tuple[int, ...] = tuple(sorted(voters))
        self._state = state
        self._save = save
        self._send = send
        self._random = random
        self._heard: dict[int, int] = {node_id: storage_id}
        self._wait_ms = wait_ms
        self._listens_until_ms: float | None = None
        self._is_listening = wait_ms > 0
        self._has_heard_more = False
        self._majority_since_ms: float | None = None
        self._ballot: Ballot = NO_BALLOT
        self._next_round_ms = 0.0
        self._next_ask_ms = 0.0
        self._promises: dict[int, Promised] = {}
        self._acceptances: dict[int, bool] = {}
        self._proposed: Value = ()
        self.mismatches: dict[int, tuple[int, ...]] = {}

    @property
    def chosen(self) -> tuple[ReplicaId, ...] | None:
        """The first voters, once decided."""
        if not self._state.chosen:
            return None
        return tuple(ReplicaId(NodeId(n), StorageId(s)) for n, s in self._state.chosen)

    @property
    def formation_id(self) -> str:
        """Name of the decided formation, "" before."""
        state = self._state
        return formation_id_of(state.chosen, state.recoveries) if state.chosen else ""

    @property
    def heard_from(self) -> list[NodeId]:
        """Nodes that introduced themselves since the start, sorted; without this node."""
        return [NodeId(n) for n in sorted(self._heard) if n != self._node_id]

    def heard(self, node_id: NodeId, storage_id: StorageId) -> None:
        """A peer introduced itself."""
        if node_id in self.voters or node_id in self._heard or len(self._heard) < HEARD_MAX:
            # Once for each: a node that comes with ever new disks would hold up the others.
            is_awaited = node_id in self.voters or len(self._heard) < AWAITED_MAX
            if self._wait_ms and is_awaited and node_id not in self._heard:
                self._has_heard_more = self._is_listening = True
            self._heard[node_id] = storage_id

    def tick(self, now_ms: float) -> None:
        """Propose, or ask, when it is time; call every few milliseconds until chosen."""
        if self._state.chosen:
            return
        if self._wait_ms:
            self._listen(now_ms)
        if now_ms >= self._next_ask_ms:
            self._next_ask_ms = now_ms + ROUND_MS
            for node_id in sorted({*self.voters, *self.heard_from} - {self._node_id}):
                self._tell(node_id, Ask())
        if self._node_id in self.voters and now_ms >= self._next_round_ms:
            self._stand(now_ms)

    def _listen(self, now_ms: float) -> None:
        """Note until when a cluster that is there already may still be heard of."""
        if self._listens_until_ms is None:
            self._listens_until_ms = now_ms + self._wait_ms
        if self._has_heard_more:
            self._has_heard_more = False
            self._listens_until_ms = max(self._listens_until_ms, now_ms + ANSWER_MS)
            self._next_ask_ms = now_ms
        self._is_listening = now_ms < self._listens_until_ms

    def _stand(self, now_ms: float) -> None:
        """Propose, once a majority was heard and it is this node's turn."""
        present = [n for n in self.voters if n in self._heard and n not in self.mismatches]
        if len(present) <= len(self.voters) // 2:
            self._majority_since_ms = None
            return
        if self._majority_since_ms is None:
            self._majority_since_ms = now_ms
        is_complete = len(present) == len(self.voters)
        if not is_complete and now_ms - self._majority_since_ms < GRACE_MS:
            return
        if self._is_listening:
            return
        # The lowest node present goes first; the others wait for a round each.
        rank = present.index(self._node_id)
        since_ms = max(self._majority_since_ms, self._listens_until_ms or 0.0)
        if self._ballot == NO_BALLOT and rank and now_ms - since_ms < (GRACE_MS + rank * ROUND_MS):
            return
        self._next_round_ms = now_ms + ROUND_MS * (1 + self._random.random() * len(self.voters))
        self._propose()

    def receive(self, sender: NodeId, payload: bytes) -> None:
        """Take in a peer's message.

        Raises:
            RemoteProtocolError: not a formation message.
        """
        message = decode_foreign("formation message", _decoder.decode, payload)
        self._check(sender, message)
        if isinstance(message, Chosen):
            self._decide(message.value, message.recoveries)
        elif self._state.chosen:
            self._tell(sender, Chosen(self._state.chosen, self._state.recoveries))
        elif isinstance(message, Prepare):
            self._on_prepare(sender, message)
        elif self._is_listening and isinstance(message, Promised | Accept | Accepted):
            return  # a later round asks again
        elif isinstance(message, Accept):
            self._on_accept(sender, message)
        elif isinstance(message, Promised):
            self._on_promised(sender, message)
        elif isinstance(message, Accepted):
            self._on_accepted(sender, message)
        elif isinstance(message, Mismatch):
            self.mismatches[sender] = message.voters
        elif isinstance(message, Outbid):
            self._ballot = max(self._ballot, message.ballot)

    def _check(self, sender: NodeId, message: FormationMessage) -> None:
        """Refuse what no acceptor may accept, before it is stored for good."""
        if isinstance(message, Prepare | Promised | Accept | Accepted | Outbid):
            known = max(self._ballot, self._state.promised)
            if message.ballot[0] - known[0] > BALLOT_JUMP_MAX:
                raise RemoteProtocolError(f"ballot {message.ballot} of node {sender}: {known} here")
        if isinstance(message, Accept | Chosen):
            nodes = [node_id for node_id, _ in message.value]
            if not nodes or len(dict.fromkeys(nodes)) != len(nodes):
                raise RemoteProtocolError(f"node {sender} names no voters, or one twice")

    def _propose(self) -> None:
        self._ballot = (max(self._ballot, self._state.promised)[0] + 1, self._node_id)
        self._promises = {}
        self._acceptances = {}
        self._proposed = ()
        for node_id in self.voters:
            self._tell(node_id, Prepare(self._ballot, self.voters))

    def _on_prepare(self, sender: NodeId, message: Prepare) -> None:
        if message.voters != self.voters:
            self.mismatches[sender] = message.voters
            self._tell(sender, Mismatch(self.voters))
            return
        self.mismatches.pop(sender, None)
        if self._is_listening:
            return  # the proposer asks again
        if message.ballot < self._state.promised:
            self._tell(sender, Outbid(self._state.promised))
            return
        self._store(msgspec.structs.replace(self._state, promised=message.ballot))
        self._tell(
            sender, Promised(message.ballot, self._state.accepted, self._state.accepted_value)
        )

    def _on_promised(self, sender: NodeId, message: Promised) -> None:
        if message.ballot != self._ballot or self._proposed or sender not in self.voters:
            return
        self._promises[sender] = message
        if len(self._promises) <= len(self.voters) // 2:
            return
        latest = max(self._promises.values(), key=lambda promise: promise.accepted)
        self._proposed = latest.accepted_value or tuple(
            (n, self._heard.get(n, UNBOUND_STORAGE)) for n in self.voters
        )
        for node_id in self.voters:
            self._tell(node_id, Accept(self._ballot, self._proposed))

    def _on_accept(self, sender: NodeId, message: Accept) -> None:
        if message.ballot < self._state.promised:
            self._tell(sender, Outbid(self._state.promised))
            return
        if tuple(node_id for node_id, _ in message.value) != self.voters:
            self._tell(sender, Mismatch(self.voters))
            return
        self._store(FormationState(message.ballot, message.ballot, message.value))
        self._tell(sender, Accepted(message.ballot))

    def _on_accepted(self, sender: NodeId, message: Accepted) -> None:
        if message.ballot != self._ballot or sender not in self.voters:
            return
        self._acceptances[sender] = True
        if len(self._acceptances) > len(self.voters) // 2:
            self._decide(self._proposed)
            for node_id in self.voters:
                self._tell(node_id, Chosen(self._proposed))

    def _decide(self, value: Value, recoveries: tuple[str, ...] = ()) -> None:
        if self._state.chosen:
            if self._state.chosen != value:
                raise RemoteProtocolError(f"another formation of this cluster chose {value}")
            return
        self._store(msgspec.structs.replace(self._state, chosen=value, recoveries=recoveries))

    def _store(self, state: FormationState) -> None:
        self._save(state)
        self._state = state

    def _tell(self, node_id: int, message: FormationMessage) -> None:
        payload = _encoder.encode(message)
        if node_id == self._node_id:
            self.receive(self._node_id, payload)
        else:
            self._send(NodeId(node_id), payload)
