"""Verdicts, against a model that looks at every rule, as the documentation of Kafka says it."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.secured import USER_PRINCIPAL
from benchmarks.workloads.rules import many_rules
from raftmq.rights import (
    EVERYBODY,
    MASKS_MAX,
    NO_RULES,
    Authorizer,
    Kind,
    Operation,
    Pattern,
    Permission,
    Rule,
    RuleFilter,
    Rules,
    explain,
    is_from,
    rule_error,
)
from raftmq.types import METADATA_TOPIC

NAMES = st.text("ab", min_size=1, max_size=3) | st.sampled_from(["*", METADATA_TOPIC])
PRINCIPALS = st.sampled_from(["User:a", "User:b", EVERYBODY, "User:ANONYMOUS"])
HOSTS = st.sampled_from(["*", "10.0.0.1", "10.0.0.0/24", "10.0.0.9/24", "::1", "fe80::/10"])
ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.1.1", "::1", "fe80::1", "localhost"])
KINDS = st.sampled_from([Kind.TOPIC, Kind.TOPIC, Kind.GROUP])
OPERATIONS = st.sampled_from(list(Operation))
RULES = st.lists(
    st.builds(
        Rule,
        KINDS,
        st.sampled_from(list(Pattern)),
        NAMES,
        PRINCIPALS,
        HOSTS,
        OPERATIONS,
        st.sampled_from([Permission.ALLOW, Permission.ALLOW, Permission.DENY]),
    ),
    max_size=12,
)
SUPER = "User:root"


def implies(held: Operation, wanted: Operation) -> bool:
    """As in "Operations and resources" of Kafka's documentation."""
    if held in (wanted, Operation.ALL):
        return True
    if wanted is Operation.DESCRIBE:
        return held in (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER)
    return wanted is Operation.DESCRIBE_CONFIGS and held is Operation.ALTER_CONFIGS


def is_near(pattern: str, host: str) -> bool:
    if pattern in ("*", host):
        return True
    try:
        return ip_address(host) in ip_network(pattern, strict=False)
    except ValueError:
        return False


def model(
    rules: list[Rule], principal: str, host: str, kind: Kind, name: str, wanted: Operation
) -> bool:
    if kind is Kind.TOPIC and name == METADATA_TOPIC:
        return False
    allowed = False
    for rule in rules:
        covers = name.startswith(rule.name) if rule.pattern == "prefixed" else rule.name == name
        covers = covers or (rule.pattern == "literal" and rule.name == "*")
        is_his = rule.principal in (principal, EVERYBODY) and is_near(rule.host, host)
        if not (covers and is_his and rule.kind is kind):
            continue
        if rule.permission is Permission.DENY and rule.operation in (wanted, Operation.ALL):
            return False
        allowed |= rule.permission is Permission.ALLOW and implies(rule.operation, wanted)
    return allowed


def _covered(rule: Rule) -> str:
    """A name that the rule covers, and as few others as possible."""
    if rule.pattern is Pattern.PREFIXED:
        return rule.name + "zz"
    return "zz" if rule.name == "*" else rule.name


@given(RULES, RULES, PRINCIPALS, ADDRESSES, KINDS, NAMES, OPERATIONS)
def test_verdicts_are_those_of_the_model(
    rules: list[Rule],
    later: list[Rule],
    principal: str,
    host: str,
    kind: Kind,
    name: str,
    operation: Operation,
) -> None:
    now = NO_RULES.with_rules(rules)
    authorizer = Authorizer(lambda: now, [SUPER])
    rights = authorizer.rights_of(principal, host)
    for step in (rules, rules + later, later):
        now = now.with_rules(step).without_rules([rule for rule in now if rule not in step])
        assert now.count == len(set(step)) == len(list(now))
        expected = model(step, principal, host, kind, name, operation)
        for _ in range(2):  # judged, and remembered
            assert rights.may(operation, kind, name) is expected
        told = explain(now, frozenset([SUPER]), principal, host, kind, name, operation)
        assert told.is_allowed is expected
        if told.rule is not None:
            assert told.rule in step
            assert told.rule.covers(name)
        somewhere = [_covered(rule) for rule in step]
        assert rights.may_somewhere(operation, kind) is any(
            model(step, principal, host, kind, one, operation) for one in somewhere
        )
        assert authorizer.rights_of(SUPER, host).may(operation, kind, name)


@given(
    RULES,
    st.builds(
        RuleFilter,
        st.none() | KINDS,
        st.none() | st.sampled_from(list(Pattern)),
        st.none() | NAMES,
        st.none() | PRINCIPALS,
        st.none() | HOSTS,
        st.none() | OPERATIONS,
        st.none() | st.sampled_from(list(Permission)),
        st.booleans(),
    ),
)
def test_a_filter_meets_what_it_names(rules: list[Rule], wanted: RuleFilter) -> None:
    known: Rules = NO_RULES.with_rules(rules)
    met = known.met_by(wanted)
    assert met == sorted(rule for rule in set(rules) if wanted.fits(rule))


