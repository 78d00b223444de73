"""Every request that changes something leaves a line: who, what, and what came of each part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from attrs import evolve
from immutables import Map
from structlog.testing import capture_logs

from raftmq.errors import ErrorCode, KafkaError, RemoteProtocolError
from raftmq.metadata.broker_messages import Outcome
from raftmq.metadata.image import GroupImage
from raftmq.protocol import ANNOUNCED, ApiKey
from raftmq.server.kafka.audited import CHANGES, NO_CHANGES, SOMETIMES
from raftmq.server.kafka.authentication import Caller
from tests.server.kafka.test_guards import HERE, MAY_NOT, USER, Guarded, requests

WHO = {"principal": USER, "host": "10.0.0.9", "listener": "CLIENTS", "client_id": "client"}
SPANS = [(api, version) for api in CHANGES for version in sorted({*ANNOUNCED[api]})]
TOPIC_OF = {
    ApiKey.UPDATE_FEATURES: "feature:raftmq.level",
    ApiKey.DELETE_GROUPS: f"group:{HERE}",
    ApiKey.OFFSET_DELETE: f"group:{HERE}",
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: f"user:{HERE}",
    ApiKey.DELETE_ACLS: "any:None",
    **dict.fromkeys(
        (
            ApiKey.DELETE_RECORDS,
            ApiKey.ELECT_LEADERS,
            ApiKey.ALTER_PARTITION_REASSIGNMENTS,
            ApiKey.WRITE_TXN_MARKERS,
        ),
        f"partition:{HERE}-0",
    ),
}
by_api = pytest.mark.parametrize(
    ("api", "version"), SPANS, ids=[f"{api.title}-{version}" for api, version in SPANS]
)


def audited(principal: str = USER) -> Guarded:
    world = Guarded(is_audited=True)
    world.connection.caller = Caller(principal, "10.0.0.9", "CLIENTS")
    return world


def fields_of(world: Guarded, api: ApiKey) -> dict[str, Any]:
    if api is ApiKey.UPDATE_FEATURES:
        update = {"feature": "raftmq.level", "max_version_level": 9, "allow_downgrade": False}
        return {"feature_updates": [{**update, "upgrade_type": 1}], "timeout": 10}
    return requests(HERE, world.topic_id)[api]


def leaves(value: Any) -> list[str]:
    """The code of each part of an answer; where it has no parts, that of all."""
    rows = value.__dict__
    found = [
        code
        for key, each in rows.items()
        if isinstance(each, list | tuple) and key not in ("matching_acls", "configs")
        for one in each
        if hasattr(one, "__dict__")
        for code in leaves(one)
    ]
    if found or "error_code" not in rows:
        return found
    return [ErrorCode(rows["error_code"]).name]


def lines_of(world: Guarded, kind: str) -> list[dict[str, Any]]:
    return [line for line in world.lines.read if line["kind"] == kind]


def outcomes(call: Any) -> Iterator[Outcome]:
    """Of a call to the controller in which all went well."""
    whole = type(call).__name__ in ("CreateAclsCall", "DeleteAclsCall")
    if whole:
        yield Outcome(name="")
        return
    for field in ("topics", "names", "resources", "users", "moves", "updates"):
        for one in getattr(call, field, ()):
            names = ("name", "resource_name", "user", "topic", "feature")
            name = next((getattr(one, key) for key in names if hasattr(one, key)), one)
            yield Outcome(name=name, resource_type=getattr(one, "resource_type", 0))
    for one in getattr(call, "topic_ids", ()):
        yield Outcome(name=HERE, topic_id=one)


def test_every_api_changes_something_or_does_not() -> None:
    told = [*CHANGES, *SOMETIMES, *NO_CHANGES]
    assert sorted(told) == sorted(ANNOUNCED), "each in one of them"


@by_api
def test_what_is_refused_leaves_a_line(api: ApiKey, version: int) -> None:
    world = audited()
    slot = world.send(api, version, **fields_of(world, api))
    world.settle()
    (line,) = lines_of(world, "administration")
    said = leaves(world.read(api, version, slot))
    assert {key: line[key] for key in WHO} == WHO
    assert (line["request"], line["outcome"]) == (api.title, "failed")
    assert set(said) <= {code.name for code in MAY_NOT} | {ErrorCode.UNKNOWN_TOPIC_ID.name}
    # An answer that has one code for all of it has it for each part.
    codes = [change["code"] for change in line["changes"]]
    assert sorted(codes) == sorted(said if len(said) > 1 else said * len(codes))
    assert line["changes"][0]["resource"] == TOPIC_OF.get(api, f"topic:{HERE}")
    assert lines_of(world, "denial"), "and one that says which right lacks"


@by_api
def test_what_is_done_leaves_a_line(api: ApiKey, version: int) -> None:
    world = audited("User:root")
    slot = world.send(api, version, **fields_of(world, api))
    for _ in range(4):
        calls, world.controller.calls = world.controller.calls, []
        for call, promise in calls:
            promise.resolve(tuple(outcomes(call)))
        world.settle()
    (line,) = lines_of(world, "administration")
    codes = [change["code"] for change in line["changes"]]
    said = leaves(world.read(api, version, slot))
    assert sorted(codes) == sorted(said if len(said) > 1 else said * len(codes))
    assert (line["principal"], line["request"]) == ("User:root", api.title)
    asked = {call for call in codes if call == ErrorCode.NONE.name}
    assert (line["outcome"] == "ok") == (asked == set(codes))
    assert not lines_of(world, "denial")


@pytest.mark.parametrize(
    "api",
    [
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.UPDATE_FEATURES,
    ],
    ids=lambda api: api.title,
)
def test_what_may_have_been_done_is_unknown(api: ApiKey) -> None:
    world = audited("User:root")
    world.send(api, ANNOUNCED[api][1], **fields_of(world, api))
    world.settle()
    late = KafkaError("no answer in time", code=ErrorCode.REQUEST_TIMED_OUT)
    assert world.controller.calls
    for _call, promise in world.controller.calls:
        promise.fail(late)
    world.settle()
    (line,) = lines_of(world, "administration")
    assert line["outcome"] == "unknown"


def commit(member_id: str = "", generation: int = -1) -> dict[str, Any]:
    row = {"partition_index": 0, "committed_offset": 7, "committed_metadata": None}
    return {
        "group_id": "billing",
        "generation_id_or_member_epoch": generation,
        "member_id": member_id,
        "topics": [{"name": HERE, "partitions": [row]}],
    }


@pytest.mark.parametrize("version", sorted({*ANNOUNCED[ApiKey.OFFSET_COMMIT]}))
@pytest.mark.parametrize("principal", [USER, "User:root"])
def test_offsets_that_an_operator_moves_leave_a_line(principal: str, version: int) -> None:
    """`raftmq group seek`, `kafka-consumer-groups.sh --reset-offsets`."""
    world = audited(principal)
    had_members = GroupImage("billing", protocol_type="consumer")
    world.engine.change(groups=Map({"billing": had_members}))
    slot = world.send(ApiKey.OFFSET_COMMIT, version, **commit())
    world.settle()
    (line,) = lines_of(world, "administration")
    (code,) = leaves(world.read(ApiKey.OFFSET_COMMIT, version, slot))
    detail = f"offset of {HERE}-0 to 7"
    assert line["request"] == "OffsetCommit"
    assert line["changes"] == [{"resource": "group:billing", "detail": detail, "code": code}]
    assert len(lines_of(world, "denial")) == (principal == USER)


def test_commits_of_consumers_leave_none() -> None:
    world = audited("User:root")
    version = ANNOUNCED[ApiKey.OFFSET_COMMIT][1]
    world.send(ApiKey.OFFSET_COMMIT, version, **commit())
    of_itself = GroupImage("billing")
    world.engine.change(groups=Map({"billing": of_itself}))
    world.send(ApiKey.OFFSET_COMMIT, version, **commit())
    world.engine.change(groups=Map({"billing": evolve(of_itself, protocol_type="consumer")}))
    world.send(ApiKey.OFFSET_COMMIT, version, **commit("member-1", 3))
    world.settle()
    assert world.lines.read == []


def test_what_a_line_says_of_a_change() -> None:
    world = audited("User:root")
    world.send(
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        1,
        resources=[
            {
                "resource_type": 2,
                "resource_name": HERE,
                "configs": [
                    {"name": "retention.ms", "config_operation": 0, "value": "5"},
                    {"name": "cleanup.policy", "config_operation": 1, "value": None},
                    {"name": "ssl.key.password", "config_operation": 0, "value": "hunter2"},
                ],
            }
        ],
        validate_only=True,
    )
    world.settle()
    for call, promise in world.controller.calls:
        promise.resolve(tuple(outcomes(call)))
    world.settle()
    (line,) = lines_of(world, "administration")
    assert line["dry_run"] is True
    (change,) = line["changes"]
    assert change["detail"] == "set retention.ms=5, delete cleanup.policy, set ssl.key.password=***"
    assert b"hunter2" not in b"".join(world.lines.raw), "what is not known to be harmless is masked"


def test_salted_passwords_are_not_written() -> None:
    world = audited("User:root")
    new = {"name": "bob", "mechanism": 1, "iterations": 4096}
    world.send(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        deletions=[],
        upsertions=[{**new, "salt": b"saltsalt", "salted_password": b"p" * 32}],
    )
    for call, promise in world.controller.calls:
        promise.resolve(tuple(outcomes(call)))
    world.settle()
    (line,) = lines_of(world, "administration")
    (change,) = line["changes"]
    assert change["detail"] == "set SCRAM-SHA-256 iterations=4096"
    assert b"salts" not in world.lines.raw[0]
    assert b"ppp" not in world.lines.raw[0]


def test_a_deletion_by_id_is_told_by_name() -> None:
    world = audited("User:root")
    wanted = [{"name": None, "topic_id": world.topic_id}, {"name": None, "topic_id": UUID(int=7)}]
    world.send(ApiKey.DELETE_TOPICS, 6, topics=wanted, timeout=10)
    for call, promise in world.controller.calls:
        promise.resolve(tuple(outcomes(call)))
    world.settle()
    (line,) = lines_of(world, "administration")
    assert [change["resource"] for change in line["changes"]] == [
        f"topic:{HERE}",
        f"topic-id:{UUID(int=7)}",
    ]


def test_a_large_request_is_told_in_several_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftmq.server.kafka.audited.PARTS_MAX", 250)
    world = audited()
    names = [f"t{number}" for number in range(255)]
    world.send(ApiKey.DELETE_GROUPS, 2, groups_names=names)
    world.settle()
    lines = lines_of(world, "administration")
    assert [(line["part"], line["parts"]) for line in lines] == [(1, 3), (2, 3), (3, 3)]
    told = [change["resource"] for line in lines for change in line["changes"]]
    assert told == [f"group:{name}" for name in names[:250]]
    assert [line.get("why") for line in lines] == [None, None, "5 more are left out"]


def test_topics_that_clients_name_leave_a_line() -> None:
    world = audited("User:root")
    world.send(ApiKey.METADATA, 9, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    ((call, promise),) = world.controller.calls
    promise.resolve(tuple(outcomes(call)))
    world.settle()
    (line,) = lines_of(world, "administration")
    assert (line["request"], line["outcome"]) == ("Metadata", "ok")
    assert line["changes"] == [
        {"resource": "topic:new", "detail": "named by a client", "code": "NONE"}
    ]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (ErrorCode.REQUEST_TIMED_OUT, "unknown"),
        (ErrorCode.TOPIC_AUTHORIZATION_FAILED, "failed"),
    ],
    ids=["no answer", "refused by the controller"],
)
def test_topics_that_clients_name_and_that_may_not_be_there(code: ErrorCode, outcome: str) -> None:
    world = audited("User:root")
    world.send(ApiKey.METADATA, 9, topics=[{"name": "new"}], allow_auto_topic_creation=True)
    ((_call, promise),) = world.controller.calls
    promise.fail(KafkaError("no", code=code))
    world.settle()
    (line,) = lines_of(world, "administration")
    assert (line["request"], line["outcome"]) == ("Metadata", outcome)
    assert line["changes"][0]["code"] == code.name


def test_a_request_that_meets_a_bug_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    world = audited("User:root")

    def fail(*_args: object) -> Any:
        raise LookupError("planted")

    monkeypatch.setattr(world.broker, "call_controller", fail)
    with capture_logs(), pytest.raises(RemoteProtocolError):
        world.send(ApiKey.DELETE_TOPICS, 5, topic_names=["a"], timeout=10)
    (line,) = lines_of(world, "administration")
    assert (line["outcome"], line["why"]) == ("unknown", "LookupError")
    assert line["changes"] == [{"resource": "topic:a", "detail": "", "code": "UNKNOWN"}]


def test_questions_leave_none() -> None:
    world = audited("User:root")
    world.send(ApiKey.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=False)
    world.send(ApiKey.LIST_GROUPS, 5, states_filter=[], types_filter=[])
    world.settle()
    assert world.lines.read == []
