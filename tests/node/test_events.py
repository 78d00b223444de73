"""One event per state change, with the fields that find it again; repeats are counted, not lost."""

from __future__ import annotations

import ast
import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import attrs
import pytest
import structlog
from structlog.testing import capture_logs

from raftmq import logs as raftmq_logs
from raftmq.controller.leaders import LeaderTable
from raftmq.counts import ReplicaCounts
from raftmq.logs import PERIOD_S, RateLimitedLog, configure_logs
from raftmq.metadata.commands import ClaimGroup, Envelope, ReleaseGroup
from raftmq.metadata.image import MetadataImage
from raftmq.metadata.results import Claimed, GroupDone
from raftmq.node.events import (
    FOLLOWERS_MS,
    FULL_QUIET_MS,
    LINES_MAX,
    LOOK_MS,
    SETTLE_MS,
    STUCK_MS,
    Events,
    _partition_of,
)
from raftmq.node.partitions import RoleWatch
from raftmq.raft.messages import Role, SoftState
from raftmq.runtime import disk
from raftmq.types import LeaderEpoch, NodeId, Offset, ReplicaId, StorageId, TopicId, TopicPartition
from tests.server.auditing import NO_AUDIT
from tests.server.kafka.world import broker_image

TOPIC = TopicId(UUID(int=7))
NAME = TopicPartition("t", 0)
NODES = tuple(ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))


@pytest.fixture(autouse=True)
def nothing_left_out_before() -> None:
    """Loggers are the process's: what other tests left out would be told here."""
    for log in raftmq_logs._all:
        log._periods.clear()


class Clock:
    now_ms = 1_000.0

    def monotonic_ms(self) -> float:
        return self.now_ms


class FakeNode:
    """As much of a node as its events look at."""

    def __init__(self) -> None:
        self.node_id = NodeId(1)
        self.is_serving = True
        self.audit = NO_AUDIT
        self.clock = Clock()
        self.watch = SimpleNamespace(on_event=None)
        self.flush_ms = 0.0
        self.plane = SimpleNamespace(
            clock=self.clock,
            shared=SimpleNamespace(watch=self.watch),
            disk_space=lambda: (100, 0),
            flusher=SimpleNamespace(longest_ms=lambda: self.flush_ms),
        )
        self.replicas: list[Any] = []
        self.partitions = SimpleNamespace(
            counts=ReplicaCounts(), on_role=None, replicas=lambda: self.replicas
        )
        self.leaders = LeaderTable()
        topic = SimpleNamespace(name="t")
        self.engine = SimpleNamespace(
            is_leader=False,
            controller_id=NodeId(1),
            controller_epoch=1,
            on_image=lambda _callback: None,
            image=SimpleNamespace(
                topic_by_id=lambda topic_id: topic if topic_id == TOPIC else None
            ),
        )
        self.control = SimpleNamespace(leaders=self.leaders, engine=self.engine)
        self.machine = SimpleNamespace(add_listener=lambda _listener: None)
        self.config = SimpleNamespace(data=".")
        self.events = Events(self)  # type: ignore[arg-type]
        self.events.attach()

    def led(self, isr: tuple[int, ...], epoch: int = 5, leader: int = 1) -> None:
        self.leaders.led(
            TOPIC,
            0,
            leader=NodeId(leader),
            leader_epoch=LeaderEpoch(epoch),
            isr=[NodeId(n) for n in isr],
            voters=[NodeId(1), NodeId(2), NodeId(3)],
        )

    def pass_ms(self, milliseconds: float) -> list[dict[str, Any]]:
        self.clock.now_ms += milliseconds
        with capture_logs() as logs:
            self.events.tick(self.clock.now_ms)
        return [log for log in logs if log["event"] != "controller changed"]


def change(node: FakeNode, watch: RoleWatch, role: Role, term: int, leader: int | None) -> Any:
    who = None if leader is None else NODES[leader - 1]
    with capture_logs() as logs:
        node.events.replica_changed(NAME, watch, SoftState(role, term, who))
    return logs


