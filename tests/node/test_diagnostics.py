"""Why a partition is stuck, and how far groups lag: each from a replica in that state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from immutables import Map

from raftmq.config import NodeConfig
from raftmq.metadata.commands import CommittedOffset
from raftmq.metadata.image import GroupImage, GroupsImage, PartitionImage, TopicImage
from raftmq.node.metrics.families import OTHER, Ages, Scrape
from raftmq.node.metrics.partitions import (
    GROUPS,
    GROUPS_LEFT_OUT,
    LABEL_BYTES_MAX,
    LAG,
    LAG_SECONDS,
    group_label,
)
from raftmq.node.status import diagnose, not_running, unheld
from raftmq.ports import DiskError
from raftmq.types import NodeId, RaftGroupId, ReplicaId, StorageId, TopicId, TopicPartition

NAME = TopicPartition("t", 0)
NODES = tuple(ReplicaId(NodeId(n), StorageId(n)) for n in (1, 2, 3))


def fake_node(connected: tuple[int, ...] = (2, 3), **more: Any) -> Any:
    links = SimpleNamespace(
        is_connected=lambda node_id: node_id in connected, block_to=set(), block_from=set()
    )
    image = SimpleNamespace(
        partition=lambda _name: SimpleNamespace(replicas=(1, 2, 3), moving_from=())
    )
    return SimpleNamespace(
        node_id=NodeId(1),
        engine=SimpleNamespace(image=image),
        plane=SimpleNamespace(links=links),
        events=SimpleNamespace(is_disk_full=False, is_disk_stuck=False),
        **more,
    )


def replica(**changes: Any) -> Any:
    core = SimpleNamespace(claimed_end_floor=0, is_term_absurd=False)
    fields = {
        "failure": None,
        "self_id": NODES[0],
        "core": core,
        "voters": NODES,
        "configuration": SimpleNamespace(members=NODES),
        "is_leader": True,
        "is_writable": True,
        "leader": NODES[0],
        "in_sync_replicas": lambda: NODES,
        "damaged": list,
    }
    return SimpleNamespace(**{**fields, **changes})


def why(node: Any, found: Any, min_isr: int = 1) -> list[str]:
    partition: Any = SimpleNamespace(
        name=NAME, settings=SimpleNamespace(min_insync_replicas=min_isr)
    )
    return diagnose(node, partition, found)


def test_a_healthy_partition_has_none() -> None:
    assert why(fake_node(), replica()) == []
    follower = replica(is_leader=False, is_writable=False, leader=NODES[1], self_id=NODES[0])
    assert why(fake_node(), follower) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"failure": "fsync failed"}, "replica on node 1 stopped: fsync failed"),
        ({"damaged": lambda: [(3, 9)]}, "offsets [3, 9) are damaged on node 1"),
        (
            {
                "configuration": SimpleNamespace(members=NODES[1:]),
                "is_leader": False,
                "leader": NODES[1],
            },
            "node 1 is no member under its present storage: waits to be admitted",
        ),
        ({"voters": NODES[1:]}, "node 1 is a learner: it votes once it has caught up"),
        (
            {"core": SimpleNamespace(claimed_end_floor=7, is_term_absurd=False)},
            "node 1 lost or damaged bytes that it had promised",
        ),
        (
            {
                "core": SimpleNamespace(
                    claimed_end_floor=0,
                    is_term_absurd=True,
                    term=1 << 30,
                    epochs=SimpleNamespace(last_term=4),
                )
            },
            "node 1 is at leader epoch 1073741824, its log at 4: no election can have led there",
        ),
        ({"is_writable": False}, "leader 1 waits for a majority to flush"),
    ],
)
def test_each_reason_is_named(changes: dict[str, Any], text: str) -> None:
    (told,) = why(fake_node(), replica(**changes))
    assert told.startswith(text)


def test_a_full_disk() -> None:
    node = fake_node()
    node.events.is_disk_full = True
    assert why(node, replica()) == ["the disk of node 1 is full: produces are refused"]


def test_a_disk_that_does_not_answer() -> None:
    node = fake_node()
    node.events.is_disk_stuck = True
    told = ["the disk of node 1 does not answer: a flush has not come back"]
    assert why(node, replica()) == told


def test_without_a_leader_the_missing_nodes_are_named() -> None:
    leaderless = replica(is_leader=False, leader=None)
    assert why(fake_node((2,)), leaderless) == [
        "no leader: an election is under way among voters [1, 2, 3]"
    ]
    assert why(fake_node(()), leaderless) == [
        "no quorum: 1 of voters [1, 2, 3] are there, node 1 misses [2, 3]"
    ]
    cut_off = fake_node((2, 3))
    cut_off.plane.links.block_to = {2}
    cut_off.plane.links.block_from = {3}
    assert why(cut_off, leaderless)[0].startswith("no quorum: 1 of voters")


def test_a_leader_alone_says_who_is_missing_and_what_it_refuses() -> None:
    alone = replica(in_sync_replicas=lambda: NODES[:1])
    assert why(fake_node((2,)), alone, min_isr=2) == [
        "acks=all is refused: in sync are [1], min.insync.replicas is 2",
        "out of sync: nodes [3] do not answer",
    ]


def test_a_replica_that_is_wished_for_and_not_there_yet() -> None:
    node = fake_node()
    wish = SimpleNamespace(replicas=(1, 2, 5, 4), moving_from=())
    node.engine.image.partition = lambda _name: wish
    assert why(node, replica()) == ["nodes [4, 5] should hold it and were not admitted yet"]


def test_a_replica_that_comes_by_a_move_is_in_no_trouble() -> None:
    """`no member under its present storage` was said of one that merely waited for its turn."""
    node = fake_node((2, 3, 4))
    move = SimpleNamespace(replicas=(2, 3, 1), moving_from=(2, 3, 4))
    node.engine.image.partition = lambda _name: move
    follower = {"is_leader": False, "is_writable": False, "leader": None}
    unknown = replica(configuration=SimpleNamespace(members=()), voters=(), **follower)
    assert why(node, unknown) == []
    learner = replica(voters=NODES[1:], **{**follower, "leader": NODES[1]})
    assert why(node, learner) == []
    leaderless = replica(voters=NODES[1:], **follower)
    assert why(node, leaderless) == ["no leader: an election is under way among voters [2, 3]"]
    node.events.is_disk_full = True
    assert why(node, unknown) == ["the disk of node 1 is full: produces are refused"]
    stays = SimpleNamespace(replicas=(1, 2, 4), moving_from=(1, 2, 3))
    node.events.is_disk_full = False
    node.engine.image.partition = lambda _name: stays
    lost = replica(configuration=SimpleNamespace(members=NODES[1:]), **{**follower, "leader": 2})
    assert why(node, lost) == [
        "node 1 is no member under its present storage: waits to be admitted"
    ]


def test_a_leader_waits_for_what_a_move_adds_unless_it_is_not_there() -> None:
    move = SimpleNamespace(replicas=(1, 2, 4, 5), moving_from=(1, 2, 3))
    for connected, told in (
        ((2, 3, 4, 5), []),
        ((2, 3, 4), ["nodes [5] should hold it and were not admitted yet"]),
    ):
        node = fake_node(connected)
        node.engine.image.partition = lambda _name: move
        assert why(node, replica()) == told


def test_replicas_that_do_not_run_yet() -> None:
    topic_id = TopicId(UUID(int=1))
    holders = [(1, 2), (1, 2), (1, 2), (2, 3)]
    rows = tuple(
        PartitionImage(index, 7, tuple(map(NodeId, nodes)), (), ())
        for index, nodes in enumerate(holders)
    )
    # Of partition 2 there is an earlier life.
    running = [RaftGroupId(topic_id, 0, 7), RaftGroupId(topic_id, 2, 3)]
    registry = SimpleNamespace(by_group=lambda group: True if group in running else None)
    node = fake_node(partitions=SimpleNamespace(registry=registry))
    assert not_running(node, TopicImage("t", topic_id, rows, Map())) == [
        {"topic": "t", "partition": 1},
        {"topic": "t", "partition": 2},
    ]


def test_partitions_that_no_live_broker_holds() -> None:
    live = {2: 7}
    image: Any = SimpleNamespace(live_epoch=live.get)
    topic: Any = SimpleNamespace(
        name="t",
        held=[
            SimpleNamespace(index=0, replicas=(1, 2), voters=(1, 2)),
            SimpleNamespace(index=1, replicas=(3, 1), voters=(1,)),
            SimpleNamespace(index=2, replicas=(3, 1), voters=(1, 2)),
        ],
    )
    (row,) = unheld(image, topic)
    assert (row["topic"], row["partition"]) == ("t", 1)
    assert "all its replicas are on nodes [1, 3], none of which is up" in str(row["why"])
    assert "`raftmq topic delete t`" in str(row["why"])


# ---- group lag ----

NOW_MS = 1_000_000


class Lagging:
    """A partition that this node leads or not, with a log that knows timestamps."""

    def __init__(self, index: int, *, is_leader: bool = True, high_watermark: int = 100) -> None:
        self.group = RaftGroupId(TopicId(UUID(int=1)), index, 0)
        self.is_leader = is_leader
        self.looked_up: list[int] = []
        self.is_broken = False
        log = SimpleNamespace(timestamp_job=self.job)
        self.replica = SimpleNamespace(log_start_offset=10, high_watermark=high_watermark, log=log)
        self.readable_end = high_watermark
        self.stable_lag = 0

    def job(self, offset: int) -> Any:
        self.looked_up.append(offset)
        if self.is_broken:
            raise DiskError("gone")
        job = SimpleNamespace(timestamp=None)

        def run() -> None:
            job.timestamp = NOW_MS - 1000 * (100 - offset)

        job.run = run
        return job


def group_node(partitions: list[Lagging], committed: dict[str, int], rows_max: int = 100) -> Any:
    groups: Map[str, GroupImage] = Map()
    for name, offset in committed.items():
        offsets = {
            TopicPartition("t", i): CommittedOffset(
                topic="t", partition=i, offset=offset, timestamp_ms=0
            )
            for i in range(len(partitions))
        }
        groups = groups.set(name, GroupImage(name=name, offsets=Map(offsets)))
    registry = SimpleNamespace(by_name=lambda _topic, index: partitions[index])
    image = SimpleNamespace(groups=GroupsImage(groups=groups))
    return SimpleNamespace(
        engine=SimpleNamespace(image=image),
        partitions=SimpleNamespace(registry=registry, views=SimpleNamespace(fills=lambda: ())),
        config=NodeConfig(node_id=1, data=".", metrics_groups_max=rows_max),
        plane=SimpleNamespace(clock=SimpleNamespace(wall_ms=lambda: NOW_MS)),
    )


def collect(node: Any, ages: Ages) -> Scrape:
    scrape = Scrape(ages)
    for work in GROUPS.collect(node, scrape):
        if work is not None:
            work()
    return scrape


def test_lag_in_messages_and_seconds() -> None:
    partitions = [Lagging(0), Lagging(1, is_leader=False), Lagging(2)]
    node = group_node(partitions, {"behind": 70, "done": 100, "gone": 3})
    ages = Ages()
    scrape = collect(node, ages)
    lags = {(group, index): value for (group, _, index), value in scrape[LAG].rows}
    assert lags == {
        ("behind", "0"): 30,
        ("behind", "2"): 30,
        ("done", "0"): 0,
        ("done", "2"): 0,
        ("gone", "0"): 90,  # retention took what was below the log start
        ("gone", "2"): 90,
    }
    seconds = {(group, index): value for (group, _, index), value in scrape[LAG_SECONDS].rows}
    assert seconds == {key: float(lag) for key, lag in lags.items()}
    assert partitions[1].looked_up == []
    again = len(partitions[0].looked_up)
    collect(node, ages)
    assert len(partitions[0].looked_up) == again == 2, "what did not move is not read again"


def test_a_log_that_cannot_be_read_costs_its_row_only() -> None:
    partitions = [Lagging(0), Lagging(1)]
    partitions[0].is_broken = True
    scrape = collect(group_node(partitions, {"g": 70}), Ages())
    assert [value for _, value in scrape[LAG].rows] == [30, 30]
    assert [labels for labels, _ in scrape[LAG_SECONDS].rows] == [("g", "t", "1")]


LONG = "g" * 4_096
LABELS_OF: dict[str, str] = {
    "plain": "plain",
    "h\u00e9llo w\u00f6rld": "h\u00e9llo w\u00f6rld",
    "x" * 128: "x" * 128,
    "x" * 129: "x" * 95 + "~",
    LONG: "g" * 95 + "~",
    LONG[:-1] + "h": "g" * 95 + "~",
    "\u20ac" * 43: "\u20ac" * 31 + "~",
    "two\nlines": "two\\nlines~",
    "\x1b[31mred": "\\x1b[31mred~",
    "g" * 95 + "~" + "0" * 32: "g" * 95 + "~",
}


def test_labels_of_groups_are_short_and_differ() -> None:
    labels = {name: group_label(name) for name in LABELS_OF}
    assert len(set(labels.values())) == len(labels)
    for name, label in labels.items():
        assert label.startswith(LABELS_OF[name])
        assert label.isprintable()
        assert len(label.encode()) <= LABEL_BYTES_MAX
        assert (label == name) == (LABELS_OF[name] == name)
        assert label == group_label(name)
    # Nobody can take the label of another group by its name.
    assert group_label(labels[LONG]) not in labels.values()


def test_lags_are_shown_under_labels() -> None:
    scrape = collect(group_node([Lagging(0)], {LONG: 70, "two\nlines": 100}), Ages())
    for metric in (LAG, LAG_SECONDS):
        shown = {group for (group, _, _), _ in scrape[metric].rows}
        assert shown == {group_label(LONG), group_label("two\nlines")}


def test_too_many_lags_are_summed() -> None:
    scrape = collect(group_node([Lagging(0)], {f"g{i}": 90 for i in range(9)}, rows_max=4), Ages())
    rows = dict(scrape[LAG].rows)
    assert len(rows) == 5
    assert rows[OTHER, OTHER, "-1"] == 5 * 10
    assert scrape[GROUPS_LEFT_OUT].rows == [((), 5)]
    assert len(scrape[LAG_SECONDS].rows) == 4


def test_offsets_in_partitions_that_others_lead_cost_turns_too() -> None:
    others = [Lagging(i, is_leader=False) for i in range(500)]
    turns = sum(1 for _ in GROUPS.collect(group_node(others, {"g": 1}), Scrape(Ages())))
    assert turns >= 500 // 64
