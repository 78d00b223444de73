"""Whoever authenticated by SASL is the one whom guards judge, and before that nobody is served."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.protocol import ANNOUNCED, ApiKey
from raftmq.rights import Kind, Operation, Rule
from raftmq.server.kafka.authentication import (
    ANONYMOUS,
    Authentication,
    Authenticator,
    Caller,
    SaslSettings,
)
from raftmq_client import Scram
from tests.server.kafka.test_authentication import FakeWorkers, users_of
from tests.server.kafka.test_guards import BATCH, HERE, Guarded, allow, asked

NO_TOPIC = ErrorCode.TOPIC_AUTHORIZATION_FAILED
ALICE_WRITES = allow(Operation.WRITE, Kind.TOPIC, HERE, "User:alice")
BEFORE = (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)


class Authenticated(Guarded):
    """A world whose client came by a listener with SASL."""

    def __init__(self, *rules: Rule) -> None:
        super().__init__(*rules)
        self.users = users_of(alice="secret", bob="other")
        self.workers = FakeWorkers()
        self.is_finished = False
        self.connection.caller = Caller(host="10.0.0.9", listener="SASL")
        self.connection.finish = self._finish
        authenticator = Authenticator(
            SaslSettings(mechanisms=("SCRAM-SHA-256", "PLAIN")),
            lambda: self.users,
            workers=self.workers,
            deadlines=self.bench.deadlines,
            clock=self.bench.clock,
            counts=self.broker.metrics,
            audit=self.audit,
        )
        self.connection.authentication = Authentication(authenticator, self.connection)

    def _finish(self) -> None:
        self.is_finished = True

    def enter(self, user: str, password: str) -> Any:
        """The last answer to an exchange of SCRAM."""
        shaken = self.ask(ApiKey.SASL_HANDSHAKE, 1, mechanism="SCRAM-SHA-256")
        assert shaken.error_code == ErrorCode.NONE
        client = Scram(user, password, "SHA-256").exchange()
        challenge = self.ask(ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=next(client))
        slot = self.send(
            ApiKey.SASL_AUTHENTICATE, 2, auth_bytes=client.send(bytes(challenge.auth_bytes))
        )
        self.settle()
        return self.read(ApiKey.SASL_AUTHENTICATE, 2, slot)

    def produced_here(self) -> ErrorCode:
        """What a produce to the topic is told."""
        slot = self.produce(9, [(HERE, 0, BATCH)], timeout_ms=10)
        self.settle()
        (topic,) = self.produced(9, slot).topics
        return ErrorCode(topic.partitions[0].error_code)


def test_the_user_that_authenticated_is_the_one_who_has_rights() -> None:
    world = Authenticated(ALICE_WRITES)
    assert world.enter("alice", "secret").error_code == ErrorCode.NONE
    assert world.produced_here() is not NO_TOPIC
    assert world.replica(HERE).log_end_offset == 1
    other = Authenticated(ALICE_WRITES)
    assert other.enter("bob", "other").error_code == ErrorCode.NONE
    assert other.produced_here() is NO_TOPIC
    assert other.replica(HERE).log_end_offset == 0
    assert other.broker.metrics.denials == {(Kind.TOPIC, Operation.WRITE): 1}


def test_a_name_alone_gives_no_rights() -> None:
    world = Authenticated(ALICE_WRITES)
    refused = world.enter("alice", "guess")
    assert refused.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert world.is_finished
    assert world.connection.caller.principal == ANONYMOUS
    with pytest.raises(RemoteProtocolError):
        world.produce(9, [(HERE, 0, BATCH)])
    assert world.replica(HERE).log_end_offset == 0


@pytest.mark.parametrize(
    "api", [api for api in ANNOUNCED if api not in BEFORE], ids=lambda api: api.title
)
def test_a_stranger_is_not_served_whatever_rules_say(api: ApiKey) -> None:
    """Of a listener with SASL nobody is anonymous: not even rules for everybody let it in."""
    everything = [
        allow(Operation.ALL, kind, name, principal)
        for kind in Kind
        for name in ("*", "kafka-cluster")
        for principal in ("User:*", ANONYMOUS)
    ]
    world = Authenticated(*everything)
    with pytest.raises(RemoteProtocolError, match="before it has authenticated"):
        asked(world, api, min(ANNOUNCED[api][1], 12), HERE, world.topic_id)
    assert world.replica(HERE).log_end_offset == 0
    assert not world.controller.calls
    assert not world.engine.proposed
