"""The first user: from which file, by which keys, and until when it is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from immutables import Map

from raftmq.config import ConfigError
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import AlterUsersCall, Outcome, Outcomes
from raftmq.metadata.image import EMPTY_IMAGE, LEVEL_OF_SECURITY, RAFTMQ_LEVEL, UsersImage
from raftmq.node.first_user import FirstUser, first_call, make_first_user, read_first_user
from raftmq.sasl.scram import SCRAM_BY_NUMBER, ScramCredential, proves

ROOT = FirstUser("root", "root:secret")


def written(path: Path, text: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_name_and_password_are_one_line_and_what_follows_is_not_read(tmp_path: Path) -> None:
    file = written(tmp_path / "user", "root:root:secret\nmore\n")
    assert read_first_user(file) == ROOT
    assert "secret" not in repr(ROOT)


@pytest.mark.parametrize(
    ("text", "mode", "why"),
    [
        ("root:hidden", 0o604, "everyone may read it"),
        ("hidden", 0o600, "is not NAME:PASSWORD"),
        (":hidden", 0o600, "is not NAME:PASSWORD"),
        ("hidden:", 0o600, "is not NAME:PASSWORD"),
        ("", 0o600, "is not NAME:PASSWORD"),
        ("r" * 257 + ":hidden", 0o600, "at most 256"),
        (b"root:\xffhidden", 0o600, "is no text"),
    ],
)
def test_what_is_no_file_of_a_user(tmp_path: Path, text: str | bytes, mode: int, why: str) -> None:
    file = written(tmp_path / "user", text, mode)
    with pytest.raises(ConfigError, match=why) as caught:
        read_first_user(file)
    assert "first_user_file" in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_first_user(tmp_path / "user")


def test_it_has_keys_for_each_mechanism_and_no_password() -> None:
    call = first_call(ROOT)
    assert call.is_first
    assert [(one.user, one.mechanism) for one in call.users] == [("root", 1), ("root", 2)]
    for one in call.users:
        credential = ScramCredential(one.salt, one.stored_key, one.server_key, one.iterations)
        mechanism = SCRAM_BY_NUMBER[one.mechanism]
        assert proves(mechanism, credential, "root:secret")
        assert not proves(mechanism, credential, "secret")


async def test_it_is_asked_for_until_there_are_users() -> None:
    below = evolve(EMPTY_IMAGE, features=Map({RAFTMQ_LEVEL: LEVEL_OF_SECURITY - 1}))
    ready = evolve(EMPTY_IMAGE, features=Map({RAFTMQ_LEVEL: LEVEL_OF_SECURITY}))
    done = evolve(ready, users=UsersImage(secret=b"s"))
    images = [below, ready, ready, ready, done]
    asked: list[AlterUsersCall] = []
    told: list[ErrorCode] = []

    async def ask(call: AlterUsersCall) -> Outcomes:
        asked.append(call)
        if len(asked) < 3:
            raise KafkaError("nobody leads", code=ErrorCode.REQUEST_TIMED_OUT)
        return (Outcome(name="root"),)

    async def sleep(_seconds: float) -> None:
        images.pop(0)

    call = first_call(ROOT)
    await make_first_user(call, lambda: images[0], ask, sleep, told.append)
    assert asked == [call, call, call], "not below the level, and not again"
    assert told == [ErrorCode.REQUEST_TIMED_OUT, ErrorCode.NONE], "each code once"
    await make_first_user(call, lambda: done, ask, sleep, told.append)
    assert len(asked) == 3
