"""`raftmq acl`: the rules that words mean, what filters find, and why something is allowed."""

from __future__ import annotations

import json

import pytest

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker

TOPIC, GROUP, CLUSTER, ID = 2, 3, 4, 5
LITERAL, PREFIXED = 3, 4
ALL, READ, WRITE, CREATE, DESCRIBE, IDEMPOTENT = 2, 3, 4, 5, 8, 12
DENY, ALLOW = 2, 3
ALICE, BOB = "User:alice", "User:bob"


def test_create_makes_a_rule_of_each_combination(call: Call, broker: FakeBroker) -> None:
    whom = ("--allow-principal", ALICE, "--allow-principal", BOB, "--allow-host", "10.0.0.0/8")
    done = call("acl", "create", *whom, "--operation", "Read", "--topic", "a", "--group", "g")
    assert done.exit_code == 0, done.output
    assert sorted(broker.rules) == [
        (TOPIC, LITERAL, "a", ALICE, "10.0.0.0/8", READ, ALLOW),
        (TOPIC, LITERAL, "a", BOB, "10.0.0.0/8", READ, ALLOW),
        (GROUP, LITERAL, "g", ALICE, "10.0.0.0/8", READ, ALLOW),
        (GROUP, LITERAL, "g", BOB, "10.0.0.0/8", READ, ALLOW),
    ]
    assert [line.split() for line in done.stdout.splitlines()][:2] == [
        ["PERMISSION", "PRINCIPAL", "HOST", "OPERATION", "RESOURCE", "PATTERN", "NAME"],
        ["allow", ALICE, "10.0.0.0/8", "read", "topic", "literal", "a"],
    ]


def test_denials_prefixes_and_the_cluster(call: Call, broker: FakeBroker) -> None:
    prefixed = ("--topic", "a-", "--cluster", "--resource-pattern-type", "prefixed")
    assert call("acl", "create", "--deny-principal", "User:*", *prefixed).exit_code == 0
    assert sorted(broker.rules) == [
        (TOPIC, PREFIXED, "a-", "User:*", "*", ALL, DENY),
        (CLUSTER, LITERAL, "kafka-cluster", "User:*", "*", ALL, DENY),
    ]


def test_what_producers_and_consumers_need(call: Call, broker: FakeBroker) -> None:
    whom = ("--allow-principal", ALICE)
    words = ("--producer", "--topic", "t", "--transactional-id", "x", "--idempotent")
    assert call("acl", "create", *whom, *words).exit_code == 0
    assert {rule[:3] + rule[5:6] for rule in broker.rules} == {
        (TOPIC, LITERAL, "t", WRITE),
        (TOPIC, LITERAL, "t", DESCRIBE),
        (TOPIC, LITERAL, "t", CREATE),
        (ID, LITERAL, "x", WRITE),
        (ID, LITERAL, "x", DESCRIBE),
        (CLUSTER, LITERAL, "kafka-cluster", IDEMPOTENT),
    }
    broker.rules.clear()
    assert call("acl", "create", *whom, "--consumer", "--topic", "t", "--group", "g").exit_code == 0
    assert {rule[:3] + rule[5:6] for rule in broker.rules} == {
        (TOPIC, LITERAL, "t", READ),
        (TOPIC, LITERAL, "t", DESCRIBE),
        (GROUP, LITERAL, "g", READ),
    }


@pytest.fixture
def kept(broker: FakeBroker) -> FakeBroker:
    """A broker with rules."""
    broker.rules += [
        (TOPIC, LITERAL, "a-1", ALICE, "*", READ, ALLOW),
        (TOPIC, PREFIXED, "a-", ALICE, "*", WRITE, ALLOW),
        (TOPIC, LITERAL, "*", BOB, "*", READ, ALLOW),
        (GROUP, LITERAL, "a-1", BOB, "*", READ, ALLOW),
        (TOPIC, LITERAL, "a-1", "User:*", "10.0.0.9", ALL, DENY),
    ]
    return broker


