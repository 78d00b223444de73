"""How users come in and are changed: SaslHandshake and SaslAuthenticate, AlterUserScramCredentials
and DescribeUserScramCredentials (KIP-554), DescribeClientQuotas (KIP-546).

The first two are the connection's own affair (`authentication.py`); where its listener has no SASL
they come at the wrong time.

A client sends salted passwords; this node turns them into keys at once, so that no other node and
no log gets anything with which one could log in.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, TypeAlias

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import AlterUsersCall, Outcome, UserRequest
from raftmq.metadata.credentials import SECRET_BYTES
from raftmq.promise import Promise
from raftmq.protocol import ApiKey, Struct
from raftmq.sasl.scram import SCRAM_BY_NUMBER, credential_of
from raftmq.server.audit import Who
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import TURN_PARTITIONS, Work, in_turns, value_of

Answer: TypeAlias = dict[str, Any]
CALL_MAX: Final = 1_000
"""Changes that one request may name."""


def alter(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer AlterUserScramCredentials: one result for each user."""
    count = len(request.deletions) + len(request.upsertions)
    if count > CALL_MAX:
        return _refused(request, f"more than {CALL_MAX} changes in one request")
    return _alter(broker, context.who, request)


def _refused(request: Struct, reason: str) -> Work[Answer]:
    names = dict.fromkeys(one.name for one in (*request.deletions, *request.upsertions))
    rows = yield from in_turns(
        names,
        lambda name: {
            "user": name,
            "error_code": ErrorCode.POLICY_VIOLATION,
            "error_message": reason,
        },
    )
    return {"throttle_time": 0, "results": rows}


def _alter(broker: Broker, who: Who, request: Struct) -> Work[Answer]:
    changes = [
        UserRequest(user=one.name, mechanism=one.mechanism, is_deleted=True)
        for one in request.deletions
    ]
    for count, one in enumerate(request.upsertions, 1):
        changes.append(_upsertion(one))
        if count % TURN_PARTITIONS == 0:
            yield None
    call = AlterUsersCall(users=tuple(changes), secret=secrets.token_bytes(SECRET_BYTES))
    names = dict.fromkeys(change.user for change in changes)
    outcomes = yield from value_of(
        broker.outcomes(
            call,
            who,
            lambda code, message: tuple(
                Outcome(name=name, code=code, message=message) for name in names
            ),
        )
    )
    rows = [
        {"user": one.name, "error_code": one.code, "error_message": one.message} for one in outcomes
    ]
    return {"throttle_time": 0, "results": rows}


def _upsertion(one: Struct) -> UserRequest:
    mechanism = SCRAM_BY_NUMBER.get(one.mechanism)
    if mechanism is None:  # the controller refuses it
        return UserRequest(user=one.name, mechanism=one.mechanism)
    salt, salted = bytes(one.salt), bytes(one.salted_password)
    keys = credential_of(mechanism, salted, salt, one.iterations)
    is_sound = len(salted) == mechanism.size
    return UserRequest(
        user=one.name,
        mechanism=one.mechanism,
        iterations=one.iterations,
        salt=salt,
        stored_key=keys.stored_key if is_sound else b"",
        server_key=keys.server_key if is_sound else b"",
    )


def describe(broker: Broker, _context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DescribeUserScramCredentials: mechanisms and iterations, of all users or some."""
    users = broker.image.users
    named: dict[str, int] = {}
    for count, one in enumerate(request.users or (), 1):
        named[one.name] = named.get(one.name, 0) + 1
        if count % TURN_PARTITIONS == 0:
            yield None
    if not named:
        named = dict.fromkeys(users.names(), 1)

    def row(user: str) -> Answer:
        known = users.credentials.get(user)
        code, message = ErrorCode.NONE, None
        if named[user] > 1:
            code = ErrorCode.DUPLICATE_RESOURCE
            message = (
                "Cannot describe SCRAM credentials for the same user twice in a single request: "
                f"{user}"
            )
        elif known is None:
            code = ErrorCode.RESOURCE_NOT_FOUND
            message = f"Attempt to describe a user credential that does not exist: {user}"
        infos = known.items() if known is not None and code is ErrorCode.NONE else ()
        return {
            "user": user,
            "error_code": code,
            "error_message": message,
            "credential_infos": [
                {"mechanism": number, "iterations": one.iterations} for number, one in sorted(infos)
            ],
        }

    rows = yield from in_turns(named, row)
    return {"throttle_time": 0, "error_code": 0, "error_message": None, "results": rows}


def describe_quotas(_broker: Broker, _context: RequestContext, _request: Struct) -> Answer:
    """Answer DescribeClientQuotas: there are no quotas, of whomever. Kafka's `kafka-configs` asks
    for those of a user before it asks for its mechanisms."""
    return {"throttle_time": 0, "error_code": 0, "error_message": None, "entries": []}


def handshake(
    _broker: Broker, context: RequestContext, request: Struct
) -> dict[str, Any] | Promise[dict[str, Any]]:
    """Answer SaslHandshake."""
    authentication = context.connection.authentication
    if authentication is None:
        return {"error_code": ErrorCode.ILLEGAL_SASL_STATE, "mechanisms": []}
    return authentication.handshake(context.api_version, request.mechanism)


def authenticate(
    _broker: Broker, context: RequestContext, request: Struct
) -> dict[str, Any] | Promise[dict[str, Any]]:
    """Answer SaslAuthenticate."""
    authentication = context.connection.authentication
    if authentication is None:
        return {
            "error_code": ErrorCode.ILLEGAL_SASL_STATE,
            "error_message": "this listener has no SASL",
            "auth_bytes": b"",
            "session_lifetime": 0,
        }
    return authentication.authenticate(bytes(request.auth_bytes))


HANDLERS: Final = {
    ApiKey.SASL_HANDSHAKE: handshake,
    ApiKey.SASL_AUTHENTICATE: authenticate,
    ApiKey.DESCRIBE_CLIENT_QUOTAS: describe_quotas,
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: describe,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: alter,
}
