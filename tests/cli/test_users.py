"""`raftmq user`: what is sent of a password, and where one may come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker

SHA_256, SHA_512 = 1, 2


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with a password in its first line."""
    path = tmp_path / "password.txt"
    path.write_text("first secret\nnot this\n")
    return str(path)


def test_a_user_gets_the_password_of_a_file(call: Call, broker: FakeBroker, file: str) -> None:
    done = call("user", "create", "alice", "--password-file", file)
    assert done.stdout == "user alice was created (SCRAM-SHA-256, SCRAM-SHA-512)\n"
    assert sorted(broker.users["alice"]) == [SHA_256, SHA_512]
    for mechanism in (SHA_256, SHA_512):
        assert broker.has_password("alice", mechanism, "first secret")
    salts = {salt for _, salt, _ in broker.users["alice"].values()}
    assert len(salts) == 2
    assert min(map(len, salts)) > 20


def test_a_password_comes_from_standard_input(call: Call, broker: FakeBroker) -> None:
    words = ("user", "create", "bob", "--mechanism", "SCRAM-SHA-512", "--iterations", "8192")
    done = call(*words, "--password-file", "-", stdin="typed\n")
    assert done.stdout == "user bob was created (SCRAM-SHA-512)\n"
    assert broker.users["bob"].keys() == {SHA_512}
    assert broker.users["bob"][SHA_512][0] == 8192
    assert broker.has_password("bob", SHA_512, "typed")


def test_a_new_password_is_one_for_all_mechanisms_that_there_are(
    call: Call, broker: FakeBroker, file: str
) -> None:
    words = ("--password-file", "-")
    call("user", "create", "bob", "--mechanism", "SCRAM-SHA-256", *words, stdin="old\n")
    before = broker.users["bob"][SHA_256]
    done = call("user", "password", "bob", "--password-file", file)
    assert done.stdout == "user bob has a new password (SCRAM-SHA-256)\n"
    assert broker.users["bob"].keys() == {SHA_256}
    assert broker.users["bob"][SHA_256][1] != before[1], "another salt"
    assert broker.has_password("bob", SHA_256, "first secret")


def test_users_are_listed_and_deleted(call: Call, broker: FakeBroker, file: str) -> None:
    for name in ("bob", "alice"):
        call("user", "create", name, "--password-file", file)
    assert [line.split() for line in call("user", "list").stdout.splitlines()] == [
        ["User", "Mechanism", "Iterations"],
        ["alice", "SCRAM-SHA-256", "4096"],
        ["alice", "SCRAM-SHA-512", "4096"],
        ["bob", "SCRAM-SHA-256", "4096"],
        ["bob", "SCRAM-SHA-512", "4096"],
    ]
    done = call("user", "delete", "bob", "--mechanism", "SCRAM-SHA-256")
    assert done.stdout == "user bob was deleted (SCRAM-SHA-256)\n"
    assert call("user", "delete", "alice").exit_code == 0
    assert json.loads(call("user", "list", "--json").stdout) == [
        {"User": "bob", "Mechanism": "SCRAM-SHA-512", "Iterations": 4096}
    ]


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["create", "known", "--password-file", "-"], 1, "user 'known' is there already"),
        (["create", "new"], 2, "--password-file is wanted where nobody can be asked"),
        (["create", "new", "--password-file", "-"], 2, "the password is empty"),
        (["create", "new", "--password-file", "/not/there"], 1, "/not/there"),
        (["create", "new", "--mechanism", "PLAIN"], 2, "--mechanism is SCRAM-SHA-256 or"),
        (["create", "new", "--iterations", "10"], 2, "4096"),
        (["password", "new", "--password-file", "-"], 1, "there is no user 'new'"),
        (["delete", "new"], 1, "there is no user 'new'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_refused(
    call: Call, broker: FakeBroker, words: list[str], code: int, says: str
) -> None:
    broker.users["known"] = {SHA_256: (4096, b"s", b"p")}
    done = call("user", *words)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert broker.users == {"known": {SHA_256: (4096, b"s", b"p")}}


def test_a_broker_that_refuses_is_quoted(call: Call, broker: FakeBroker, file: str) -> None:
    refused = ErrorCode.CLUSTER_AUTHORIZATION_FAILED
    broker.fault(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, "refuse", refused)
    done = call("user", "create", "alice", "--password-file", file)
    assert done.exit_code == 1
    assert "CLUSTER_AUTHORIZATION_FAILED" in done.stderr
    assert "first secret" not in done.output
    assert not broker.users