def test_it_is_remembered_since_when_a_replica_has_no_leader() -> None:
    node, watch = FakeNode(), RoleWatch(3.0)
    change(node, watch, Role.PRE_CANDIDATE, 4, None)
    assert watch.leaderless_since_ms == 3.0
    change(node, watch, Role.FOLLOWER, 5, 2)
    assert watch.leaderless_since_ms is None
    node.clock.now_ms += 100.0
    change(node, watch, Role.PRE_CANDIDATE, 5, None)
    began_ms = node.clock.now_ms
    node.clock.now_ms += 100.0
    change(node, watch, Role.CANDIDATE, 6, None)
    assert watch.leaderless_since_ms == began_ms


def test_it_is_remembered_since_when_a_broker_is_fenced() -> None:
    node = FakeNode()

    def image(*, is_fenced: bool) -> Any:
        broker = SimpleNamespace(is_fenced=is_fenced, epoch=4)
        return SimpleNamespace(brokers={NodeId(2): broker})

    node.events._image_changed(image(is_fenced=False), image(is_fenced=True))
    node.clock.now_ms += 300.0
    node.events._image_changed(image(is_fenced=True), image(is_fenced=True))
    assert node.events.fenced_ms(NodeId(2)) == 300
    assert node.events.fenced_ms(NodeId(1)) is None
    node.events._image_changed(image(is_fenced=True), image(is_fenced=False))
    assert node.events.fenced_ms(NodeId(2)) is None


def test_roles_are_told_and_counted() -> None:
    node, watch = FakeNode(), RoleWatch()
    where = {"topic": "t", "partition": 0}
    assert change(node, watch, Role.PRE_CANDIDATE, 4, None) == []
    (log,) = change(node, watch, Role.CANDIDATE, 5, None)
    assert log == {"event": "election", "log_level": "debug", "leader_epoch": 5, **where}
    (log,) = change(node, watch, Role.LEADER, 5, 1)
    assert log == {"event": "leader elected", "log_level": "info", "leader_epoch": 5, **where}
    (log,) = change(node, watch, Role.FOLLOWER, 6, 2)
    assert log["event"] == "leadership lost"
    assert (log["leader"], log["leader_epoch"]) == (2, 6)
    assert change(node, watch, Role.FOLLOWER, 6, 2) == []
    change(node, watch, Role.LEADER, 7, 1)  # a group of one does not stay a candidate
    counts = node.partitions.counts
    assert (counts.elections, counts.elections_won, counts.leader_changes) == (2, 2, 2)


def test_replicas_leave_and_join_the_isr() -> None:
    node = FakeNode()
    node.led((1,))
    assert node.pass_ms(LOOK_MS) == [], "a new leader has not heard of all yet"
    node.led((1, 2, 3))
    assert node.pass_ms(SETTLE_MS) == []
    node.led((1, 2))
    (log,) = node.pass_ms(LOOK_MS)
    assert log["event"] == "replica left the ISR"
    assert (log["replica"], log["isr"], log["topic"], log["leader_epoch"]) == (3, [1, 2], "t", 5)
    assert log["log_level"] == "warning"
    node.led((1, 2, 3))
    (log,) = node.pass_ms(LOOK_MS)
    assert (log["event"], log["replica"]) == ("replica joined the ISR", 3)


def test_a_new_leader_tells_of_a_replica_that_is_gone() -> None:
    node = FakeNode()
    node.led((1, 2))
    (log,) = node.pass_ms(SETTLE_MS)
    assert (log["event"], log["replica"]) == ("replica left the ISR", 3)
    node.leaders.led(
        TOPIC, 0, leader=NodeId(2), leader_epoch=LeaderEpoch(6), isr=NODE_IDS, voters=NODE_IDS
    )
    assert [log["event"] for log in node.pass_ms(LOOK_MS)] == ["replica joined the ISR"]


NODE_IDS = [NodeId(1), NodeId(2), NodeId(3)]


