"""Stock tools and clients move partitions: Kafka's own tools, kafka-python, franz-go's kadm.

A move is held for as long as a test looks at it: brokers send almost nothing to replicas that are
being made, and the partitions are larger than what they send at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import confluent_kafka
import kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.errors import ErrorCode
from raftmq_client import Admin, ResourceType, TopicPartition
from tests.clients.adapters import elect_preferred
from tests.clients.test_transaction_tools import attempt, run
from tests.clients.transactional import RemoteClient
from tests.live.harness import Cluster, wait_until

pytestmark = [pytest.mark.live, pytest.mark.slow]

RATE = "replica.catchup.bytes.per.s"
THROTTLE = "leader.replication.throttled.rate"
THROTTLED = "leader.replication.throttled.replicas"
RECORD_BYTES = 256 << 10
RECORDS = 40
"""Of one partition: more than a leader has under way to one replica."""


@contextmanager
def held(cluster: Cluster) -> Iterator[None]:
    """Let no replica be made."""
    with Admin(cluster.bootstrap) as admin:
        admin.alter_configs(ResourceType.BROKER, "", {RATE: "1"})
        try:
            yield
        finally:
            admin.alter_configs(ResourceType.BROKER, "", {RATE: None})


def create(cluster: Cluster, topic: str, *replicas: Sequence[int], records: int = RECORDS) -> None:
    """A topic with these replicas of its partitions, and as many records in each."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    new = NewTopic(topic, len(replicas), replica_assignment=[list(nodes) for nodes in replicas])
    admin.create_topics([new])[topic].result(60)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.bootstrap, "queue.buffering.max.kbytes": 1 << 20}
    )
    for number in range(records):
        for partition in range(len(replicas)):
            value = b"%08d" % number + bytes(RECORD_BYTES)
            producer.produce(topic, value, partition=partition)
    assert producer.flush(120) == 0


def read_numbers(cluster: Cluster, topic: str, partition: int) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": topic, "enable.partition.eof": True}
    )
    try:
        at = confluent_kafka.TopicPartition(topic, partition, 0)
        consumer.assign([at])
        found = []
        while (message := consumer.poll(60)) is not None and message.error() is None:
            found.append(int(message.value()[:8]))
        return found
    finally:
        consumer.close()


def replicas_of(cluster: Cluster, topic: str) -> list[list[int]]:
    told = AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(topic, timeout=30)
    partitions = told.topics[topic].partitions
    return [list(partitions[index].replicas) for index in sorted(partitions)]


def described(cluster: Cluster, kind: ResourceType, name: str, key: str) -> tuple[str | None, str]:
    with Admin(cluster.bootstrap) as admin:
        (entry,) = [one for one in admin.describe_configs(kind, name) if one.name == key]
        return entry.value, entry.source


class Tool:
    """`kafka-reassign-partitions` and `kafka-topics` on one plan."""

    def __init__(self, cluster: Cluster, folder: Path, topic: str) -> None:
        self._cluster = cluster
        self._folder = folder
        self._topic = topic
        self._file = folder / "plan.json"

    def plan(self, *replicas: Sequence[int]) -> None:
        """Write down where the partitions should go."""
        rows = [
            {"topic": self._topic, "partition": index, "replicas": list(nodes)}
            for index, nodes in enumerate(replicas)
        ]
        self._file.write_text(json.dumps({"version": 1, "partitions": rows}))

    def generate(self, brokers: str) -> list[list[int]]:
        """Let the tool make the plan."""
        topics = self._folder / "topics.json"
        topics.write_text(json.dumps({"version": 1, "topics": [{"topic": self._topic}]}))
        told = self("--generate", "--topics-to-move-json-file", topics, "--broker-list", brokers)
        proposed = told.split("Proposed partition reassignment configuration\n")[1]
        self._file.write_text(proposed)
        rows = json.loads(proposed)["partitions"]
        return [row["replicas"] for row in sorted(rows, key=lambda row: row["partition"])]

    def __call__(self, *words: object) -> str:
        return run("reassign.ReassignPartitionsCommand", *self._words(*words))

    def with_plan(self, action: str, *words: object) -> str:
        """One action on the plan."""
        return self(action, "--reassignment-json-file", self._file, *words)

    def refused(self, action: str, *words: object) -> str:
        """What it says of an action that fails."""
        more = (action, "--reassignment-json-file", self._file, *words)
        done = attempt("reassign.ReassignPartitionsCommand", *self._words(*more))
        assert done.returncode != 0, done.stdout
        return done.stdout

    def topics(self, *words: object) -> list[str]:
        """Lines of `kafka-topics` about partitions."""
        told = run(
            "TopicCommand",
            *self._words("--describe", "--topic", self._topic, *words),
        )
        return [line for line in told.splitlines() if "Partition: " in line]

    def _words(self, *words: object) -> list[str]:
        return ["--bootstrap-server", self._cluster.bootstrap, *map(str, words)]

    def wait_done(self, count: int) -> str:
        """`--verify` until it has nothing left to wait for."""

        def verified() -> str:
            told = self.with_plan("--verify")
            return told if told.count("is completed.") == count else ""

        return str(wait_until(verified, 120, "all partitions have moved"))


