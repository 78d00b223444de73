"""Commands of the metadata log that an operator had passed over, and the error that leads there.

A command is tried before it enters the log (`raft_engine.py`). One that slipped through
nevertheless would end every node at each of its starts. A `Skip` names it so exactly that nothing
else can be meant: another command at the same offset is never passed over.

Sans-IO: the data folder keeps skips, `skipping.py` makes them, `metadata_machine.py` obeys them.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from raftmq.errors import AheadError, NodeMustStopError
from raftmq.visible import visible

SHOWN_MAX: Final = 1_000
"""Characters of a command in a log line."""
DIGEST_SHOWN: Final = 12
AHEAD: Final = "this cluster is ahead of this version"
"""How every refusal begins whose cure is a newer raftmq."""


class Skip(msgspec.Struct, frozen=True):
    """One command to pass over: where it is, the term that wrote it, and its exact bytes.

    `sha256` is hexadecimal, of the record's value.
    """

    offset: int
    leader_epoch: int
    sha256: str

    @classmethod
    def of(cls, offset: int, leader_epoch: int, value: bytes) -> Skip:
        """That of a record of the metadata log."""
        return cls(offset, leader_epoch, hashlib.sha256(value).hexdigest())

    @property
    def short(self) -> str:
        """OFFSET:EPOCH:DIGEST, for people to compare."""
        return f"{self.offset}:{self.leader_epoch}:{self.sha256[:DIGEST_SHOWN]}"


class UnappliableCommandError(NodeMustStopError):
    """A committed command raises when it is applied: every node stops there until it is skipped.

    Attributes:
        skip: names the command.
        value: its bytes.
        cause: what was raised.
        is_newer: it is of a format that a newer version knows, so it must not be skipped.
    """

    def __init__(self, skip: Skip, value: bytes, cause: Exception) -> None:
        self.skip = skip
        self.value = value
        self.cause = cause
        self.is_newer = isinstance(cause, AheadError)
        told = (
            f"the metadata command at offset {skip.offset} (leader epoch {skip.leader_epoch}) "
            f"cannot be applied: {self.reason}. The command: {shown(value)}."
        )
        if self.is_newer:
            told = f"{AHEAD}: {told} Nothing is lost: start a newer raftmq on this node"
        else:
            told += (
                " Nodes stop here: the way out is `raftmq recover --skip-command "
                f"{skip.offset}` on a majority of stopped nodes, and then on all others"
            )
        super().__init__(told)

    @property
    def reason(self) -> str:
        """What was raised, on one line."""
        return visible(f"{type(self.cause).__name__}: {self.cause}")[:SHOWN_MAX]


def shown(value: bytes) -> str:
    """A command for people: on one line, shortened."""
    more = len(value) - SHOWN_MAX
    text = visible(value[:SHOWN_MAX].decode("utf-8", "backslashreplace"))
    return f"{text}... ({more} more bytes)" if more > 0 else text
