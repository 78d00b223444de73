"""The first user of a cluster, from a file of a node: else nobody could log in to make one.

Made once: a cluster that ever had users stays as it is, whoever was deleted since. What leaves this
module are keys; the password is never shown.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
from attrs import field, frozen

from raftmq.config import ConfigError
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import AlterUsersCall, Outcomes, UserRequest
from raftmq.metadata.credentials import SECRET_BYTES, USER_NAME_LENGTH_MAX
from raftmq.metadata.image import LEVEL_OF_SECURITY, MetadataImage
from raftmq.sasl.scram import (
    ITERATIONS_DEFAULT,
    SALT_BITS,
    SCRAM_BY_NUMBER,
    credential_of,
    salt_text,
    salted_password,
)
from raftmq.secret_file import SecretFileError, first_line, read_secret

LINE_BYTES_MAX: Final = 4_096
AGAIN_S: Final = 1.0

logger = structlog.get_logger("raftmq.security")


@frozen
class FirstUser:
    """A name, and the password that it has at first."""

    name: str
    password: str = field(repr=False)


def read_first_user(path: Path) -> FirstUser:
    """Read NAME:PASSWORD from the first line of a file.

    Raises:
        ConfigError: it cannot be used; it says why, and nothing of what stands there.
    """
    try:
        line = first_line(read_secret(path, LINE_BYTES_MAX))
    except SecretFileError as error:
        raise _refusal(path, str(error)) from None
    name, _, password = line.partition(":")
    if not name or not password:
        raise _refusal(path, "its first line is not NAME:PASSWORD")
    if len(name) > USER_NAME_LENGTH_MAX:
        raise _refusal(path, f"a name has at most {USER_NAME_LENGTH_MAX} characters")
    return FirstUser(name, password)


def _refusal(path: Path, why: str) -> ConfigError:
    return ConfigError(f"key 'first_user_file': {path}: {why}")


def first_call(user: FirstUser) -> AlterUsersCall:
    """What makes the user; takes milliseconds."""
    changes = []
    for number, mechanism in SCRAM_BY_NUMBER.items():
        salt = salt_text(secrets.randbits(SALT_BITS))
        salted = salted_password(mechanism, user.password, salt, ITERATIONS_DEFAULT)
        keys = credential_of(mechanism, salted, salt, ITERATIONS_DEFAULT)
        changes.append(
            UserRequest(
                user=user.name,
                mechanism=number,
                iterations=ITERATIONS_DEFAULT,
                salt=salt,
                stored_key=keys.stored_key,
                server_key=keys.server_key,
            )
        )
    secret = secrets.token_bytes(SECRET_BYTES)
    return AlterUsersCall(users=tuple(changes), secret=secret, is_first=True)


async def make_first_user(
    call: AlterUsersCall,
    image: Callable[[], MetadataImage],
    ask: Callable[[AlterUsersCall], Awaitable[Outcomes]],
    sleep: Callable[[float], Awaitable[None]],
    tell: Callable[[ErrorCode], None],
) -> None:
    """Ask the controller until there are users, or there were; `tell` has what came of it, each
    time that it is another code than before."""
    told: ErrorCode | None = None
    while not image().users.secret:
        if image().level >= LEVEL_OF_SECURITY:
            why, code = "", ErrorCode.NONE
            try:
                for one in await ask(call):
                    if one.code and not why:
                        why, code = one.message or one.code.name, one.code
            except KafkaError as error:
                why, code = error.message or error.code.name, error.code
            if why:
                logger.warning("the first user is not made yet", why=why)
            else:
                logger.info("the first user was made", user=call.users[0].user)
            if code is not told:
                told = code
                tell(code)
        await sleep(AGAIN_S)