def test_catching_up_begins_and_ends_once() -> None:
    node = FakeNode()
    behind = [NODES[2]]
    group = SimpleNamespace(topic_id=TOPIC, partition=0)
    left = 700
    node.replicas = [
        SimpleNamespace(
            group=group,
            is_leader=True,
            quiescence=SimpleNamespace(is_quiescent=False),
            learners=(),
            catching_up=lambda: behind,
            bytes_behind=lambda _follower: left,
        )
    ]
    assert node.pass_ms(LOOK_MS) == [], "all are in sync: nobody is asked"
    node.led((1, 2))
    events = [log for log in node.pass_ms(SETTLE_MS) if "ISR" not in log["event"]]
    assert [(log["event"], log["replica"], log["bytes_left"]) for log in events] == [
        ("catch-up began", 3, 700)
    ]
    assert node.pass_ms(FOLLOWERS_MS) == []
    behind.clear()
    (log,) = node.pass_ms(FOLLOWERS_MS)
    assert (log["event"], log["topic"]) == ("catch-up ended", "t")
    assert log["took_ms"] == 2 * FOLLOWERS_MS


def test_fencing_is_told_by_the_controller_and_by_the_broker_itself() -> None:
    node = FakeNode()
    free = MetadataImage(version=1)
    for node_id in NODE_IDS:
        free = attrs.evolve(free, brokers=free.brokers.set(node_id, broker_image(node_id)))
    own = attrs.evolve(free, brokers=free.brokers.set(NodeId(1), broker_image(1, is_fenced=True)))
    other = attrs.evolve(free, brokers=free.brokers.set(NodeId(2), broker_image(2, is_fenced=True)))

    def told(before: MetadataImage, after: MetadataImage) -> list[tuple[str, int]]:
        with capture_logs() as logs:
            node.events._image_changed(before, after)
        return [(log["event"], log["broker"]) for log in logs]

    assert told(free, own) == [("broker fenced", 1)]
    assert told(own, free) == [("broker unfenced", 1)]
    assert told(free, other) == []
    node.engine.is_leader = True
    assert told(free, other) == [("broker fenced", 2)]
    assert told(free, free) == []


def test_controllers_and_claims() -> None:
    node = FakeNode()
    with capture_logs() as logs:
        node.events.tick(node.clock.now_ms)
        node.engine.controller_id, node.engine.controller_epoch = NodeId(2), 3
        node.events.tick(node.clock.now_ms + LOOK_MS)
        node.events.tick(node.clock.now_ms + 2 * LOOK_MS)
    assert [(log["controller"], log["leader_epoch"]) for log in logs] == [(1, 1), (2, 3)]

    def apply(command: Any, result: Any, submitter: int = 1) -> list[Any]:
        envelope = Envelope(
            version=1, node_id=NodeId(submitter), incarnation=1, sequence=1, command=command
        )
        with capture_logs() as logs:
            node.events.command_applied(envelope, result, Offset(1))
        return logs

    claim = ClaimGroup(group="g", node_id=NodeId(1), broker_epoch=4)
    (log,) = apply(claim, Claimed(9))
    assert (log["event"], log["group"], log["coordinator_epoch"]) == ("group claimed", "g", 9)
    assert apply(ClaimGroup(group="g", node_id=NodeId(2), broker_epoch=4), Claimed(9), 2) == []
    (log,) = apply(ReleaseGroup(group="g", coordinator_epoch=9, successor=NodeId(3)), GroupDone())
    assert (log["event"], log["successor"]) == ("group released", 3)
    node.is_serving = False  # what a starting node replays happened long ago
    assert apply(claim, Claimed(9)) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"/d/topics/a-b.c-{UUID(int=1)}/partition-12/0.log", ("a-b.c", 12)),
        ("/d/meta/0.log", ("__cluster_metadata", 0)),
    ],
)
def test_a_file_tells_its_partition(path: str, name: tuple[str, int]) -> None:
    assert _partition_of(path) == name


def test_files_are_told_of() -> None:
    node = FakeNode()
    path = f"/d/topics/t-{TOPIC}/partition-0/00000000000000000000.log"
    with capture_logs() as logs:
        for what in ("rolled", "damaged", "repaired"):
            node.watch.on_event(what, path, 10, 20)  # type: ignore[misc]
    told = [(log["event"], log["log_level"]) for log in logs]
    assert told == [
        ("segment rolled", "debug"),
        ("damage found", "warning"),
        ("damage repaired", "warning"),
    ]
    assert (logs[1]["start"], logs[1]["end"], logs[1]["topic"]) == (10, 20, "t")


