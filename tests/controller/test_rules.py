"""Plans of rules: all of a request or nothing, and filters that become the rules that they mean."""

from __future__ import annotations

from attrs import evolve
from immutables import Map

from raftmq.controller.rules import FILTERS_MAX, plan_rules
from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import CreateAclsCall, DeleteAclsCall
from raftmq.metadata.commands import RULES_PER_COMMAND_MAX, CreateAcls, DeleteAcls
from raftmq.metadata.image import EMPTY_IMAGE, LEVEL_OF_SECURITY, RAFTMQ_LEVEL, MetadataImage
from raftmq.rights import NO_RULES, Kind, Operation, Pattern, Permission, Rule, RuleFilter


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
