"""The arithmetic of majorities: pure functions over numbers, no state, no messages.

A majority of n voters is n // 2 + 1 of them; any two majorities of the same voters share one, and
so do majorities of two voter sets that differ by a single voter (Raft thesis §4.1). Tested against
a brute-force twin that enumerates subsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

from raftmq.types import RaftIndex

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
    """Count the votes of `voters` alone; anybody else's are not looked at (Raft §5.2)."""
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
