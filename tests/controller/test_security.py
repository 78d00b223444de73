"""Plans of users, by Kafka's rules, and of rules: all of a request or nothing."""

from __future__ import annotations

import pytest
from attrs import evolve
from immutables import Map

from raftmq.controller.security import FILTERS_MAX, plan_rules, plan_users
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import (
    AlterUsersCall,
    CreateAclsCall,
    DeleteAclsCall,
    UserRequest,
)
from raftmq.metadata.commands import RULES_PER_COMMAND_MAX, CreateAcls, DeleteAcls
from raftmq.metadata.image import (
    EMPTY_IMAGE,
    LEVEL_OF_SECURITY,
    RAFTMQ_LEVEL,
    MetadataImage,
    UsersImage,
)
from raftmq.rights import NO_RULES, Kind, Operation, Pattern, Permission, Rule, RuleFilter
from raftmq.sasl.scram import ScramCredential


def image_at(level: int = 5) -> MetadataImage:
    known = Map({"known": Map({1: ScramCredential(b"s", b"k", b"v", 4096)})})
    users = UsersImage(known, b"secret")
    return evolve(EMPTY_IMAGE, features=Map({RAFTMQ_LEVEL: level}), users=users)


def upsertion(user: str, **changes: object) -> UserRequest:
    fields: dict[str, object] = {
        "mechanism": 1,
        "iterations": 4096,
        "salt": b"s",
        "stored_key": bytes(32),
        "server_key": bytes(32),
    }
    return UserRequest(user=user, **{**fields, **changes})  # type: ignore[arg-type]


