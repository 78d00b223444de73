"""The states of a connection with SASL: what may come when, how it fails, how sessions end."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from immutables import Map

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.metadata.commands import AlterUsers
from raftmq.metadata.credentials import ScramDeletion, ScramUpsertion
from raftmq.metadata.image import EMPTY_IMAGE, LEVEL_OF_SECURITY, RAFTMQ_LEVEL, UsersImage
from raftmq.metadata.results import Done
from raftmq.partition.parked import Deadlines
from raftmq.promise import Promise
from raftmq.protocol import ANNOUNCED, ApiKey
from raftmq.sasl.oauthbearer import InvalidTokenError, VerifiedToken
from raftmq.sasl.scram import SCRAM_SHA_256, credential_of, salted_password
from raftmq.server.audit import Audit
from raftmq.server.kafka.authentication import _OFFERED_BEFORE as OFFERED_BEFORE
from raftmq.server.kafka.authentication import (
    REAUTHENTICATE_AGAIN_MS,
    Authentication,
    AuthenticationState,
    Authenticator,
    Caller,
    SaslSettings,
)
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.dispatch import COMMON
from raftmq.types import Offset
from raftmq_client import Scram
from tests.metadata.metadata_commands import Machine
from tests.sasl.tokens import message
from tests.server.auditing import Lines

DELAY_MS = 100


class FakeClock:
    now_ms = 1_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)


class FakeWorkers:
    """Works when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Promise[Any]]] = []

    def submit(self, work: Callable[[], Any]) -> Promise[Any]:
        promise: Promise[Any] = Promise()
        self.jobs.append((work, promise))
        return promise

    def work(self) -> None:
        job, promise = self.jobs.pop(0)
        try:
            promise.resolve(job())
        except Exception as error:  # noqa: BLE001 - as the real ones
            promise.fail(error)


class FakeConnection:
    peer = "10.0.0.1:5"

    def __init__(self) -> None:
        self.caller = Caller(host="10.0.0.1", listener="SASL")
        self.is_finished = False
        self.is_broken = False

    def finish(self) -> None:
        self.is_finished = True

    def broken(self) -> None:
        self.is_broken = True


def users_of(**passwords: str) -> UsersImage:
    credentials = Map(
        {
            user: Map(
                {
                    1: credential_of(
                        SCRAM_SHA_256, salted_password(SCRAM_SHA_256, word, b"s", 4096), b"s", 4096
                    )
                }
            )
            for user, word in passwords.items()
        }
    )
    return UsersImage(credentials, b"secret")


USERS = users_of(alice="secret", bob="other")