def test_a_full_disk_is_told_once_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode()
    monkeypatch.setattr(disk.DISK_FULL, "count", disk.DISK_FULL.count + 1)
    (log,) = node.pass_ms(LOOK_MS)
    assert log["event"].startswith("disk full")
    assert node.events.is_disk_full
    disk.DISK_FULL.count += 1
    assert node.pass_ms(LOOK_MS) == []
    monkeypatch.setattr(node.events, "disk_space", lambda: (100, 0))
    assert node.pass_ms(FULL_QUIET_MS + 1) == [], "nobody writes, and there is still no space"
    monkeypatch.setattr(node.events, "disk_space", lambda: (1 << 30, 1 << 29))
    (log,) = node.pass_ms(LOOK_MS)
    assert (log["event"], log["free_bytes"]) == ("disk has space again", 1 << 29)
    assert not node.events.is_disk_full


def test_a_disk_that_does_not_answer_is_told_once_and_its_end() -> None:
    node = FakeNode()
    node.flush_ms = STUCK_MS
    assert node.pass_ms(LOOK_MS) == [], "slow, yet"
    node.flush_ms += 1.0
    (log,) = node.pass_ms(LOOK_MS)
    assert (log["event"], log["flush_ms"]) == ("the disk does not answer", STUCK_MS + 1.0)
    assert node.events.is_disk_stuck
    assert node.pass_ms(LOOK_MS) == []
    node.flush_ms = 0.0
    (log,) = node.pass_ms(LOOK_MS)
    assert log["event"] == "the disk answers again"
    assert log["took_ms"] == STUCK_MS + 1.0 + 2 * LOOK_MS
    assert not node.events.is_disk_stuck


def test_a_thousand_partitions_are_not_a_thousand_lines() -> None:
    node = FakeNode()
    with capture_logs() as logs:
        for i in range(LINES_MAX + 200):
            name = TopicPartition("t", i)
            node.events.replica_changed(name, RoleWatch(), SoftState(Role.LEADER, 1, NODES[0]))
    assert len(logs) == LINES_MAX


def test_what_was_left_out_is_told_although_it_never_comes_again() -> None:
    now = 0.0
    with capture_logs() as logs:
        log = RateLimitedLog(structlog.get_logger(), lambda: now, lines_max=2)
        for i in range(5):
            log.info("often", i=i)
        log.flush()
        assert len(logs) == 2, "the period is not over"
        now = PERIOD_S
        log.flush()
        log.flush()
    assert logs[2:] == [{"event": "often", "left_out": 3, "log_level": "info"}]


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_every_line_names_cluster_and_node(log_format: str) -> None:
    stream = io.StringIO()
    before = structlog.get_config()
    try:
        configure_logs(
            log_format=log_format, level="info", cluster_id="c", node_id=4, stream=stream
        )
        FakeNode().events.replica_changed(NAME, RoleWatch(), SoftState(Role.LEADER, 3, NODES[0]))
    finally:
        structlog.configure(**before)
        structlog.contextvars.clear_contextvars()
    (line,) = stream.getvalue().splitlines()
    if log_format == "json":
        told = json.loads(line)
        wanted = {"cluster": "c", "node": 4, "topic": "t", "partition": 0, "leader_epoch": 3}
        assert wanted.items() <= told.items()
        assert told["event"] == "leader elected"
    else:
        assert "leader elected" in line
        assert "topic=t partition=0 leader_epoch=3 node=4" in line


SOURCES = Path(__file__).parents[2] / "raftmq"
LEVELS = ("debug", "info", "warning", "error")


def logged_events() -> Iterator[tuple[str, str]]:
    """(file, event) of every event that is logged by a constant name."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            target = ast.unparse(node.func.value)
            is_log = node.func.attr in LEVELS and target.endswith(("log", "logger", "stalls"))
            if is_log and node.args and isinstance(node.args[0], ast.Constant):
                yield str(path.relative_to(SOURCES)), str(node.args[0].value)


def test_every_event_is_documented() -> None:
    page = (SOURCES.parent / "docs" / "operations.md").read_text()
    events = list(logged_events())
    assert len(events) > 30
    missing = [(file, event) for file, event in events if f"`{event}`" not in page]
    assert missing == [], "docs/operations.md, Logs, lists events"