TOPIC_A = Rule(Kind.TOPIC, Pattern.LITERAL, "a", "User:x", "*", Operation.READ, Permission.ALLOW)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        (RuleFilter(), True),
        (RuleFilter(name="a"), True),
        (RuleFilter(name="ab"), False),
        (RuleFilter(name="ab", is_match=True), False),
        (RuleFilter(name="a", is_match=True), True),
        (RuleFilter(kind=Kind.GROUP), False),
        (RuleFilter(permission=Permission.DENY), False),
        (RuleFilter(pattern=Pattern.PREFIXED, name="a"), False),
    ],
)
def test_filters_of_a_literal_rule(wanted: RuleFilter, fits: bool) -> None:
    assert wanted.fits(TOPIC_A) is fits


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("principal", "x", "no principal"),
        ("principal", "User:", "no principal"),
        ("principal", "User:" + "x" * 1_000, "at most 1000"),
        ("name", "", "1 to 1000"),
        ("name", "n" * 1_001, "1 to 1000"),
        ("host", "example.org", "neither"),
        ("host", "10.0.0.0/33", "neither"),
        ("host", "1" * 100, "neither"),
        ("kind", Kind.CLUSTER, "kafka-cluster"),
    ],
)
def test_what_no_rule_may_say(field: str, value: str, error: str) -> None:
    values = {name: getattr(TOPIC_A, name) for name in TOPIC_A.__struct_fields__}
    assert rule_error(TOPIC_A) == ""
    assert error in rule_error(Rule(**{**values, field: value}))


def test_an_address_of_ipv4_within_ipv6_is_that_address() -> None:
    assert is_from("10.0.0.0/8", "::ffff:10.1.2.3")
    assert is_from("::1", "[::1]")
    assert not is_from("10.0.0.0/8", "::1")


MANY = many_rules(10_000)
ALL_OF_MANY = NO_RULES.with_rules(MANY)


@given(
    st.sampled_from(MANY),
    st.sampled_from(["", "x", "-of-another"]),
    st.integers(0, 3),
    st.sampled_from([USER_PRINCIPAL, EVERYBODY, "User:service-7", "User:stranger"]),
    st.sampled_from(["127.0.0.1", "10.1.2.3", "192.168.7.9", "fd00::1"]),
    st.sampled_from([Operation.READ, Operation.WRITE, Operation.DESCRIBE, Operation.ALL]),
)
@settings(max_examples=40, deadline=None)
def test_among_ten_thousand_rules_verdicts_are_those_of_the_model(
    near: Rule, more: str, less: int, principal: str, host: str, operation: Operation
) -> None:
    """Resources are called as a rule is, a little more or a little less."""
    name = near.name[: len(near.name) - less] + more
    for caller in (principal, near.principal):
        rights = Authorizer(lambda: ALL_OF_MANY, []).rights_of(caller, host)
        expected = model(MANY, caller, host, near.kind, name, operation)
        assert rights.may(operation, near.kind, name) is expected
        told = explain(ALL_OF_MANY, frozenset(), caller, host, near.kind, name, operation)
        assert told.is_allowed is expected


def test_the_ten_thousand_rules_of_the_benchmark_are_of_all_sorts() -> None:
    assert ALL_OF_MANY.count == 10_000
    assert not any(map(rule_error, MANY))
    for field, kinds in (("pattern", 2), ("kind", 3), ("permission", 2), ("host", 4)):
        assert len({getattr(rule, field) for rule in MANY}) == kinds
    for one in (USER_PRINCIPAL, EVERYBODY):
        for permission in Permission:
            some = [r for r in MANY if r.principal == one and r.permission is permission]
            assert 100 <= len(some) <= 1_000  # the most that a filter may mean when it deletes


def test_ten_thousand_rules_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [
        Rule(
            Kind.TOPIC,
            pattern,
            f"topic-{number:05}",
            "User:x",
            "*",
            Operation.WRITE,
            Permission.ALLOW,
        )
        for number in range(5_000)
        for pattern in Pattern
    ]
    known = NO_RULES.with_rules(rules)
    assert known.count == 10_000
    assert len(list(known.about("User:x", Kind.TOPIC, "topic-00007-more"))) == 1
    looked = 0

    def about(self: Rules, *args: object) -> object:
        nonlocal looked
        looked += 1
        return original(self, *args)  # type: ignore[arg-type]

    original = Rules.about
    monkeypatch.setattr(Rules, "about", about)
    rights = Authorizer(lambda: known, []).rights_of("User:x", "::1")
    assert all(rights.may(Operation.WRITE, Kind.TOPIC, "topic-00042") for _ in range(100))
    assert looked == 1
    assert MASKS_MAX > 10_000
