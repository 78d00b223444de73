"""What all mechanisms of SASL share: an exchange's steps, its answers, and how it fails.

An exchange takes the client's messages one after the other. It answers at once, or gives work that
takes too long for the loop and whose result is the answer. Pure: nonces, secrets and times are
given to it.

What a failure says is for the log of this node alone, and names a user only where there is one of
that name: many a password has been typed where the name belongs. Clients are told the same of every
failure, unless `told` says more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from attrs import field, frozen

from raftmq.errors import RaftmqError

TOKEN_BYTES_MAX: Final = 512 << 10
"""Of one message (sasl.server.max.receive.size)."""
SHORT_TOKEN_BYTES_MAX: Final = 8 << 10
"""Of a message that has no reason to be long."""


class AuthenticationFailedError(RaftmqError):
    """The client is not who it says it is, or it breaks the rules of its mechanism.

    Attributes:
        user: a user that exists, where the client named one.
        told: what the client may be told; "" for no more than that it failed.
    """

    def __init__(self, reason: str, user: str | None = None, *, told: str = "") -> None:
        self.reason = reason
        self.user = user
        self.told = told
        super().__init__(reason)


@frozen(slots=True)
class Answer:
    """What the server says next; with a `user` the exchange is complete, and that one is there.

    Attributes:
        expires_ms: when the proof ends, by the wall clock; None where it does not.
        failure: the exchange failed, and the client has to acknowledge this answer before it ends.
        is_of_this_cluster: the user is one of the cluster's own table.
        credential: the one of that table by which the user proved it. It was read when the exchange
            began, and may have been taken away since.
    """

    token: bytes
    user: str | None = None
    expires_ms: int | None = None
    failure: AuthenticationFailedError | None = None
    is_of_this_cluster: bool = True
    credential: object = field(default=None, eq=False, repr=False)


Step = Answer | Callable[[], Answer]
"""An answer, or the work whose result it is: for a worker, and it raises what a step does."""


class Exchange(Protocol):
    """The server's side of one authentication."""

    def step(self, token: bytes) -> Step:
        """Take the client's next message.

        Raises:
            AuthenticationFailedError: it is over, and failed.
        """
        ...


def decode_text(token: bytes, bytes_max: int = SHORT_TOKEN_BYTES_MAX) -> str:
    """A message as text.

    Raises:
        AuthenticationFailedError: it is too long, or no text.
    """
    if len(token) > bytes_max:
        raise AuthenticationFailedError(f"a message of {len(token)} bytes")
    try:
        return token.decode()
    except UnicodeDecodeError as error:
        raise AuthenticationFailedError("a message that is no text") from error


def check_identity(wanted: str, user: str) -> None:
    """Refuse a client that wants to act for another one than it proves to be.

    Raises:
        AuthenticationFailedError: it does.
    """
    if wanted and wanted != user:
        raise AuthenticationFailedError(
            "another identity than that of the user was asked for",
            told="Authentication failed: Client requested an authorization id that is different "
            "from username",
        )
