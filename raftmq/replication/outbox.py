"""Promises on their way out: messages that must not leave before the disk has kept up.

Votes and append replies are promises (Raft §5.1-5.3). Each waits for the journal sequence and the
log position at which it was made, also when its own Ready wrote nothing: what it vouches for may
have been written by an earlier one. Order is kept, so requirements only grow.

Invariants: nothing is released before both requirements hold; a message of an older term is never
released (its promise was withdrawn with the term); held messages are bounded by the peers' windows.
"""

from __future__ import annotations

from collections import deque

from attrs import define

from raftmq.raft.messages import AppendReply, Message
from raftmq.types import RaftIndex, Term


@define(slots=True)
class _Held:
    message: Message
    sequence: int
    end: RaftIndex


class Outbox:
    """Messages of one replica that wait for a flush.

    Attributes:
        held: those, in their order; every drain looks whether there are any.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held: deque[_Held] = deque()

    def __len__(self) -> int:
        return len(self.held)

    def hold(self, message: Message, sequence: int, end: RaftIndex) -> None:
        """Keep `message` until the journal is flushed to `sequence` and the log to `end`."""
        held = self.held
        if held:
            last = held[-1]
            previous = last.message
            # A later acknowledgement to the same leader says all that an unsent earlier one did, so
            # a slow disk answers a burst of appends with one reply.
            if (
                isinstance(message, AppendReply)
                and isinstance(previous, AppendReply)
                and message.accepted
                and previous.accepted
                and (message.term, message.to) == (previous.term, previous.to)
                and message.is_promise == previous.is_promise
                and message.flushed_end >= previous.flushed_end
                and last.end == end
                and last.sequence == sequence
            ):
                last.message = message
                return
        held.append(_Held(message, sequence, end))

    def cap(self, end: RaftIndex) -> None:
        """The log was truncated to `end`: nobody can wait for positions that are gone."""
        for held in self.held:
            held.end = min(held.end, end)

    def release(self, sequence: int, flushed_end: RaftIndex, term: Term) -> list[Message]:
        """Take what may leave now; what belongs to a term before `term` is dropped."""
        released: list[Message] = []
        while self.held:
            first = self.held[0]
            if first.message.term < term:
                self.held.popleft()
                continue
            if first.sequence > sequence or first.end > flushed_end:
                break
            released.append(self.held.popleft().message)
        return released

    def clear(self) -> None:
        """Drop everything: the replica stopped."""
        self.held.clear()