@pytest.mark.polyglot
def test_kafkas_tool_plans_moves_and_verifies_with_a_throttle(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    cluster, tool = shared_cluster, Tool(shared_cluster, tmp_path, unique)
    create(cluster, unique, (1, 2), (2, 1), (1, 2))
    proposed = tool.generate("2,3")
    assert sorted(map(sorted, proposed)) == [[2, 3]] * 3
    with held(cluster):
        told = tool.with_plan("--execute", "--throttle", 500_000_000)
        assert "The inter-broker throttle limit was set to 500000000 B/s" in told
        names = ",".join(f"{unique}-{index}" for index in range(3))
        assert f"Successfully started partition reassignments for {names}" in told
        for broker in "123":
            value, source = described(cluster, ResourceType.BROKER, broker, THROTTLE)
            assert (value, source) == ("500000000", "DYNAMIC_BROKER_CONFIG")
        value, _ = described(cluster, ResourceType.TOPIC, unique, THROTTLED)
        assert value == "0:1,0:2,1:1,1:2,2:1,2:2"
        listed = tool("--list")
        for index, replicas in enumerate(proposed):
            union = ",".join(map(str, [*replicas, 1]))
            line = f"{unique}-{index}: replicas: {union}. adding: 3. removing: 1."
            assert line in listed
        for line, replicas in zip(tool.topics(), proposed, strict=True):
            assert f"Replicas: {replicas[0]},{replicas[1]},1\t" in line
            assert re.search(r"Adding Replicas: 3\s+Removing Replicas: 1", line), line
            isr = re.search(r"Isr: ([\d,]+)", line)
            assert isr is not None
            assert sorted(isr[1].split(",")) == ["1", "2"]
        assert tool.topics("--under-replicated-partitions") == []
        assert tool.topics("--at-min-isr-partitions") == []
        assert "Cannot execute because there is an existing" in tool.refused("--execute")
        assert tool.with_plan("--verify").count("is still in progress.") == 3
        assert described(cluster, ResourceType.BROKER, "1", THROTTLE)[0] == "500000000"
    told = tool.wait_done(3)
    assert "Clearing broker-level throttles on brokers 1,2,3" in told
    assert f"Clearing topic-level throttles on topic {unique}" in told
    for broker in "123":
        assert described(cluster, ResourceType.BROKER, broker, THROTTLE)[1] == "DEFAULT_CONFIG"
    assert described(cluster, ResourceType.TOPIC, unique, THROTTLED) == ("", "DEFAULT_CONFIG")
    assert "No partition reassignments found." in tool("--list")
    assert replicas_of(cluster, unique) == proposed
    assert not any("Adding" in line for line in tool.topics())
    elect_and_check(cluster, unique, [replicas[0] for replicas in proposed])
    for index in range(3):
        assert read_numbers(cluster, unique, index) == list(range(RECORDS))


def elect_and_check(cluster: Cluster, topic: str, preferred: list[int]) -> None:
    """`kafka-leader-election` after a move: the first of the new replicas leads."""

    def is_elected(index: int) -> bool:
        done = attempt(
            "LeaderElectionCommand",
            *("--bootstrap-server", cluster.bootstrap, "--election-type", "preferred"),
            *("--topic", topic, "--partition", str(index)),
        )
        # It may not be in sync yet: a new replica that votes, but was not heard of for a moment.
        told = done.stdout + done.stderr
        assert done.returncode == 0 or "PreferredLeaderNotAvailable" in told, told
        return done.returncode == 0

    for index in range(len(preferred)):
        wait_until(partial(is_elected, index), 120, f"{preferred[index]} leads")
    told = AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(topic, timeout=30)
    partitions = told.topics[topic].partitions
    assert [partitions[index].leader for index in sorted(partitions)] == preferred


@pytest.mark.polyglot
def test_kafkas_tool_cancels_and_everything_is_as_before(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    cluster, tool = shared_cluster, Tool(shared_cluster, tmp_path, unique)
    create(cluster, unique, (2, 1), (1, 2))
    tool.plan((2, 3), (3, 1))
    assert "None of the specified partition reassignments are active." in tool.with_plan("--cancel")
    with held(cluster):
        tool.with_plan("--execute", "--throttle", 400_000_000)
        told = tool.with_plan("--cancel")
        names = f"{unique}-0,{unique}-1"
        assert f"Successfully cancelled partition reassignments for: {names}" in told
        assert "Clearing broker-level throttles" in told
        assert described(cluster, ResourceType.BROKER, "2", THROTTLE)[1] == "DEFAULT_CONFIG"
        wait_until(lambda: "No partition reassignments" in tool("--list"), 60, "back again")
        assert replicas_of(cluster, unique) == [[2, 1], [1, 2]]
        told = tool.with_plan("--verify")
        assert "but replica set is 2,1 rather than 2,3." in told
    for index in range(2):
        assert read_numbers(cluster, unique, index) == list(range(RECORDS))
    folders = list(cluster[3].data.glob(f"topics/{unique}-*/partition-*"))
    wait_until(lambda: not any(f.exists() for f in folders), 60, "what was begun is thrown away")


@pytest.mark.polyglot
def test_kafkas_tool_changes_its_mind_and_the_factor(
    shared_cluster: Cluster, unique: str, tmp_path: Path
) -> None:
    cluster, tool = shared_cluster, Tool(shared_cluster, tmp_path, unique)
    create(cluster, unique, (1, 2))
    with held(cluster):
        tool.plan((3, 2))
        tool.with_plan("--execute")
        tool.plan((1, 2, 3))
        tool.with_plan("--execute", "--additional")
        assert f"{unique}-0: replicas: 1,2,3. adding: 3." in tool("--list")
        assert tool.topics("--under-replicated-partitions") == []
    tool.wait_done(1)
    assert replicas_of(cluster, unique) == [[1, 2, 3]]
    tool.plan((3,))
    tool.with_plan("--execute")
    tool.wait_done(1)
    assert replicas_of(cluster, unique) == [[3]]
    with Admin(cluster.bootstrap) as admin:
        partition = admin.topic(unique).partitions[0]
        assert (partition.leader, list(partition.in_sync)) == (3, [3])
    assert read_numbers(cluster, unique, 0) == list(range(RECORDS))
    tool.plan((3, 9))
    assert "Unknown broker id 9" in tool.refused("--execute")


@pytest.mark.polyglot
def test_kafkas_tool_fills_a_broker_that_joined(tmp_path: Path) -> None:
    with Cluster(tmp_path, 3) as cluster:
        tool = Tool(cluster, tmp_path, "t")
        create(cluster, "t", (1, 2, 3), (2, 3, 1), records=4)
        cluster.add_node()
        tool.plan((2, 3, 4), (2, 3, 1))
        told = tool.refused("--execute")
        assert "t-0: Broker 4 takes no replicas, since it is new: `raftmq node add 4`" in told
        added = cluster.run("node", "add", "4", "--no-wait")
        assert added.returncode == 0, added.stderr
        tool.with_plan("--execute", "--additional")
        tool.wait_done(2)
        assert replicas_of(cluster, "t") == [[2, 3, 4], [2, 3, 1]]
        assert read_numbers(cluster, "t", 0) == [0, 1, 2, 3]


def test_kafka_python_moves_and_cancels(shared_cluster: Cluster, unique: str) -> None:
    cluster = shared_cluster
    create(cluster, unique, (1, 2), (2, 1))
    zero, one = (kafka.TopicPartition(unique, index) for index in range(2))
    nowhere = kafka.TopicPartition(unique, 7)
    admin = kafka.KafkaAdminClient(bootstrap_servers=cluster.bootstrap.split(","))
    try:
        with held(cluster):
            told = admin.alter_partition_reassignments({zero: [3, 2], one: [2, 9], nowhere: [1]})
            assert told[zero] is None
            assert told[one].errno == ErrorCode.INVALID_REPLICA_ASSIGNMENT
            assert told[nowhere].errno == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            moving = {"replicas": [3, 2, 1], "adding_replicas": [3], "removing_replicas": [1]}
            assert admin.list_partition_reassignments([zero, one]) == {zero: moving}
            assert admin.list_partition_reassignments()[zero] == moving
            assert admin.alter_partition_reassignments({zero: None}) == {zero: None}
            (again,) = admin.alter_partition_reassignments({one: None}).values()
            assert again.errno == ErrorCode.NO_REASSIGNMENT_IN_PROGRESS
            wait_until(lambda: not admin.list_partition_reassignments([zero]), 60, "it is back")
        assert replicas_of(cluster, unique) == [[1, 2], [2, 1]]
        admin.alter_partition_reassignments({zero: [3, 2]})
        wait_until(lambda: not admin.list_partition_reassignments([zero]), 60, "it has moved")
        assert replicas_of(cluster, unique)[0] == [3, 2]
        wait_until(lambda: elect_preferred(admin, unique) == 3, 60, "the first replica leads")
    finally:
        admin.close()
    assert read_numbers(cluster, unique, 0) == list(range(RECORDS))


@pytest.mark.polyglot
def test_franz_go_moves_and_cancels(shared_cluster: Cluster, unique: str) -> None:
    cluster = shared_cluster
    create(cluster, unique, (1, 2), (2, 1))
    franz = RemoteClient("franz", cluster.bootstrap)

    def ask(what: str, *values: str) -> list[str]:
        return list(franz.ask(do=what, topic=unique, values=values))

    try:
        with held(cluster):
            told = ask("reassign", "0:3,2", "1:2,3", "7:1")
            assert [line.split(":")[:2] for line in told] == [["7", " UNKNOWN_TOPIC_OR_PARTITION"]]
            assert ask("moves") == ["0: 3,2,1 +3 -1", "1: 2,3,1 +3 -1"]
            assert ask("cancel", "0") == []
            wait_until(lambda: ask("moves") == ["1: 2,3,1 +3 -1"], 60, "one is back")
            (told_again,) = wait_until(lambda: ask("cancel", "0"), 60, "there is none")
            assert "NO_REASSIGNMENT_IN_PROGRESS" in told_again
        wait_until(lambda: ask("moves") == [], 120, "the other one has moved")
    finally:
        franz.close()
    assert replicas_of(cluster, unique) == [[1, 2], [2, 3]]
    for index in range(2):
        assert read_numbers(cluster, unique, index) == list(range(RECORDS))


def test_several_at_once_move_and_nothing_is_lost(shared_cluster: Cluster, unique: str) -> None:
    """More than may be under way at a time; all of them are told of from the start."""
    cluster, count = shared_cluster, 12
    create(cluster, unique, *[(1, 2)] * count, records=8)
    keys = [TopicPartition(unique, index) for index in range(count)]
    with Admin(cluster.bootstrap) as admin:
        told = admin.alter_partition_reassignments(dict.fromkeys(keys, (2, 3)))
        assert set(told.values()) == {None}
        wait_until(lambda: not admin.list_partition_reassignments(keys), 120, "all have moved")
        assert replicas_of(cluster, unique) == [[2, 3]] * count
    for index in range(count):
        assert read_numbers(cluster, unique, index) == list(range(8))
