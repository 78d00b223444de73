"""Seals: entries of a log that say whether more records may follow.

A seal is a bare entry. No leader appends records behind one, whatever it knows of the topic, until
another such entry opens the log again. Both name the order that they obey by its version; orders
only go up, so what a leader with an older image wants is told from what is wanted by now.

Invariants: the newest seal or opening in the log is in force from its append on, and goes with it
when the log is truncated. It is never dropped with a prefix while it is a seal: nothing follows it,
and a log start keeps bare entries at its own offset.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from raftmq.errors import RemoteProtocolError
from raftmq.log.model import NewerFormatError
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.raft.messages import EntryKind
from raftmq.types import Buffer, RaftIndex

_SEAL: Final = struct.Struct(">BBq")  # version, whether it closes the log, version of the order
_VERSION: Final = 1


class Seal(NamedTuple):
    """What an order made of a log.

    Attributes:
        version: that of the order: the offset of the metadata command.
        is_closed: no record may follow; False where the log was opened again.
    """

    version: int
    is_closed: bool

    def encode(self) -> bytes:
        """The payload of its entry."""
        return _SEAL.pack(_VERSION, self.is_closed, self.version)

    @classmethod
    def decode(cls, payload: Buffer) -> Seal:
        """Read what `encode` made.

        Raises:
            NewerFormatError: a newer raftmq wrote it.
            RemoteProtocolError: not one.
        """
        if len(payload) != _SEAL.size:
            raise RemoteProtocolError(f"a seal of {len(payload)} bytes")
        version, is_closed, order = _SEAL.unpack(payload)
        if version > _VERSION:
            raise NewerFormatError(f"a seal of format {version}, known is {_VERSION}")
        if is_closed > 1 or order < 0:
            raise RemoteProtocolError("a seal that says neither open nor closed")
        return cls(order, bool(is_closed))


class Seals:
    """The newest seal of one replica's log.

    Attributes:
        newest: in force now, whether committed or not; None where there is none.
        end: where its entry ends.
        is_closed: no record may be appended.
    """

    __slots__ = ("_log", "end", "is_closed", "newest")

    def __init__(self, log: ReplicatedLog) -> None:
        self._log = log
        self.newest: Seal | None = None
        self.end = RaftIndex(0)
        self.is_closed = False
        self.look()

    def note(self, end: RaftIndex, payload: Buffer) -> None:
        """The log got a seal, or an opening, that ends at `end`."""
        self.newest, self.end = Seal.decode(payload), end
        self.is_closed = self.newest.is_closed

    def look(self) -> None:
        """The log begins or ends elsewhere: find out what is the newest now."""
        self.newest, self.end, self.is_closed = None, RaftIndex(0), False
        for bare in reversed(self._log.bare_entries()):
            if bare.kind == EntryKind.SEAL:
                self.note(RaftIndex(bare.index + 1), bare.payload)
                return
