"""A request on its way: what to ask, of whom, and what to do with the answer.

Deciding code makes `Call`s and never sees a socket; a connection encodes the body when the
broker's version range is known and finishes the call exactly once, with a response or an error.
`sent` tells whether bytes may have left, which is the difference between failed and unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from attrs import define

from raftmq.protocol import Struct, decode_response, encode_request
from raftmq.types import Buffer
from raftmq_client.errors import ClientError

ANY_NODE: Final = -1
"""Whichever broker is connected and least busy."""

Finish: TypeAlias = Callable[[Any, ClientError | None, float], None]
"""Called once with (response, None, now) or (None, error, now)."""


@define(eq=False)
class Call:
    """One request. Built by a core, delivered by a connection."""

    api: int
    body: Callable[[int], Sequence[Buffer]]
    """Pieces of the encoded body for a version."""
    read: Callable[[int, memoryview], Any]
    finish: Finish
    node: int = ANY_NODE
    min_version: int = 0
    max_version: int = 32767
    timeout_ms: float = 30_000
    expects_answer: bool = True
    is_expendable: bool = False
    """Overdue, it is given up without giving up its connection: another broker may be asked."""
    deadline: float = 0.0
    sent: bool = False
    is_done: bool = False

    def complete(self, response: Any, error: ClientError | None, now: float) -> None:
        """Finish once; later completions are ignored (a timed-out call may still be answered)."""
        if self.is_done:
            return
        self.is_done = True
        self.finish(response, error, now)


def struct_call(
    api: int,
    request: Struct | Callable[[int], Struct],
    finish: Finish,
    *,
    node: int = ANY_NODE,
    min_version: int = 0,
    max_version: int = 32767,
    timeout_ms: float = 30_000,
    is_expendable: bool = False,
) -> Call:
    """A call whose bodies are plain schema structs.

    `request` may be a function of the version where versions mean different things.
    """

    def body(version: int) -> Sequence[Buffer]:
        struct = request if isinstance(request, Struct) else request(version)
        return (encode_request(api, version, struct),)

    def read(version: int, data: memoryview) -> Struct:
        return decode_response(api, version, data)

    return Call(
        api=api,
        body=body,
        read=read,
        finish=finish,
        node=node,
        min_version=min_version,
        max_version=max_version,
        timeout_ms=timeout_ms,
        is_expendable=is_expendable,
    )