def deletion(user: str, mechanism: int = 1) -> UserRequest:
    return UserRequest(user=user, mechanism=mechanism, is_deleted=True)


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (upsertion(""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
        (upsertion("u" * 257), ErrorCode.UNACCEPTABLE_CREDENTIAL, "not be longer than 256"),
        (upsertion("u", mechanism=0), ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM"),
        (upsertion("u", mechanism=3), ErrorCode.UNSUPPORTED_SASL_MECHANISM, "Unknown SCRAM"),
        (upsertion("u", iterations=4095), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too few iterations"),
        (upsertion("u", iterations=16385), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Too many iter"),
        (upsertion("u", salt=b""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "A salt has 1 to 1024"),
        (upsertion("u", salt=bytes(1025)), ErrorCode.UNACCEPTABLE_CREDENTIAL, "A salt has"),
        (upsertion("u", stored_key=b""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "has 32 bytes"),
        (upsertion("u", mechanism=2), ErrorCode.UNACCEPTABLE_CREDENTIAL, "has 64 bytes"),
        (deletion("other"), ErrorCode.RESOURCE_NOT_FOUND, "Attempt to delete a user credential"),
        (deletion("known", 2), ErrorCode.RESOURCE_NOT_FOUND, "Attempt to delete"),
        (deletion(""), ErrorCode.UNACCEPTABLE_CREDENTIAL, "Username must not be empty"),
    ],
)
def test_what_is_refused(request_: UserRequest, code: ErrorCode, message: str) -> None:
    command, rows = plan_users(image_at(), AlterUsersCall(users=(request_, upsertion("fine"))))
    assert [row.name for row in rows] == [request_.user, "fine"]
    assert rows[0].code is code
    assert message in str(rows[0].message)
    assert rows[1].code is ErrorCode.NONE
    assert command is not None
    assert [one.user for one in command.upsertions] == ["fine"], "each user by itself"
    alone, _ = plan_users(image_at(), AlterUsersCall(users=(request_,)))
    assert alone is None


def test_a_user_that_is_named_twice_fails_as_a_whole() -> None:
    call = AlterUsersCall(users=(deletion("known"), upsertion("known", mechanism=1)))
    command, rows = plan_users(image_at(), call)
    assert command is None
    assert [row.code for row in rows] == [ErrorCode.DUPLICATE_RESOURCE]


def test_the_first_user_is_made_by_all_mechanisms_where_there_never_was_any() -> None:
    both = (upsertion("u"), upsertion("u", mechanism=2, stored_key=bytes(64), server_key=bytes(64)))
    call = AlterUsersCall(users=both, secret=b"fresh", is_first=True)
    empty = evolve(image_at(), users=UsersImage())
    command, rows = plan_users(empty, call)
    assert command is not None
    assert [(one.user, one.mechanism) for one in command.upsertions] == [("u", 1), ("u", 2)]
    assert command.scram_secret == b"fresh"
    assert {row.code for row in rows} == {ErrorCode.NONE}
    for later in (image_at(), evolve(image_at(), users=UsersImage(secret=b"deleted since"))):
        command, rows = plan_users(later, call)
        assert command is None
        assert {row.code for row in rows} == {ErrorCode.NONE}


def test_below_the_level_nobody_is_added() -> None:
    command, rows = plan_users(image_at(4), AlterUsersCall(users=(upsertion("u"),)))
    assert command is None
    assert rows[0].code is ErrorCode.UNSUPPORTED_VERSION
    assert "raftmq.level=5" in str(rows[0].message)


def test_a_command_brings_a_secret_only_to_a_cluster_without_one() -> None:
    call = AlterUsersCall(users=(upsertion("u"), deletion("known")), secret=b"fresh")
    command, _ = plan_users(image_at(), call)
    assert command is not None
    assert command.scram_secret == b""
    assert [one.user for one in command.deletions] == ["known"]
    fresh, _ = plan_users(evolve(image_at(), users=UsersImage()), call)
    assert fresh is not None
    assert fresh.scram_secret == b"fresh"


def test_a_call_shows_no_keys() -> None:
    call = AlterUsersCall(users=(upsertion("u", salt=b"hidden-salt"),), secret=b"hidden")
    assert "hidden" not in repr(call)


# ---- rules ----


def rule(name: str, principal: str = "User:a") -> Rule:
    return Rule(Kind.TOPIC, Pattern.LITERAL, name, principal, "*", Operation.READ, Permission.ALLOW)


def image_of(*rules: Rule, level: int = LEVEL_OF_SECURITY) -> MetadataImage:
    return evolve(
        EMPTY_IMAGE, features=Map({RAFTMQ_LEVEL: level}), rules=NO_RULES.with_rules(rules)
    )


def test_only_what_is_not_there_is_created_once() -> None:
    call = CreateAclsCall(rules=(rule("b"), rule("known"), rule("b"), rule("a")))
    command, told = plan_rules(image_of(rule("known")), call)
    assert command == CreateAcls(rules=(rule("b"), rule("a")))
    (outcome,) = told(None)
    assert outcome.code is ErrorCode.NONE
    command, told = plan_rules(image_of(rule("known")), CreateAclsCall(rules=(rule("known"),)))
    assert command is None, "nothing is to be written"
    assert told(None)[0].code is ErrorCode.NONE


def test_one_rule_that_cannot_be_lets_none_be_created() -> None:
    call = CreateAclsCall(rules=(rule("a"), rule("b", "nobody")))
    command, told = plan_rules(image_of(), call)
    assert command is None
    (outcome,) = told(None)
    assert outcome.code is ErrorCode.INVALID_REQUEST
    assert "is no principal" in str(outcome.message)


def test_a_command_has_so_many_rules_and_no_more() -> None:
    many = tuple(rule(f"t{n}") for n in range(RULES_PER_COMMAND_MAX + 1))
    command, told = plan_rules(image_of(), CreateAclsCall(rules=many))
    assert command is None
    assert told(None)[0].code is ErrorCode.POLICY_VIOLATION
    command, _ = plan_rules(image_of(), CreateAclsCall(rules=many[1:]))
    assert isinstance(command, CreateAcls)
    command, told = plan_rules(image_of(*many), DeleteAclsCall(filters=(RuleFilter(),)))
    assert command is None
    assert told(None)[0].code is ErrorCode.POLICY_VIOLATION


def test_each_filter_is_told_what_it_met_and_nothing_is_deleted_twice() -> None:
    image = image_of(rule("a"), rule("b"), rule("b", "User:b"))
    filters = (RuleFilter(name="b"), RuleFilter(principal="User:b"), RuleFilter(name="zzz"))
    command, told = plan_rules(image, DeleteAclsCall(filters=filters))
    assert command == DeleteAcls(rules=(rule("b"), rule("b", "User:b")))
    assert [outcome.rules for outcome in told(None)] == [
        (rule("b"), rule("b", "User:b")),
        (rule("b", "User:b"),),
        (),
    ]
    command, told = plan_rules(image, DeleteAclsCall(filters=filters[2:]))
    assert command is None
    assert [outcome.code for outcome in told(None)] == [ErrorCode.NONE]


def test_so_many_filters_and_no_more() -> None:
    filters = (RuleFilter(name="a"),) * (FILTERS_MAX + 1)
    command, told = plan_rules(image_of(rule("a")), DeleteAclsCall(filters=filters))
    assert command is None
    codes = [outcome.code for outcome in told(None)]
    assert codes == [ErrorCode.POLICY_VIOLATION] * len(filters)


def test_below_the_level_there_are_no_rules() -> None:
    below = image_of(level=LEVEL_OF_SECURITY - 1)
    calls = (
        CreateAclsCall(rules=(rule("a"),)),
        DeleteAclsCall(filters=(RuleFilter(), RuleFilter())),
    )
    for call, count in zip(calls, (1, 2), strict=True):
        command, told = plan_rules(below, call)
        assert command is None
        codes = [outcome.code for outcome in told(None)]
        assert codes == [ErrorCode.UNSUPPORTED_VERSION] * count
        assert f"raftmq.level={LEVEL_OF_SECURITY}" in str(told(None)[0].message)
