"""Who belongs to a group, from which position of the log on, and what is a majority of them.

A configuration is in force from its append on, committed or not (Raft thesis §4.1), and no longer
once its entry is truncated. A majority of n voters is n // 2 + 1 of them; any two majorities of the
same voters share one, and so do majorities of two voter sets that differ by a single voter. So one
voter changes at a time; learners copy the log and count in no majority, so any number of them may
change with it. Owns the encoding of a membership entry's payload. The counts of majorities are pure
functions over numbers, tested against a brute-force twin that enumerates subsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from struct import Struct, error
from typing import Final, TypeVar

from attrs import field, frozen

from raftmq.errors import AheadError, ErrorCode, KafkaError, RemoteProtocolError
from raftmq.types import NodeId, RaftIndex, ReplicaId, StorageId

LEARNERS_MAX: Final = 1_000
"""Of a group; further requests to join are refused."""
_VERSION: Final = 1
_HEADER: Final = Struct(">BHH")  # version, number of voters, number of learners
_REPLICA: Final = Struct(">iQ")  # node id, storage id; voters first, then learners


def _ascending(replicas: Iterable[ReplicaId]) -> tuple[ReplicaId, ...]:
    return tuple(sorted(replicas))


class NewerConfigurationError(RemoteProtocolError, AheadError):
    """One that a newer raftmq wrote."""


@frozen(slots=True)
class Configuration:
    """The members of a group, sorted, each of them once."""

    voters: tuple[ReplicaId, ...] = field(default=(), converter=_ascending)
    learners: tuple[ReplicaId, ...] = field(default=(), converter=_ascending)
    members: tuple[ReplicaId, ...] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        members = self.voters + self.learners
        if len(dict.fromkeys(members)) != len(members):
            raise KafkaError("a replica twice", code=ErrorCode.INVALID_REPLICA_ASSIGNMENT)
        object.__setattr__(self, "members", members)

    def encode(self) -> bytes:
        """The payload of a membership entry."""
        parts = [_HEADER.pack(_VERSION, len(self.voters), len(self.learners))]
        parts += [_REPLICA.pack(*replica) for replica in self.members]
        return b"".join(parts)

    @classmethod
    def decode(cls, payload: bytes | bytearray | memoryview) -> Configuration:
        """The configuration that `encode` wrote.

        Raises:
            RemoteProtocolError: another version, or bytes that are no configuration.
        """
        try:
            version, voters, learners = _HEADER.unpack_from(payload)
        except error as problem:
            raise RemoteProtocolError("a configuration cut short") from problem
        if version != _VERSION:
            told = f"configuration of version {version}, known is {_VERSION}"
            raise (NewerConfigurationError if version > _VERSION else RemoteProtocolError)(told)
        if len(payload) != _HEADER.size + _REPLICA.size * (voters + learners):
            raise RemoteProtocolError("a configuration of another length than it says")
        replicas = [
            ReplicaId(NodeId(node_id), StorageId(storage_id))
            for node_id, storage_id in _REPLICA.iter_unpack(memoryview(payload)[_HEADER.size :])
        ]
        try:
            return cls(tuple(replicas[:voters]), tuple(replicas[voters:]))
        except KafkaError as problem:
            raise RemoteProtocolError("a configuration that names a replica twice") from problem

    def with_learner(self, replica: ReplicaId) -> Configuration:
        """The same with `replica` as a learner, also if it was a voter."""
        rest = self.without(replica)
        return Configuration(rest.voters, (*rest.learners, replica))

    def with_voter(self, replica: ReplicaId) -> Configuration:
        """The same with `replica` as a voter, also if it was a learner."""
        rest = self.without(replica)
        return Configuration((*rest.voters, replica), rest.learners)

    def without(self, replica: ReplicaId) -> Configuration:
        """The same without `replica`."""
        return Configuration(
            tuple(voter for voter in self.voters if voter != replica),
            tuple(learner for learner in self.learners if learner != replica),
        )


def check_change(old: Configuration, new: Configuration) -> None:
    """Refuse a step whose majorities might not overlap those before it (Raft thesis §4.1).

    Raises:
        KafkaError: INVALID_REPLICA_ASSIGNMENT.
    """
    code = ErrorCode.INVALID_REPLICA_ASSIGNMENT
    if not new.voters:
        raise KafkaError("a group needs a voter", code=code)
    if new == old:
        raise KafkaError("the configuration is in force already", code=code)
    added = [voter for voter in new.voters if voter not in old.voters]
    removed = [voter for voter in old.voters if voter not in new.voters]
    if len(added) + len(removed) > 1:
        raise KafkaError("one voter changes at a time", code=code)


class ConfigurationHistory:
    """The configuration at the log start and those appended since."""

    __slots__ = ("_entries", "base", "base_start", "current")

    def __init__(
        self,
        base: Configuration,
        base_start: RaftIndex,
        entries: Iterable[tuple[RaftIndex, Configuration]] = (),
    ) -> None:
        """`base` is in force at `base_start`; each of `entries` from its own position on."""
        self.base = base
        self.base_start = base_start
        self._entries: list[tuple[RaftIndex, Configuration]] = []
        self.current = base
        for start, configuration in entries:
            self.append(start, configuration)

    @property
    def current_start(self) -> RaftIndex:
        """The position of the entry that made `current`; `base_start` when none did."""
        return self._entries[-1][0] if self._entries else self.base_start

    def is_committed(self, commit_end: RaftIndex) -> bool:
        """True when the configuration in force can no longer be truncated."""
        return not self._entries or self._entries[-1][0] < commit_end

    def committed(self, commit_end: RaftIndex) -> tuple[RaftIndex, Configuration]:
        """The last configuration below `commit_end`, and its position."""
        for start, configuration in reversed(self._entries):
            if start < commit_end:
                return start, configuration
        return self.base_start, self.base

    def append(self, start: RaftIndex, configuration: Configuration) -> None:
        """Put a configuration in force from position `start` on."""
        assert start >= self.base_start, "a membership entry below the log start"
        assert not self._entries or start > self._entries[-1][0], "membership entries ascend"
        self._entries.append((start, configuration))
        self.current = configuration

    def truncate_to(self, end: RaftIndex) -> bool:
        """Roll back what was appended at or above `end`; True when another one is now in force."""
        before = self.current
        while self._entries and self._entries[-1][0] >= end:
            self._entries.pop()
        self.current = self._entries[-1][1] if self._entries else self.base
        return self.current is not before

    def move_start(self, log_start: RaftIndex) -> None:
        """Fold what lies below `log_start` into the base."""
        while self._entries and self._entries[0][0] < log_start:
            self.base = self._entries.pop(0)[1]
        self.base_start = log_start

    def reset(self, base: Configuration, base_start: RaftIndex) -> None:
        """Begin anew at a log start."""
        self._entries.clear()
        self.base = self.current = base
        self.base_start = base_start


V = TypeVar("V")


class VoteOutcome(Enum):
    """What the votes so far say."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


def majority(voters: int) -> int:
    """How many of `voters` are a majority."""
    return voters // 2 + 1


def quorum_end(ends: Iterable[RaftIndex]) -> RaftIndex:
    """The greatest end that a majority has reached; one number per voter (Raft §5.3)."""
    ascending = sorted(ends)
    assert ascending, "a group without voters decides nothing"
    # Of n ascending numbers, those from index (n - 1) // 2 on are a majority.
    return ascending[(len(ascending) - 1) // 2]


def vote_outcome(voters: Sequence[V], votes: Mapping[V, bool]) -> VoteOutcome:
    """Count the votes of `voters`; votes of other replicas do not count (Raft §5.2)."""
    granted = refused = 0
    for voter in voters:
        vote = votes.get(voter)
        if vote is None:
            continue
        if vote:
            granted += 1
        else:
            refused += 1
    needed = majority(len(voters))
    if granted >= needed:
        return VoteOutcome.WON
    if len(voters) - refused < needed:
        return VoteOutcome.LOST
    return VoteOutcome.PENDING