def test_list_finds_what_a_filter_means(call: Call, kept: FakeBroker) -> None:
    def found(*words: str) -> set[tuple[str, str, str]]:
        rows = json.loads(call("acl", "list", *words, "--json").stdout)
        return {(row["RESOURCE"], row["NAME"], row["PRINCIPAL"]) for row in rows}

    assert len(found()) == 5
    assert found("--principal", ALICE) == {("topic", "a-1", ALICE), ("topic", "a-", ALICE)}
    assert found("--topic", "a-1") == {("topic", "a-1", ALICE), ("topic", "a-1", "User:*")}
    assert found("--topic", "a-1", "--resource-pattern-type", "match") == {
        ("topic", "a-1", ALICE),
        ("topic", "a-", ALICE),
        ("topic", "*", BOB),
        ("topic", "a-1", "User:*"),
    }
    assert found("--permission", "deny") == {("topic", "a-1", "User:*")}
    assert found("--operation", "WRITE") == {("topic", "a-", ALICE)}


def test_delete_shows_what_is_gone_and_dry_run_keeps_it(call: Call, kept: FakeBroker) -> None:
    before = list(kept.rules)
    dry = call("acl", "delete", "--principal", ALICE, "--dry-run").stdout
    assert kept.rules == before
    done = call("acl", "delete", "--principal", ALICE)
    assert done.stdout == dry
    assert len(done.stdout.splitlines()) == 3
    assert all(rule[3] != ALICE for rule in kept.rules)
    assert len(kept.rules) == 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["alice", "read", "topic:a-1"], "may read topic 'a-1': a rule allows it: allow read on"),
        (["alice", "write", "topic:a-2"], "allow write on topic prefixed 'a-'"),
        (["alice", "describe", "topic:a-2"], "allow write on topic prefixed 'a-'"),
        (["User:bob", "Read", "topic:zzz"], "allow read on topic '*'"),
        (["bob", "read", "group:a-1"], "User:bob may read group 'a-1'"),
        (["alice", "read", "topic:a-1", "--host", "10.0.0.8"], "a rule allows it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_why_something_is_allowed(
    call: Call, kept: FakeBroker, words: list[str], says: str
) -> None:
    kept.rules.pop()
    done = call("acl", "why", *words)
    assert done.exit_code == 0, done.output
    assert says in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["alice", "read", "topic:b"], "User:alice may not read topic 'b': no rule allows it"),
        (["alice", "alter", "cluster"], "no rule allows it"),
        (["bob", "write", "topic:zzz"], "no rule allows it"),
        (["alice", "read", "topic:a-1", "--host", "10.0.0.9"], "a rule denies it: deny all on"),
        (["alice", "read", "topic:a-1"], "a rule denies it: deny all on"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_why_something_is_not_allowed(
    call: Call, kept: FakeBroker, words: list[str], says: str
) -> None:
    done = call("acl", "why", *words)
    assert done.exit_code == 1
    assert says in done.stdout
    told = json.loads(call("acl", "why", *words, "--json").stdout)
    assert told["allowed"] is False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", "--topic", "t"], "whom?"),
        (["create", "--allow-principal", ALICE], "on what?"),
        (["create", "--allow-principal", "alice", "--topic", "t"], "is no principal"),
        (["create", "--allow-principal", ALICE, "--topic", "t", "--operation", "x"], "is none of"),
        (["create", "--allow-principal", ALICE, "--producer"], "want a --topic"),
        (["create", "--allow-principal", ALICE, "--consumer", "--topic", "t"], "wants a --group"),
        (
            ["create", "--allow-principal", ALICE, "--topic", "t", "--allow-host", "host"],
            "neither *, nor an address",
        ),
        (["delete"], "all of them are not deleted at once"),
        (["why", "alice", "read", "topic"], "which topic?"),
        (["why", "alice", "read", "view:x"], "is none of"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_meant(call: Call, broker: FakeBroker, words: list[str], says: str) -> None:
    done = call("acl", *words)
    assert done.exit_code == 2, done.output
    assert says in done.stderr
    assert not broker.rules


def test_a_broker_that_refuses_is_quoted(call: Call, broker: FakeBroker) -> None:
    broker.fault(ApiKey.CREATE_ACLS, "refuse", ErrorCode.SECURITY_DISABLED)
    done = call("acl", "create", "--allow-principal", ALICE, "--topic", "t")
    assert done.exit_code == 1
    assert "SECURITY_DISABLED" in done.stderr
