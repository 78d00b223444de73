"""Credentials of users, as commands of the metadata say them, and how they are hidden.

Whatever shows a stored command (a fetch of the metadata log, a node's own log, the command line)
shows the result of `masked`. Invariant: masking keeps lengths, so a batch of commands keeps its
layout.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, TypeAlias

import msgspec

from raftmq.types import Buffer

USERS_MAX: Final = 1_000
"""Users that one command changes."""
USER_NAME_LENGTH_MAX: Final = 256
SECRET_BYTES_MAX: Final = 1_024
SECRET_BYTES: Final = 32
"""Of the secret that credentials are made up from."""

UserName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=USER_NAME_LENGTH_MAX)]
Secret: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=SECRET_BYTES_MAX)]
_Iterations: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
_Mechanism: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2)]


class ScramUpsertion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What proves a user's password by one mechanism of SCRAM (1: SHA-256, 2: SHA-512)."""

    user: UserName
    mechanism: _Mechanism
    iterations: _Iterations
    scram_salt: Secret
    scram_stored_key: Secret
    scram_server_key: Secret

    def __repr__(self) -> str:
        return f"ScramUpsertion(user={self.user!r}, mechanism={self.mechanism})"


class ScramDeletion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user has no credential for that mechanism any more."""

    user: UserName
    mechanism: _Mechanism


_SECRETS: Final = re.compile(rb'("scram_(?:salt|stored_key|server_key|secret)":")([^"\\]*)"')
"""What a command of users says that nobody is shown. In a text that is quoted within another one,
the quotes have a backslash before them."""


def masked(data: Buffer) -> bytes:
    """An encoded command, or a batch of them, with an asterisk for every character of a secret."""
    return _SECRETS.sub(lambda found: found[1] + b"*" * len(found[2]) + b'"', bytes(data))
