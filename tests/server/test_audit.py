"""Lines of the audit: what they hold, how many strangers can cause, what is told of the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from raftmq.server.audit import (
    LINES_MAX,
    PEER_LISTENER,
    PERIOD_MS,
    TEXT_LENGTH_MAX,
    Audit,
    AuditKind,
    AuditOutcome,
    AuditRow,
    Who,
)
from tests.server.auditing import NO_AUDIT, Lines

WHO = Who("User:alice", "10.0.0.9", "CLIENTS", "app")
STRANGER = Who(None, "10.0.0.66", "CLIENTS")
FAILED_MAX = LINES_MAX[AuditKind.AUTHENTICATION, AuditOutcome.FAILED]
DENIED_MAX = LINES_MAX[AuditKind.DENIAL, AuditOutcome.DENIED]


class World:
    now_ms = 1_700_000_000_000.0

    def __init__(self) -> None:
        self.lines = Lines()
        clock: Any = self
        self.audit = Audit(self.lines, clock, cluster="cluster", node=1)

    def monotonic_ms(self) -> float:
        return self.now_ms

    def wall_ms(self) -> int:
        return int(self.now_ms)

    def fail(self) -> None:
        self.audit.authentication(STRANGER, "PLAIN", AuditOutcome.FAILED, why="a wrong password")


def test_lines() -> None:
    world = World()
    world.audit.authentication(WHO, "SCRAM-SHA-512", AuditOutcome.OK)
    world.fail()
    world.audit.denial(WHO, "Fetch", "read", "topic:orders")
    row = AuditRow("topic:orders", "", "NONE")
    world.audit.administration(WHO, "DeleteTopics", AuditOutcome.OK, [row])
    alice = {
        "principal": "User:alice",
        "host": "10.0.0.9",
        "listener": "CLIENTS",
        "client_id": "app",
    }
    assert json.loads(world.lines.raw[0])["at"] == "2023-11-14T22:13:20.000+00:00"
    assert world.lines.read == [
        {
            "kind": "authentication",
            "outcome": "ok",
            **alice,
            "mechanism": "SCRAM-SHA-512",
            "again": False,
        },
        {
            "kind": "authentication",
            "outcome": "failed",
            "host": "10.0.0.66",
            "listener": "CLIENTS",
            "mechanism": "PLAIN",
            "again": False,
            "why": "a wrong password",
        },
        {
            "kind": "denial",
            "outcome": "denied",
            **alice,
            "request": "Fetch",
            "operation": "read",
            "resource": "topic:orders",
        },
        {
            "kind": "administration",
            "outcome": "ok",
            **alice,
            "request": "DeleteTopics",
            "changes": [{"resource": "topic:orders", "detail": "", "code": "NONE"}],
        },
    ]
    assert world.audit.lines == {
        ("authentication", "ok"): 1,
        ("authentication", "failed"): 1,
        ("denial", "denied"): 1,
        ("administration", "ok"): 1,
    }


@pytest.mark.parametrize(
    "name", ["a\nb", "\x1b[2J", "\u202egnp", "\x7f\x9b", "\ud800", '"}\n{"kind":"x"}', "ü"]
)
def test_texts_of_others_stay_within_their_line(name: str) -> None:
    world = World()
    row = AuditRow(f"group:{name}", name, "NONE")
    who = Who(f"User:{name}", "h", "CLIENTS", name)
    world.audit.administration(who, "DeleteGroups", AuditOutcome.OK, [row])
    (raw,) = world.lines.raw
    assert raw.endswith(b"\n")
    assert raw.count(b"\n") == 1
    assert all(char.isprintable() for char in raw[:-1].decode())
    (line,) = world.lines.read
    assert line["principal"] == f"User:{name}"
    assert line["changes"] == [{"resource": f"group:{name}", "detail": name, "code": "NONE"}]


def test_long_texts_are_cut() -> None:
    world = World()
    long = "x" * 10_000
    row = AuditRow(long, long, "NONE")
    world.audit.administration(Who(long, long, long, long), long, AuditOutcome.OK, [row])
    assert len(world.lines.raw[0]) < 8 * (TEXT_LENGTH_MAX + 60)
    assert world.lines.read[0]["principal"] == f"{long[:TEXT_LENGTH_MAX]}... (10000 characters)"


def test_strangers_cannot_fill_the_file() -> None:
    world = World()
    for _ in range(FAILED_MAX + 7):
        world.fail()
    assert len(world.lines.raw) == FAILED_MAX
    assert world.audit.left_out == {"rate": 7, "memory": 0}
    world.audit.authentication(WHO, "PLAIN", AuditOutcome.OK)
    assert len(world.lines.raw) == FAILED_MAX + 1, "other outcomes have room of their own"
    world.audit.tick()
    assert len(world.lines.raw) == FAILED_MAX + 1, "the ten seconds are not over"
    world.now_ms += PERIOD_MS
    world.audit.tick()
    left = {"kind": "left_out", "of": "authentication", "outcome": "failed", "listener": "CLIENTS"}
    assert world.lines.read[-1] == {**left, "reason": "rate", "count": 7}
    world.fail()
    assert world.lines.read[-1]["outcome"] == "failed"
    world.audit.tick()
    assert len(world.lines.raw) == FAILED_MAX + 3


def test_a_flood_at_one_listener_hides_nothing_at_another() -> None:
    world = World()
    for _ in range(FAILED_MAX + 7):
        world.fail()
    peer = Who(None, "10.0.0.67", "peer_listener")
    world.audit.authentication(peer, "certificate", AuditOutcome.FAILED, why="plain")
    assert world.lines.read[-1]["listener"] == "peer_listener"


def test_what_was_left_out_is_told_before_the_next_one() -> None:
    world = World()
    for _ in range(FAILED_MAX + 1):
        world.fail()
    world.now_ms += PERIOD_MS
    world.fail()
    assert [line["kind"] for line in world.lines.read[-2:]] == ["left_out", "authentication"]


def test_changes_are_never_left_out_for_their_number() -> None:
    world = World()
    for outcome in (AuditOutcome.OK, AuditOutcome.UNKNOWN, AuditOutcome.PARTIAL):
        for _ in range(2_000):
            row = AuditRow("topic:t", "", "NONE")
            world.audit.administration(WHO, "CreateTopics", outcome, [row])
    assert len(world.lines.raw) == 6_000
    assert world.audit.left_out == {"rate": 0, "memory": 0}


def test_lines_for_which_there_is_no_memory_are_counted_and_told() -> None:
    world = World()
    world.lines.room = 1
    row = AuditRow("topic:t", "", "NONE")
    for _ in range(4):
        world.audit.administration(WHO, "CreateTopics", AuditOutcome.OK, [row])
    assert world.audit.left_out == {"rate": 0, "memory": 3}
    world.audit.tick()
    assert len(world.lines.raw) == 1
    world.lines.room = None
    with capture_logs() as logs:
        world.audit.tick()
        world.audit.tick()
    assert world.lines.read[1:] == [{"kind": "left_out", "reason": "memory", "count": 3}]
    event = "lines of the audit file were left out: no memory"
    assert [(log["event"], log["count"]) for log in logs] == [(event, 3)]


def test_a_file_that_cannot_be_written_is_told_once() -> None:
    world = World()
    with capture_logs() as logs:
        world.audit.tick()
        world.lines.failure = "No space left on device"
        world.audit.tick()
        world.audit.tick()
        world.lines.failure = ""
        world.audit.tick()
    assert [(log["event"], log.get("why")) for log in logs] == [
        ("the audit file cannot be written", "No space left on device"),
        ("the audit file is written again", None),
    ]


def test_without_a_file_nothing_is_done() -> None:
    NO_AUDIT.authentication(WHO, "PLAIN", AuditOutcome.OK)
    NO_AUDIT.denial(WHO, "Fetch", "read", "topic:t")
    NO_AUDIT.administration(WHO, "DeleteTopics", AuditOutcome.OK, [])
    NO_AUDIT.tick()
    assert (NO_AUDIT.lines, NO_AUDIT.left_out) == ({}, {})


def test_a_denial_of_the_controller_names_the_node_that_asked() -> None:
    world = World()
    more: dict[str, Any] = {"by_node": 3, "why": "not authorized"}
    world.audit.denial(WHO, "DeleteTopicsCall", "delete", "topic:orders", **more)
    nobody = Who(None, "", PEER_LISTENER)
    world.audit.denial(nobody, "DeleteTopics", "forward", "cluster:kafka-cluster", **more)
    by_alice, by_node = world.lines.read
    assert (by_alice["principal"], by_alice["host"]) == ("User:alice", "10.0.0.9")
    assert (by_alice["listener"], by_alice["client_id"]) == ("CLIENTS", "app")
    assert by_alice["request"] == "DeleteTopicsCall"
    assert {name: by_alice[name] for name in more} == more
    assert "principal" not in by_node
    assert (by_node["listener"], by_node["by_node"]) == ("peer_listener", 3)


def test_a_node_that_names_ever_more_listeners_does_not_fill_the_file() -> None:
    """It says itself by which listener those came for whom it asks."""
    world = World()
    for number in range(DENIED_MAX + 7):
        who = Who("User:eve", "10.0.0.9", f"CLIENTS-{number}")
        world.audit.denial(who, "DeleteTopicsCall", "delete", "topic:orders", by_node=3)
    assert len(world.lines.raw) == DENIED_MAX
    assert world.audit.left_out == {"rate": 7, "memory": 0}
    assert len(world.audit._periods) == 1
    world.audit.denial(WHO, "Fetch", "read", "topic:orders")
    assert len(world.lines.raw) == DENIED_MAX + 1, "clients of this node have room of their own"
    world.now_ms += PERIOD_MS
    world.audit.tick()
    left = {"kind": "left_out", "of": "denial", "outcome": "denied", "listener": "peer_listener"}
    assert world.lines.read[-1] == {**left, "reason": "rate", "count": 7}
