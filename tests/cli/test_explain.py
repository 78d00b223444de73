"""Why something stands still: each cause by a small table of `/status`, and the words for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

from raftmq.cli.explain import (
    Finding,
    Level,
    NodeAsked,
    PartitionAsked,
    explain,
    partitions_in_trouble,
    summary,
)
from raftmq.cli.picture import NodeReport
from raftmq.replication.replica import DISK_FULL

MIB = 1 << 20
NAME = PartitionAsked("t", 0)
NODES = (1, 2, 3)


def row(node_id: int, *, leader: int | None = 1, **more: Any) -> dict[str, Any]:
    """What a node tells of its replica of t/0."""
    is_leader = node_id == leader
    return {
        "topic": "t",
        "partition": 0,
        "leader": leader,
        "is_leader": is_leader,
        "leader_epoch": 5,
        "voters": list(NODES),
        "learners": [],
        "isr": list(NODES) if is_leader else [],
        "high_watermark": 450,
        "catching_up": [],
        "lagging": [],
        "leaderless_ms": None if leader else 34_000,
        "min_insync_replicas": 2,
        "open_transaction": None,
        "replicas": list(NODES),
        "move": None,
        "failure": None,
        "troubles": [],
        "kinds": [],
        **more,
    }


def broker(node_id: int, **more: Any) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "is_fenced": False,
        "fenced_ms": None,
        "rack": None,
        "state": "active",
        "replicas": 1,
        "addresses": {},
        **more,
    }


def answer(node_id: int, **more: Any) -> dict[str, Any]:
    """A healthy node of three."""
    return {
        "node_id": node_id,
        "health": {"status": "ok", "is_live": True},
        "isolation": {"is_isolated": False, "isolated_ms": 0},
        "metadata": {
            "version": 9,
            "voters": list(NODES),
            "leader": 1,
            "leader_epoch": 4,
            "members": [],
        },
        "features": {"level": 4, "supported_level": 4},
        "brokers": [broker(n) for n in NODES],
        "topics": {"t": 1},
        "removals": [],
        "partitions": [row(node_id)],
        "not_running": [],
        "unheld": [],
        "peers": {str(n): {"is_connected": True} for n in NODES if n != node_id},
        "turned_away": {},
        "rivals": [],
        "quarantined": [],
        "journal_is_damaged": False,
        "catch_up": {"limit_bytes_per_s": 0, "bytes_per_s": 0, "held": 0},
        "disk": {"free_bytes": 100, "is_full": False, "is_stuck": False},
        **more,
    }


class Told:
    """Three healthy nodes, of which a case changes what it is about."""

    def __init__(self) -> None:
        self.answers = {n: answer(n) for n in NODES}
        self.down: dict[int, str] = {}
        self.moves: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []

    def all_rows(self, **more: Any) -> None:
        for one in self.answers.values():
            for each in one["partitions"]:
                each.update(more)

    def row(self, node_id: int, **more: Any) -> None:
        self.answers[node_id]["partitions"][0].update(more)

    def node(self, node_id: int, **more: Any) -> None:
        self.answers[node_id].update(more)

    def broker(self, node_id: int, **more: Any) -> None:
        for one in self.answers.values():
            known = {b["node_id"]: b for b in one["brokers"]}
            known[node_id] = {**known.get(node_id, broker(node_id)), **more}
            one["brokers"] = list(known.values())

    def kill(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.answers.pop(node_id, None)
            self.down[node_id] = "connection refused"

    def leaderless(self) -> None:
        for n in self.answers:
            self.answers[n]["partitions"] = [row(n, leader=None)]

    def lose_metadata(self) -> None:
        for one in self.answers.values():
            one["isolation"] = {"is_isolated": True, "isolated_ms": 34_000}
            one["metadata"]["leader"] = None

    @property
    def reports(self) -> list[NodeReport]:
        heard = [NodeReport(f"h:{n}", n, one) for n, one in self.answers.items()]
        return heard + [NodeReport(f"h:{n}", n, None, why) for n, why in self.down.items()]


Case = Callable[[Told], None]


def _two_down(told: Told) -> None:
    told.kill(2, 3)
    told.leaderless()
    told.lose_metadata()


def _one_down(told: Told) -> None:
    told.kill(3)
    told.broker(3, is_fenced=True, fenced_ms=180_000)
    told.row(1, isr=[1, 2], lagging=[{"node_id": 3, "lag_ms": 185_000}])


def _below_min(told: Told) -> None:
    told.kill(2)
    told.row(1, isr=[1], voters=[1, 2], replicas=[1, 2], min_insync_replicas=2)


def _catching_up(told: Told) -> None:
    behind = {"node_id": 3, "end_offset": 4, "bytes_left": 120 * MIB}
    told.row(1, isr=[1, 2], catching_up=[behind], lagging=[{"node_id": 3, "lag_ms": 60_000}])
    told.node(1, catch_up={"limit_bytes_per_s": 12 * MIB, "bytes_per_s": 12 * MIB, "held": 1})


def _learner(told: Told) -> None:
    behind = {"node_id": 3, "end_offset": 4, "bytes_left": 30 * MIB}
    told.row(1, isr=[1, 2], voters=[1, 2], learners=[3], catching_up=[behind])
    told.node(1, catch_up={"limit_bytes_per_s": 0, "bytes_per_s": 10 * MIB, "held": 0})


def _cut_off(told: Told) -> None:
    told.kill(3)
    told.leaderless()
    told.answers[1]["peers"]["2"]["is_connected"] = False


def _stopped(told: Told) -> None:
    told.kill(3)
    told.leaderless()
    told.row(2, failure="the disk failed", kinds=["stopped"], troubles=["stopped"])


def _lacks_space(told: Told) -> None:
    why = f"{DISK_FULL}: committed entries could not be written here"
    told.row(2, failure=why, kinds=["stopped"], troubles=["stopped"])


def _moving(told: Told) -> None:
    move = {"origin": "drain", "from": [1, 2, 3], "planned": [], "dismissed": []}
    told.answers[4] = answer(4)
    told.all_rows(move=move, replicas=[2, 3, 4], learners=[4])


def _moving_stuck(told: Told) -> None:
    _moving(told)
    told.moves = [
        {"topic": "t", "partition": 0, "is_running": True, "reason": "node 4 is down"},
        {"topic": "t", "partition": 1, "is_running": True, "reason": "another's"},
    ]


def _planned(told: Told) -> None:
    move = {"origin": "operator", "from": [], "planned": [2, 3, 4], "dismissed": []}
    told.all_rows(move=move)
    for n in NODES:
        moving = {**move, "from": [1, 2, 3], "planned": []}
        told.answers[n]["partitions"].append(row(n, move=moving, topic="u", partition=7))


def _no_target(told: Told) -> None:
    told.broker(2, state="draining")
    told.broker(4, state="cordoned")
    told.broker(5, is_fenced=True)
    told.broker(6)
    told.answers[6] = answer(6, partitions=[], disk={"free_bytes": 0, "is_full": True})


def _no_rack(told: Told) -> None:
    told.broker(2, state="draining", rack="b")
    told.broker(1, rack="a")
    told.broker(3, rack="c")
    told.broker(4, rack="a")


def _planner_knows(told: Told, *stuck: str) -> None:
    told.broker(2, state="draining")
    rows = [{"topic": "t", "partition": 0, "reason": reason} for reason in stuck]
    change = {"node_id": 2, "partitions": 3, "leaders": 1, "groups": 2, "stuck": rows}
    told.changes = [change]


def _drain_waits(told: Told) -> None:
    told.broker(2, state="draining")
    told.broker(4)


def _transaction(told: Told, **more: Any) -> None:
    held = {
        "first_offset": 120,
        "producer_id": 7,
        "epoch": 0,
        "transactional_id": "shop-1",
        "state": "Ongoing",
        "open_ms": 300_000,
        "timeout_ms": 900_000,
    }
    told.row(1, open_transaction={**held, **more})


def _removal(told: Told) -> None:
    told.kill(3)
    for one in told.answers.values():
        one["removals"] = [{"topic": "t", "partition": 0, "nodes": [3]}]


def _damaged(told: Told) -> None:
    told.row(2, kinds=["damaged"], troubles=["offsets [3, 9) are damaged on node 2"])


def _unheld(told: Told) -> None:
    for one in told.answers.values():
        one["partitions"] = []
        one["unheld"] = [{"topic": "t", "partition": 0, "why": "no leader: all are on nodes [7]"}]


def _nobody_tells(told: Told) -> None:
    told.kill(2, 3)
    told.node(1, partitions=[])


CASES: list[tuple[str, Case, str, list[tuple[str, str]]]] = [
    ("all is well", lambda told: None, "t/0", []),
    (
        "two of three are down",
        _two_down,
        "t/0",
        [
            ("blocks no quorum", "its voters 1, 2 and 3 (quorum 2) only node 1 is there"),
            ("blocks metadata without majority", "for 34 s"),
        ],
    ),
    (
        "one is down",
        _one_down,
        "t/0",
        [("blocks replica down", "node 3 is out of sync (last known in sync 3 min ago): it does")],
    ),
    (
        "acks=all is refused",
        _below_min,
        "t/0",
        [
            ("blocks too few in sync", "in sync is node 1, min.insync.replicas is 2"),
            ("blocks replica down", "out of sync: it does not answer (connection refused)"),
        ],
    ),
    (
        "a voter catches up, held back",
        _catching_up,
        "t/0",
        [("waits catching up", "120.0 MiB left; node 1 sends 12.0 MiB a second")],
    ),
    ("a learner", _learner, "t/0", [("waits catching up", "is made a replica of it")]),
    ("nodes do not hear each other", _cut_off, "t/0", [("blocks cut off", "nodes 1 and 2")]),
    (
        "a replica stopped",
        _stopped,
        "t/0",
        [("blocks no quorum", "node 2 stopped"), ("blocks stopped", "the disk failed")],
    ),
    (
        "an election",
        Told.leaderless,
        "t/0",
        [("waits election", "no leader for 34 s: an election")],
    ),
    (
        "a move",
        _moving,
        "t/0",
        [
            ("waits learner", "node 4 is made a replica of it, and has all but the newest"),
            ("waits move", "a move (drain) from 1, 2 and 3 to 2, 3 and 4"),
        ],
    ),
    (
        "a stuck move",
        _moving_stuck,
        "t/0",
        [("blocks move is stuck", "node 4 is down"), ("waits learner", "")],
    ),
    (
        "a planned move",
        _planned,
        "t/0",
        [("waits planned move", "to 2, 3 and 4 is planned and waits behind 1 under way: u/7")],
    ),
    (
        "no broker can take it",
        _no_target,
        "t/0",
        [
            (
                "blocks no target",
                "node 4 is cordoned; node 5 is down; the disk of node 6 is full",
            )
        ],
    ),
    ("no rack is free", _no_rack, "t/0", [("blocks no target", "rack a of node 4 has a replica")]),
    ("a drain in its turn", _drain_waits, "t/0", [("waits drain", "node 4 can take it")]),
    (
        "the planner says why",
        lambda told: _planner_knows(told, "no broker can take the replica of node 2: no room"),
        "t/0",
        [("blocks no target", "which is drained: no broker can take the replica of node 2")],
    ),
    ("the planner will", _planner_knows, "t/0", [("waits drain", "which is drained")]),
    (
        "a drain as its planner sees it",
        _planner_knows,
        "node 2",
        [("waits draining", "left on it: 3 replicas, 1 leadership and 2 group claims")],
    ),
    (
        "a drain that its planner sees stuck",
        lambda told: _planner_knows(told, "it has no leader"),
        "node 2",
        [("blocks draining is stuck", "of which 1 cannot go now: t/0")],
    ),
    (
        "an open transaction",
        _transaction,
        "t/0",
        [("waits open transaction", "stop at offset 120 (high watermark 450): the transaction of")],
    ),
    (
        "a transaction that hangs",
        lambda told: _transaction(told, open_ms=1_000_000),
        "t/0",
        [("blocks open transaction", "Ongoing for 17 min, its timeout is 15 min")],
    ),
    (
        "a brief transaction",
        lambda told: _transaction(told, open_ms=500),
        "t/0",
        [("note open transaction", "Ongoing for 0 s")],
    ),
    (
        "a decided transaction",
        lambda told: _transaction(told, state="PrepareCommit"),
        "t/0",
        [("waits transaction ends", "is PrepareCommit")],
    ),
    (
        "nobody's transaction",
        lambda told: _transaction(told, transactional_id=None),
        "t/0",
        [("blocks orphaned transaction", "producer 7, epoch 0")],
    ),
    (
        "a transaction above the high watermark",
        lambda told: _transaction(told, first_offset=450),
        "t/0",
        [],
    ),
    (
        "an order not obeyed",
        _removal,
        "t/0",
        [("waits removal", "node 3 was ordered to delete its data of t/0 and has not")],
    ),
    ("damage", _damaged, "t/0", [("waits damaged", "offsets [3, 9)")]),
    ("all holders are down", _unheld, "t/0", [("blocks unheld", "all are on nodes [7]")]),
    ("no holder answers", _nobody_tells, "t/0", [("blocks unheld", "node 2 does not answer")]),
    ("no such partition", lambda told: None, "t/4", [("blocks unknown", "the topic has 1")]),
    (
        "the leader's disk is full",
        lambda told: told.row(1, kinds=["disk full"], troubles=["full"]),
        "t/0",
        [("blocks disk full", "the disk of node 1, which leads, is full")],
    ),
    # Nodes.
    ("a healthy node", lambda told: None, "node 2", []),
    ("nobody knows it", lambda told: None, "node 9", [("blocks unknown", "a node 9")]),
    (
        "a node that is down",
        _one_down,
        "node 3",
        [("blocks node down", "(connection refused), fenced for 3 min; it holds 1 replica")],
    ),
    (
        "a node whose end costs a leader",
        _two_down,
        "node 2",
        [
            ("blocks node down", "these have no leader: t/0"),
            ("blocks metadata without majority", "quorum 2"),
        ],
    ),
    (
        "a new node",
        lambda told: told.broker(2, state="new"),
        "node 2",
        [("blocks new", "it takes no data until it is asked to")],
    ),
    (
        "a cordoned node",
        lambda told: told.broker(2, state="cordoned", replicas=4),
        "node 2",
        [("note cordoned", "it keeps 4 replicas")],
    ),
    (
        "a node in maintenance",
        lambda told: told.broker(2, state="maintenance"),
        "node 2",
        [("note maintenance", "it leads nothing")],
    ),
    ("a drain goes on", _drain_waits, "node 2", [("waits draining", "left on it: 1 replica")]),
    (
        "a drain is stuck",
        _no_rack,
        "node 2",
        [("blocks draining is stuck", "of which 1 cannot go now: t/0")],
    ),
    (
        "a drain is done",
        lambda told: told.broker(2, state="draining", replicas=0),
        "node 2",
        [("note drained", "holds nothing any more")],
    ),
    (
        "a fenced node",
        lambda told: told.broker(2, is_fenced=True, fenced_ms=4_000),
        "node 2",
        [("waits fenced", "fenced for 4 s")],
    ),
    (
        "a full disk",
        lambda told: told.node(2, disk={"free_bytes": 7, "is_full": True}),
        "node 2",
        [("blocks disk full", "7 bytes free")],
    ),
    (
        "a stuck disk",
        lambda told: told.node(2, disk={"free_bytes": 7, "is_full": False, "is_stuck": True}),
        "node 2",
        [("blocks disk stuck", "does not answer")],
    ),
    (
        "an isolated node",
        lambda told: told.node(
            2,
            isolation={"is_isolated": True, "isolated_ms": 5_000},
            peers={"1": {"is_connected": False}},
        ),
        "node 2",
        [("blocks isolated", "for 5 s: it leads nothing new; it does not reach node 1")],
    ),
    (
        "an older version",
        lambda told: told.node(2, features={"level": 3, "supported_level": 3}),
        "node 2",
        [("note older version", "supports raftmq.level 3, others 4")],
    ),
    (
        "a level to be raised",
        lambda told: (
            [
                one.update(features={"level": 3, "supported_level": 4})
                for one in told.answers.values()
            ]
            and None
        ),
        "node 2",
        [("note level", "support raftmq.level 4, the cluster is at 3")],
    ),
    (
        "turned away",
        lambda told: told.node(1, turned_away={"2": "node 2 was removed"}),
        "node 2",
        [("blocks turned away", "node 2 was removed")],
    ),
    (
        "a rival",
        lambda told: told.node(2, rivals=[{"node_id": 2, "storage_id": "0f", "address": "h:9"}]),
        "node 2",
        [("blocks rival", "a process at h:9 is refused")],
    ),
    (
        "what it should run and does not",
        lambda told: told.node(2, not_running=[{}, {}], quarantined=["f"]),
        "node 2",
        [("waits not running", "2 replicas"), ("note quarantine", "1 folder")],
    ),
    ("its orders", _removal, "node 3", [("blocks node down", ""), ("waits removal", "t/0")]),
]


def asked(text: str) -> PartitionAsked | NodeAsked:
    if text.startswith("node "):
        return NodeAsked(int(text[5:]))
    return PartitionAsked(text[0], int(text[2:]))


@pytest.mark.parametrize(
    ("change", "what", "wanted"),
    [pytest.param(*rest, id=name) for name, *rest in CASES],
)
def test_each_cause_has_its_words(change: Case, what: str, wanted: list[tuple[str, str]]) -> None:
    told = Told()
    change(told)
    found = explain(told.reports, asked(what), told.moves, told.changes)
    assert [f"{one.level} {one.kind}" for one in found] == [head for head, _ in wanted]
    for one, (_, words) in zip(found, wanted, strict=True):
        assert words in one.text
    for one in found:
        if one.level is Level.BLOCKS:
            assert one.remedy or one.commands or one.kind in ("turned away", "no election"), one


def _remedies(change: Case, what: str) -> list[Finding]:
    told = Told()
    change(told)
    return explain(told.reports, asked(what), told.moves, told.changes)


def test_what_a_full_disk_has_stopped_begins_again_by_itself() -> None:
    [found] = [one for one in _remedies(_lacks_space, "t/0") if one.kind == "stopped"]
    assert found.remedy == "make room on the disk of node 2: it begins again by itself then"
    assert found.commands == ()


def test_what_is_lost_is_given_up_by_name() -> None:
    found = _remedies(_two_down, "t/0")[-1]
    assert found.remedy == "start node 2 or node 3"
    assert found.otherwise is not None
    assert found.otherwise[1] == "raftmq recover --unsafe --data DATA --survivors 1"


def test_a_drain_that_is_stuck_can_be_taken_back() -> None:
    assert _remedies(_moving_stuck, "t/0")[0].commands == ("raftmq node drain 1 --cancel",)


def test_the_transaction_that_holds_readers_back_can_be_aborted() -> None:
    found = _remedies(_transaction, "t/0")[0]
    assert found.otherwise is not None
    assert found.otherwise[1] == "raftmq txn abort shop-1"


def test_how_long_a_catch_up_takes_counts_what_others_get() -> None:
    def two(told: Told) -> None:
        _catching_up(told)
        behind = {"node_id": 3, "end_offset": 4, "bytes_left": 600 * MIB}
        told.answers[1]["partitions"].append(row(1, topic="u", catching_up=[behind]))

    found = _remedies(two, "t/0")[0]
    assert "(720.0 MiB): some 60 s" in found.text
    assert found.commands == (f"raftmq node config set 1 replica.catchup.bytes.per.s={24 * MIB}",)


def test_answers_of_an_older_version_are_enough() -> None:
    """It tells less, and nothing of it is invented."""
    told = Told()
    _two_down(told)
    for one in told.answers.values():
        for key in ("features", "topics", "removals", "catch_up"):
            del one[key]
        for each in one["partitions"]:
            for key in ("kinds", "lagging", "replicas", "move", "open_transaction"):
                del each[key]
            for key in ("leaderless_ms", "min_insync_replicas"):
                del each[key]
    found = explain(told.reports, NAME)
    assert [one.kind for one in found] == ["no quorum", "metadata without majority"]


def test_trouble_is_found_wherever_it_is_told() -> None:
    told = Told()
    assert partitions_in_trouble(told.reports) == []
    _planned(told)
    assert [str(one) for one in partitions_in_trouble(told.reports)] == ["t/0", "u/7"]


def test_a_line_says_who_leads() -> None:
    told = Told()
    assert summary(told.reports, NAME) == (
        "node 1 leads at epoch 5; voters 1, 2 and 3, in sync 1, 2 and 3"
    )
    told.leaderless()
    assert summary(told.reports, evolve(NAME, topic="t")) == ""


def test_a_view_is_held_up_by_its_topic_and_by_its_index() -> None:
    told = Told()
    fill = {"view": "v", "topic": "t", "partition": 0, "lacks_bytes": 0, "trouble": ""}
    told.node(1, views=[fill, {**fill, "view": "w", "trouble": "no disk"}])
    told.node(2, views=[{**fill, "lacks_bytes": 3 * MIB}])
    told.node(3, views=[{**fill, "trouble": "no disk"}, {**fill, "partition": 1, "trouble": "x"}])
    found = explain(told.reports, PartitionAsked("v", 0))
    assert [(one.kind, one.level) for one in found] == [
        ("view_index", Level.WAITS),
        ("view_index", Level.WAITS),
        ("view", Level.NOTE),
    ]
    assert "node 2 still has 3.0 MiB" in found[0].text
    assert "node 3 cannot fill its index of it: no disk" in found[1].text
    told.leaderless()
    told.kill(2, 3)
    found = explain(told.reports, PartitionAsked("v", 0))
    assert found[0].level is Level.BLOCKS, "as the topic is"
    unknown = explain(told.reports, PartitionAsked("v", 7))
    assert any("there is no partition t/7" in one.text for one in unknown)
