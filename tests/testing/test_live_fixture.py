"""The fixture as a service's tests use it, and what is left when tests end, well or badly."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer

from raftmq.testing import Cluster, ClusterError, LackError
from raftmq_client import Admin, BrokerError
from tests.live.harness import lack, wait_until

pytest_plugins = ["pytester"]
pytestmark = [pytest.mark.live, pytest.mark.slow]

ALONE = ("-p", "no:cacheprovider", "-p", "no:asyncio")
"""Without what other tests of ours need: pytest-asyncio warns where its options are not set."""

SERVICE_TESTS = """
import asyncio, json, os, time
from pathlib import Path
import aiokafka
import pytest
import trio
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from raftmq.testing import ClusterError, LackError

SEEN = set()

@pytest.fixture(scope="session")
def raftmq_options():
    return {"defaults": {"num.partitions": 2}}

def produce(cluster, topic, timeout_ms=30_000):
    errors = []
    settings = {"bootstrap.servers": cluster.bootstrap, "message.timeout.ms": timeout_ms}
    producer = Producer({**settings, "log_level": 0})
    producer.produce(topic, b"value", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    return errors[0]

@pytest.mark.parametrize("case", [1, "a b"])
def test_plain(raftmq_cluster, case):
    SEEN.add(raftmq_cluster.prefix)
    assert produce(raftmq_cluster, raftmq_cluster.topic("orders")) is None
    topics = AdminClient({"bootstrap.servers": raftmq_cluster.bootstrap}).list_topics().topics
    assert list(topics) == [raftmq_cluster.topic("orders")], "those of other tests are gone"
    assert len(topics[raftmq_cluster.topic("orders")].partitions) == 2
    assert len(SEEN) == (1 if case == 1 else 2)

def test_asyncio(raftmq_cluster):
    async def main():
        producer = aiokafka.AIOKafkaProducer(bootstrap_servers=raftmq_cluster.bootstrap)
        await producer.start()
        await producer.send_and_wait(raftmq_cluster.topic("orders"), b"value")
        await producer.stop()
    asyncio.run(main())

async def test_trio(raftmq_cluster):
    raftmq_cluster.pause(1)
    await trio.to_thread.run_sync(raftmq_cluster.resume)
    topic = raftmq_cluster.topic("orders")
    assert await trio.to_thread.run_sync(produce, raftmq_cluster, topic) is None

def test_a_partition_bites(raftmq_cluster):
    cluster, topic = raftmq_cluster, raftmq_cluster.topic("orders")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    new = NewTopic(topic, 1, 3, config={"min.insync.replicas": "2"})
    admin.create_topics([new])[topic].result(30)
    assert produce(cluster, topic) is None
    cluster.partition({1}, {2}, {3})
    assert produce(cluster, topic, timeout_ms=1_500) is not None
    cluster.heal()
    assert produce(cluster, topic) is None

def test_that_leaves_a_ruin(raftmq_cluster):
    topic = raftmq_cluster.topic("orders")
    assert produce(raftmq_cluster, topic) is None
    raftmq_cluster.kill(raftmq_cluster.leader(topic))
    assert produce(raftmq_cluster, topic) is None, "another one leads"
    (left,) = [n for n in (1, 2) if raftmq_cluster.node(n).is_running][:1]
    raftmq_cluster.pause(left)
    raftmq_cluster.partition({1}, {2, 3})
    with pytest.raises(ClusterError, match="power_disk=True"):
        raftmq_cluster.lose_power()

def test_that_wants_what_this_machine_lacks(raftmq_cluster):
    raise LackError("no loop devices here")

def test_that_finds_all_well(raftmq_cluster):
    assert all(raftmq_cluster.node(n).is_running for n in (1, 2, 3))
    raftmq_cluster.wait_until_healthy()
    assert produce(raftmq_cluster, raftmq_cluster.topic("orders")) is None
    views = [raftmq_cluster.node(n) for n in (1, 2, 3)]
    left = {"pids": [v.pid for v in views], "ports": [v.port for v in views]}
    Path("left.json").write_text(json.dumps({**left, "folder": str(raftmq_cluster.folder)}))
"""

HOLDER = """
import sys
from raftmq.testing import Cluster
cluster = Cluster(1)
cluster.start()
cluster.pause(1)
print(cluster.node(1).pid, cluster.node(1).port, cluster.folder, flush=True)
sys.stdin.read()
"""


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def test_a_service_tests_itself(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\ntrio_mode = true\nfilterwarnings = error")
    pytester.makepyfile(SERVICE_TESTS)
    result = pytester.runpytest_subprocess(*ALONE, "-rs", timeout=150)
    result.assert_outcomes(passed=7, skipped=1)
    result.stdout.fnmatch_lines(["*SKIPPED*no loop devices here*"])
    left = json.loads((pytester.path / "left.json").read_text())
    assert all(map(is_gone, left["pids"]))
    assert all(map(is_free, left["ports"]))
    assert not Path(left["folder"]).exists()


WORKERS_TESTS = """
import json
from pathlib import Path
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

@pytest.mark.parametrize("number", range(2))
def test_of_a_worker(raftmq_cluster, worker_id, number):
    topic = raftmq_cluster.topic("orders")
    producer = Producer({"bootstrap.servers": raftmq_cluster.bootstrap})
    errors = []
    producer.produce(topic, b"value", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(60) == 0
    assert errors == [None]
    topics = AdminClient({"bootstrap.servers": raftmq_cluster.bootstrap}).list_topics(timeout=60)
    assert list(topics.topics) == [topic], "no other worker's"
    views = [raftmq_cluster.node(n) for n in raftmq_cluster.node_ids]
    left = {"pids": [v.pid for v in views], "ports": [v.port for v in views]}
    seen = {"worker": worker_id, **left, "folder": str(raftmq_cluster.folder)}
    (Path(FOLDER) / f"{worker_id}-{number}.json").write_text(json.dumps(seen))
"""


def test_each_worker_of_xdist_has_a_cluster_of_its_own(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nfilterwarnings = error")
    pytester.makepyfile(WORKERS_TESTS.replace("FOLDER", repr(str(pytester.path))))
    pytester.makeconftest(
        "import pytest\n"
        "@pytest.fixture(scope='session')\n"
        "def raftmq_options():\n"
        "    return {'nodes': 1}\n"
    )
    words = (*ALONE, "-n", "2", "--dist", "each")
    result = pytester.runpytest_subprocess(*words, timeout=150)
    result.assert_outcomes(passed=4)  # every test in each of two workers
    seen = [json.loads(path.read_text()) for path in pytester.path.glob("*.json")]
    assert len(seen) == 4
    owners: dict[int, set[str]] = {}
    for item in seen:
        for port in item["ports"]:
            owners.setdefault(port, set()).add(item["worker"])
    assert sorted(map(sorted, owners.values())) == [["gw0"], ["gw1"]], "shared by a worker's tests"
    for item in seen:
        assert all(map(is_gone, item["pids"]))
        assert all(map(is_free, item["ports"]))
        assert not Path(item["folder"]).exists()


def test_a_broken_setting_is_told_by_name() -> None:
    with pytest.raises(ClusterError, match="did you mean 'log_level'"):
        Cluster(1, settings={"log_levl": "debug"}).start()


@pytest.mark.parametrize(
    "order",
    [
        ("tests",),
        pytest.param(("keeper", "tests"), marks=pytest.mark.soak),
        pytest.param(("group",), marks=pytest.mark.soak),
    ],
    ids="-".join,
)
def test_nodes_die_with_the_tests(order: tuple[str, ...], tmp_path: Path) -> None:
    """The tests' process is killed, alone or after its keeper; the node is frozen, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    with process:
        assert process.stdout is not None
        pid, port, folder = process.stdout.readline().split()
        keeper = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        kills: dict[str, Callable[[], None]] = {
            "tests": process.kill,
            "keeper": lambda: os.kill(keeper, signal.SIGKILL),
            "group": lambda: os.killpg(process.pid, signal.SIGKILL),
        }
        for who in order:
            kills[who]()
        process.wait(30)
        wait_until(lambda: is_gone(int(pid)), 30, "the node is gone")
        wait_until(lambda: is_gone(keeper), 30, "the keeper is gone")
        assert is_free(int(port))
        if "keeper" not in order:
            assert not Path(folder).exists()


@pytest.mark.soak
def test_a_keeper_that_was_killed_is_told() -> None:
    with Cluster(1) as cluster:
        assert cluster._link is not None
        pid = cluster.node(1).pid
        os.kill(cluster._link.pid, signal.SIGKILL)
        wait_until(lambda: is_gone(pid), 30, "the node is gone")
        with pytest.raises(ClusterError, match="keeper"):
            cluster.kill(1)
        folder = cluster.folder
    assert not folder.exists()


@pytest.mark.root
def test_lost_power_takes_what_was_not_synced() -> None:
    with Cluster(1, power_disk=True) as cluster:
        delivered = []
        producer = Producer({"bootstrap.servers": cluster.bootstrap})
        for number in range(100):
            value = b"%d" % number
            producer.produce("t", value, on_delivery=lambda e, m: delivered.append((e, m.value())))
        assert producer.flush(60) == 0
        assert [e for e, _ in delivered] == [None] * 100

        def unsynced() -> Path:  # as the node sees it: the mount is its own
            return Path(f"/proc/{cluster.node(1).pid}/root{cluster.folder}/disk/unsynced")

        unsynced().write_bytes(b"not for long")
        try:
            cluster.lose_power()
        except LackError as error:
            lack(str(error))
        assert not cluster.node(1).is_running
        cluster.restart()
        assert not unsynced().exists()
        settings = {"bootstrap.servers": cluster.bootstrap, "group.id": "g"}
        consumer = Consumer({**settings, "auto.offset.reset": "earliest"})
        consumer.subscribe(["t"])
        values = []
        while len(values) < 100:
            message = consumer.poll(30)
            assert message is not None
            if message.error() is None:
                values.append(message.value())
            else:
                assert message.error().code() != KafkaError._PARTITION_EOF
        consumer.close()
        assert values == [value for _, value in delivered]


@pytest.mark.soak
def test_a_forked_process_does_not_keep_the_nodes() -> None:
    """It holds a copy of the keeper's socket, which therefore does not close with ours."""
    with Cluster(1) as cluster:
        assert cluster._link is not None
        node, keeper = cluster.node(1).pid, cluster._link.pid
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        try:
            cluster.close()
            assert is_gone(node)
            assert is_gone(keeper)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_topic_is_made_with_its_leaders_and_named_by_the_test() -> None:
    with Cluster(1) as cluster:
        cluster.begin_test("mine-")
        whole = cluster.create_topic("orders", 3, {"retention.ms": 1000, "preallocate": True})
        assert whole == cluster.topic("orders") == "mine-orders"
        assert [cluster.leader(whole, partition) for partition in range(3)] == [1, 1, 1]
        assert cluster.create_topic(cluster.topic("paid")) == "mine-paid"
        with pytest.raises(ClusterError, match="TOPIC_ALREADY_EXISTS"):
            cluster.create_topic("orders")
        with pytest.raises(ClusterError, match="INVALID_CONFIG"):
            cluster.create_topic("bad", configs={"retention.ms": "soon"})
        cluster.end_test()
        with pytest.raises(BrokerError, match="UNKNOWN_TOPIC"), Admin(cluster.bootstrap) as admin:
            admin.topic(whole)
