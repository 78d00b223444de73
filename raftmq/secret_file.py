"""Files with a secret in them: read, and refused where everyone may read them.

Nodes, the command line and clients have the same rule: `others` must not have the right to read,
and what a refusal says is why, never what stands there.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from raftmq.errors import RaftmqError

SECRET_BYTES_MAX: Final = 64 << 10


class SecretFileError(RaftmqError):
    """A file of a secret cannot be used; the message is the reason alone, without the path."""


def read_secret(path: Path, bytes_max: int = SECRET_BYTES_MAX) -> bytes:
    """The first bytes of a file.

    Raises:
        SecretFileError: it cannot be read, or everyone may read it.
    """
    check_private(path)
    try:
        with path.open("rb") as file:
            return file.read(bytes_max)
    except OSError as error:
        raise SecretFileError(error.strerror or "cannot be read") from None


def check_private(path: Path) -> None:
    """Check a file, which may be somebody else's to read: OpenSSL opens keys by itself.

    Raises:
        SecretFileError: as `read_secret`.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise SecretFileError(error.strerror or "cannot be read") from None
    if mode & stat.S_IROTH:
        raise SecretFileError("everyone may read it: chmod o-r")


def first_line(secret: bytes) -> str:
    """The first line of what was read, as text.

    Raises:
        SecretFileError: it is no text.
    """
    try:
        return secret.partition(b"\n")[0].rstrip(b"\r").decode()
    except UnicodeDecodeError:
        raise SecretFileError("is no text") from None