class Stage:
    """One connection, with all that it needs."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.lines = Lines()
        self.workers = FakeWorkers()
        self.counts = ServerCounts()
        self.users = USERS
        self.deadlines = Deadlines(self.clock)  # type: ignore[arg-type]  # no more is asked
        chosen = {"mechanisms": ("SCRAM-SHA-256", "PLAIN"), **settings}
        self.authenticator = Authenticator(
            SaslSettings(**chosen),
            lambda: self.users,
            workers=self.workers,
            deadlines=self.deadlines,
            clock=self.clock,  # type: ignore[arg-type]
            counts=self.counts,
            audit=Audit(self.lines, self.clock, cluster="cluster", node=1),  # type: ignore[arg-type]
            verify=self.verify if "OAUTHBEARER" in chosen["mechanisms"] else None,
            make_nonce=lambda: "server",
        )
        self.connection = FakeConnection()
        self.sasl = Authentication(self.authenticator, self.connection)

    def verify(self, token: str) -> VerifiedToken:
        """Tokens are names, and live for a minute."""
        if token == "evil":
            raise InvalidTokenError("a wrong signature")
        return VerifiedToken(token, self.clock.wall_ms() + 60_000)

    def bear(self, token: str) -> Any:
        """Present a token."""
        handshake = self.sasl.handshake(1, "OAUTHBEARER")
        assert isinstance(handshake, dict)
        assert handshake["error_code"] == ErrorCode.NONE
        answer = self.sasl.authenticate(message(token))
        self.workers.work()
        assert isinstance(answer, Promise)
        return answer

    def wait(self, ms: float) -> None:
        self.clock.now_ms += ms
        self.deadlines.expire(self.clock.now_ms)

    def scram(self, user: str = "alice", password: str = "secret") -> Any:
        """Both tokens of SCRAM, and the last answer."""
        client = Scram(user, password, "SHA-256").exchange()
        challenge = self.sasl.authenticate(next(client))
        assert isinstance(challenge, dict)
        return self.sasl.authenticate(client.send(challenge["auth_bytes"]))

    def enter(self, user: str = "alice", password: str = "secret") -> Any:
        handshake = self.sasl.handshake(1, "SCRAM-SHA-256")
        assert isinstance(handshake, dict)
        assert handshake == {"error_code": 0, "mechanisms": ["SCRAM-SHA-256", "PLAIN"]}
        return self.scram(user, password)


def refused(stage: Stage, api: ApiKey) -> bool:
    try:
        stage.sasl.check(api)
    except RemoteProtocolError:
        return True
    return False


def test_nothing_else_is_answered_before_it_is_authenticated() -> None:
    stage = Stage()
    served = [api for api in ApiKey if not refused(stage, api)]
    assert served == [ApiKey.SASL_HANDSHAKE, ApiKey.API_VERSIONS, ApiKey.SASL_AUTHENTICATE]
    stage.sasl.handshake(1, "PLAIN")
    assert [api for api in ApiKey if not refused(stage, api)] == [ApiKey.SASL_AUTHENTICATE]
    pending = stage.sasl.authenticate(b"\0alice\0secret")
    assert isinstance(pending, Promise)
    assert [api for api in ApiKey if not refused(stage, api)] == []
    stage.workers.work()
    assert pending.result()["error_code"] == ErrorCode.NONE
    assert [api for api in ApiKey if refused(stage, api)] == []
    assert stage.connection.caller == Caller("User:alice", "10.0.0.1", "SASL")
    assert stage.counts.authentications == {("PLAIN", "done"): 1}


def test_scram_needs_no_worker() -> None:
    stage = Stage()
    assert stage.enter()["session_lifetime"] == 0
    assert stage.connection.caller.principal == "User:alice"
    assert not stage.workers.jobs


@pytest.mark.parametrize("user", ["alice", "nobody"])
def test_a_failure_is_answered_after_a_delay_and_ends_the_connection(user: str) -> None:
    stage = Stage()
    answer = stage.enter(user, "wrong")
    assert isinstance(answer, Promise)
    assert stage.connection.is_finished, "nothing more is begun"
    stage.wait(DELAY_MS - 1)
    assert not answer.is_done
    stage.wait(1)
    told = answer.result()
    assert told["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert told["error_message"] == (
        "Authentication failed during authentication due to invalid credentials with SASL "
        "mechanism SCRAM-SHA-256"
    )
    assert stage.connection.caller.principal == "User:ANONYMOUS"
    assert all(refused(stage, api) for api in ApiKey)
    assert stage.counts.authentications == {("SCRAM-SHA-256", "failed"): 1}


BEARER = {"mechanisms": ("OAUTHBEARER", "SCRAM-SHA-256")}


def test_a_session_ends_with_its_token() -> None:
    stage = Stage(**BEARER)
    assert stage.bear("carol").result() == {
        "error_code": ErrorCode.NONE,
        "error_message": None,
        "auth_bytes": b"",
        "session_lifetime": 60_000,
    }
    assert stage.connection.caller.principal == "User:carol", "no user of the cluster's own"
    stage.wait(59_000)
    assert not refused(stage, ApiKey.FETCH)
    assert stage.bear("carol").result()["session_lifetime"] == 60_000, "KIP-368"
    stage.wait(59_999)
    assert not refused(stage, ApiKey.FETCH)
    stage.wait(1)
    assert refused(stage, ApiKey.FETCH)
    outcomes = {("OAUTHBEARER", "done"): 1, ("OAUTHBEARER", "again"): 1}
    assert stage.counts.authentications == {**outcomes, ("OAUTHBEARER", "expired"): 1}


def test_a_session_ends_earlier_where_the_node_says_so() -> None:
    stage = Stage(**BEARER, session_ms_max=10_000)
    assert stage.bear("carol").result()["session_lifetime"] == 10_000


def test_a_token_that_is_not_believed_is_told_by_json_and_then_by_a_failure() -> None:
    stage = Stage(**BEARER)
    said = b'{"status": "invalid_token"}'
    first = stage.bear("evil").result()
    assert (first["error_code"], first["auth_bytes"]) == (ErrorCode.NONE, said)
    assert stage.counts.authentications == {("OAUTHBEARER", "failed"): 1}
    told = [(line["outcome"], line["why"]) for line in stage.lines.read]
    assert told == [("failed", "a token that is not believed: a wrong signature")]
    assert [api for api in ApiKey if not refused(stage, api)] == [ApiKey.SASL_AUTHENTICATE]
    last = stage.sasl.authenticate(b"\x01")
    assert isinstance(last, Promise)
    assert stage.connection.is_finished
    stage.wait(DELAY_MS)
    assert last.result()["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert last.result()["error_message"] == said.decode()
    assert len(stage.lines.read) == 1, "one failure is told once"
    assert stage.counts.authentications == {("OAUTHBEARER", "failed"): 1}
    assert stage.connection.caller.principal == "User:ANONYMOUS"


def test_another_token_is_of_the_same_principal() -> None:
    stage = Stage(**BEARER)
    stage.bear("carol")
    stage.wait(REAUTHENTICATE_AGAIN_MS)
    answer = stage.bear("dave")
    stage.wait(DELAY_MS)
    assert answer.result()["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert "Cannot change principals" in answer.result()["error_message"]


def test_users_of_tokens_are_not_those_of_the_table() -> None:
    stage = Stage(**BEARER)
    stage.bear("alice")
    before = evolve(EMPTY_IMAGE, users=USERS)
    after = evolve(EMPTY_IMAGE, users=users_of(bob="other"))
    stage.authenticator.image_changed(before, after)
    assert not stage.connection.is_broken
    scram = Stage(**BEARER)
    handshake = scram.sasl.handshake(1, "SCRAM-SHA-256")
    assert isinstance(handshake, dict)
    scram.scram()
    scram.authenticator.image_changed(before, after)
    assert scram.connection.is_broken


def test_what_the_audit_is_told() -> None:
    stage = Stage(session_ms_max=60_000)
    stage.enter()
    stage.wait(REAUTHENTICATE_AGAIN_MS)
    stage.enter()
    stage.wait(60_000)
    assert refused(stage, ApiKey.FETCH)
    for user in ("alice", "nobody"):
        Stage.enter(other := Stage(), user, "wrong")
        (line,) = other.lines.read
        assert (line["outcome"], line.get("principal")) == (
            "failed",
            "User:alice" if user == "alice" else None,
        )
        assert b"nobody" not in other.lines.raw[0], "many a password was typed there"
    fields = "outcome", "principal", "host", "listener", "mechanism", "again", "why"
    assert [tuple(line.get(field) for field in fields) for line in stage.lines.read] == [
        ("ok", "User:alice", "10.0.0.1", "SASL", "SCRAM-SHA-256", False, None),
        ("ok", "User:alice", "10.0.0.1", "SASL", "SCRAM-SHA-256", True, None),
        ("failed", "User:alice", "10.0.0.1", "SASL", "SCRAM-SHA-256", False, "the session ended"),
    ]


def test_a_mechanism_that_is_not_offered() -> None:
    stage = Stage(mechanisms=("SCRAM-SHA-256",))
    answer = stage.sasl.handshake(1, "PLAIN")
    assert isinstance(answer, Promise)
    stage.wait(DELAY_MS)
    assert answer.result() == {
        "error_code": ErrorCode.UNSUPPORTED_SASL_MECHANISM,
        "mechanisms": ["SCRAM-SHA-256"],
    }
    assert stage.connection.is_finished


def test_requests_of_sasl_at_the_wrong_time() -> None:
    stage = Stage()
    early = stage.sasl.authenticate(b"x")
    assert isinstance(early, Promise)
    stage.wait(DELAY_MS)
    assert early.result()["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
    assert stage.connection.is_finished
    late = Stage()
    late.enter()
    for answer in (late.sasl.authenticate(b"x"), late.sasl.handshake(1, "SCRAM-SHA-256")):
        assert isinstance(answer, dict)
        assert answer["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
    assert not late.connection.is_finished, "it goes on as it is"


def test_bare_tokens_after_a_handshake_of_version_0() -> None:
    stage = Stage()
    stage.sasl.handshake(0, "SCRAM-SHA-256")
    assert stage.sasl.is_bare
    client = Scram("alice", "secret", "SHA-256").exchange()
    challenge = stage.sasl.bare_token(next(client))
    assert isinstance(challenge, bytes)
    verdict = stage.sasl.bare_token(client.send(challenge))
    assert isinstance(verdict, bytes)
    with pytest.raises(StopIteration):
        client.send(verdict)
    assert not stage.sasl.is_bare
    assert stage.sasl.state is AuthenticationState.AUTHENTICATED
    stranger = Stage()
    stranger.sasl.handshake(0, "PLAIN")
    pending = stranger.sasl.bare_token(b"\0alice\0x")
    assert isinstance(pending, Promise)
    assert stranger.sasl.is_bare
    with pytest.raises(RemoteProtocolError):
        stranger.sasl.bare_token(b"\0alice\0secret")
    stranger.workers.work()
    stranger.wait(DELAY_MS)
    assert pending.result() is None, "the end of the connection says it"


def test_a_session_ends_in_time_unless_the_client_authenticates_again() -> None:
    stage = Stage(session_ms_max=5_000)
    assert stage.enter()["session_lifetime"] == 5_000
    stage.wait(4_000)
    assert not refused(stage, ApiKey.PRODUCE)
    assert stage.enter()["session_lifetime"] == 5_000
    stage.wait(4_999)
    assert not refused(stage, ApiKey.PRODUCE)
    stage.wait(1)
    assert refused(stage, ApiKey.PRODUCE)
    assert not refused(stage, ApiKey.SASL_HANDSHAKE)
    assert stage.counts.authentications == {
        ("SCRAM-SHA-256", "done"): 1,
        ("SCRAM-SHA-256", "again"): 1,
        ("SCRAM-SHA-256", "expired"): 1,
    }


def test_nobody_becomes_another_one_in_the_middle() -> None:
    stage = Stage(session_ms_max=5_000)
    stage.enter()
    answer = stage.enter("bob", "other")
    assert isinstance(answer, Promise)
    stage.wait(DELAY_MS)
    assert "Cannot change principals during re-authentication" in answer.result()["error_message"]
    assert stage.connection.caller.principal == "User:alice"
    other = Stage(session_ms_max=5_000)
    other.enter()
    other.sasl.handshake(1, "PLAIN")
    answer = other.sasl.authenticate(b"\0alice\0secret")
    assert isinstance(answer, Promise)
    other.wait(DELAY_MS)
    assert "is not supported for re-authentication" in answer.result()["error_message"]


def test_it_begins_again_once_a_second_at_most() -> None:
    stage = Stage(session_ms_max=5_000)
    stage.enter()
    stage.enter()
    stage.wait(999)
    answer = stage.sasl.handshake(1, "SCRAM-SHA-256")
    assert isinstance(answer, dict)
    assert answer["error_code"] == ErrorCode.ILLEGAL_SASL_STATE


def test_a_user_that_is_deleted_loses_its_connections() -> None:
    stage = Stage()
    stage.enter()
    before = evolve(EMPTY_IMAGE, users=USERS)
    stage.users = users_of(bob="other")
    changed = evolve(EMPTY_IMAGE, users=users_of(alice="new", bob="other"))
    stage.authenticator.image_changed(before, changed)
    assert not stage.connection.is_broken, "another password ends no session"
    stage.authenticator.image_changed(changed, evolve(EMPTY_IMAGE, users=stage.users))
    assert stage.connection.is_broken
    assert refused(stage, ApiKey.PRODUCE)


def test_a_user_that_is_deleted_in_the_midst_does_not_come_in() -> None:
    stage = Stage()
    stage.sasl.handshake(1, "PLAIN")
    answer = stage.sasl.authenticate(b"\0alice\0secret")
    assert isinstance(answer, Promise)
    stage.users = users_of(bob="other")
    stage.workers.work()
    stage.wait(DELAY_MS)
    assert answer.result()["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256"])
def test_a_password_that_is_changed_in_the_midst_lets_nobody_in(mechanism: str) -> None:
    """Else whoever knows the old one holds an exchange open until it is changed."""
    stage = Stage()
    stage.sasl.handshake(1, mechanism)
    answer: Any
    if mechanism == "PLAIN":
        answer = stage.sasl.authenticate(b"\0alice\0secret")
        stage.users = users_of(alice="new", bob="other")
        stage.workers.work()
    else:
        client = Scram("alice", "secret", "SHA-256").exchange()
        challenge: Any = stage.sasl.authenticate(next(client))
        stage.users = users_of(alice="new", bob="other")
        answer = stage.sasl.authenticate(client.send(challenge["auth_bytes"]))
    stage.wait(DELAY_MS)
    assert answer.result()["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert stage.connection.caller.principal == "User:ANONYMOUS"
    again = Stage()
    again.users = stage.users
    assert again.enter(password="new")["error_code"] == ErrorCode.NONE


NEW: dict[str, Any] = {
    "user": "alice",
    "iterations": 4_096,
    "scram_salt": b"salt" * 4,
    "scram_stored_key": b"k" * 32,
    "scram_server_key": b"k" * 32,
}
DELETED = AlterUsers(deletions=(ScramDeletion(user="alice", mechanism=1),))


@pytest.mark.parametrize(
    ("commands", "is_ended"),
    [
        ([DELETED, AlterUsers(upsertions=(ScramUpsertion(mechanism=1, **NEW),))], True),
        ([AlterUsers(upsertions=(ScramUpsertion(mechanism=2, **NEW),)), DELETED], False),
        ([AlterUsers(upsertions=(ScramUpsertion(mechanism=1, **NEW),))], False),
    ],
    ids=["deleted and made anew", "one of two mechanisms deleted", "another password"],
)
def test_a_node_that_sees_several_commands_in_one_step(
    commands: list[AlterUsers], is_ended: bool
) -> None:
    """The images before and after do not tell a user that was made anew from another password."""
    stage = Stage()
    stage.enter()
    machine = Machine()
    machine.image = before = evolve(
        EMPTY_IMAGE, users=USERS, features=Map({RAFTMQ_LEVEL: LEVEL_OF_SECURITY})
    )
    deletions = stage.authenticator.deletions
    for command in commands:
        result = machine.apply(command)
        assert isinstance(result, Done)
        stage.users = machine.image.users
        envelope: Any = SimpleNamespace(command=command)
        deletions.command_applied(envelope, result, Offset(1))
    assert "alice" in stage.users.credentials
    stage.authenticator.image_changed(before, machine.image)
    deletions.image_changed(before, machine.image)
    assert stage.connection.is_broken is is_ended


def test_after_a_snapshot_whose_credentials_are_others_loses_its_connections() -> None:
    """What happened meanwhile is not known."""
    before = evolve(EMPTY_IMAGE, users=USERS)
    for passwords, is_ended in (({"alice": "new"}, True), ({"bob": "new"}, False)):
        stage = Stage()
        stage.enter()
        after = evolve(EMPTY_IMAGE, users=users_of(**{"alice": "secret", "bob": "x", **passwords}))
        stage.authenticator.deletions.state_restored(after)
        stage.authenticator.deletions.image_changed(before, after)
        assert stage.connection.is_broken is is_ended
        stage.authenticator.deletions.image_changed(after, before)
        assert stage.connection.is_broken is is_ended, "once"


def test_strangers_take_two_workers_at_most_and_not_for_ever() -> None:
    stage = Stage()
    answers = []
    for _ in range(260):
        sasl = Authentication(stage.authenticator, FakeConnection())
        sasl.handshake(1, "PLAIN")
        answers.append(sasl.authenticate(b"\0alice\0secret"))
    assert len(stage.workers.jobs) == 2
    stage.wait(DELAY_MS)
    refused_now = [a for a in answers if isinstance(a, Promise) and a.is_done]
    assert len(refused_now) == 2
    stage.workers.work()
    assert len(stage.workers.jobs) == 2


def test_a_stranger_sends_no_large_frames_and_takes_no_time() -> None:
    stage = Stage(timeout_ms=30_000)
    stage.sasl.check_frame(512 << 10)
    with pytest.raises(RemoteProtocolError):
        stage.sasl.check_frame((512 << 10) + 1)
    stage.wait(29_999)
    assert not stage.sasl.is_too_slow()
    stage.wait(1)
    assert stage.sasl.is_too_slow()
    stage.enter()
    assert not stage.sasl.is_too_slow()
    stage.sasl.check_frame(100 << 20)


def test_what_a_stranger_may_ask_is_compiled_before_he_comes() -> None:
    """A first use of a version holds up the loop, for long where cores are scarce."""
    for api in OFFERED_BEFORE:
        low, high = ANNOUNCED[api]
        assert set(COMMON[api]) == set(range(low, high + 1))
