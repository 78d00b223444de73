"""Delay topics by a stock client: on time, cancelled, replaced, and once each under kill -9."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator, Mapping

import confluent_kafka
import pytest

import raftmq_client
from raftmq.delays.headers import NOT_DELIVERED
from tests.live.harness import Cluster, wait_until
from tests.live.load import leaders

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("delays")) as cluster:
        yield cluster


def make_topics(cluster: Cluster, target: str, partitions: int) -> str:
    """A topic and its delay topic, by our command line."""
    count = str(partitions)
    for words in ((target,), (f"{target}.later", "--delivers-to", target)):
        done = cluster.run("topic", "create", *words, "-p", count, "-r", "3")
        assert done.returncode == 0, done.stderr
    return f"{target}.later"


class Sender:
    """A stock producer of delayed records."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.topic = topic
        self.producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True}
        )
        self.refused: list[confluent_kafka.KafkaError] = []

    def send(self, key: str, value: str, headers: Mapping[str, object], partition: int = 0) -> None:
        self.producer.produce(
            self.topic,
            key=key,
            value=value,
            headers={name: str(text) for name, text in headers.items()},
            partition=partition,
            on_delivery=self._told,
        )

    def _told(self, error: confluent_kafka.KafkaError | None, _: object) -> None:
        if error is not None:
            self.refused.append(error)

    def finish(self) -> None:
        """Return when everything is acknowledged."""
        assert self.producer.flush(120) == 0


class Receiver:
    """A stock consumer of all partitions of the target."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        self.consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "g", "enable.auto.commit": False}
        )
        self.consumer.assign(
            [confluent_kafka.TopicPartition(topic, n, 0) for n in range(partitions)]
        )
        self.found: list[tuple[confluent_kafka.Message, float]] = []

    def read_until(self, value: str) -> None:
        """Read up to the record with this value."""

        def has_come() -> bool:
            message = self.consumer.poll(0.1)
            if message is None or message.error() is not None:
                return False
            self.found.append((message, time.time() * 1e3))
            return bool(message.value() == value.encode())

        wait_until(has_come, 120, f"{value} comes")

    @property
    def values(self) -> list[str]:
        return [message.value().decode() for message, _ in self.found]


def test_on_time_cancelled_and_replaced(cluster: Cluster) -> None:
    later = make_topics(cluster, "orders", 1)
    sender = Sender(cluster.bootstrap, later)
    receiver = Receiver(cluster.bootstrap, "orders", 1)
    began_ms = time.time() * 1e3
    sender.send("a", "now", {})
    sender.send("b", "in two seconds", {"deliver-after": "2s", "trace": "7"})
    sender.send("c", "cancelled", {"deliver-after": "4s"})
    sender.send("d", "replaced", {"deliver-after": "4s"})
    sender.send("c", "", {"deliver-at": "never"})
    sender.send("d", "instead", {"deliver-mode": "replace", "deliver-after": "4s500ms"})
    # Counted from its own append, which is the latest, whatever a busy machine does before.
    sender.send("e", "the last", {"deliver-after": "5500ms"})
    sender.finish()
    receiver.read_until("the last")
    assert sender.refused == []
    (row,) = json.loads(cluster.run("topic", "describe", later, "--json").stdout)["Delays"]
    assert (row["partition"], row["to"], row["pending"], row["trouble"]) == (0, "orders", 0, "")
    sender.send("f", "much later", {"deliver-after": "1h"})
    sender.finish()

    def is_pending() -> bool:
        (row,) = json.loads(cluster.run("topic", "describe", later, "--json").stdout)["Delays"]
        return bool(row["pending"] == 1 and row["next_due_ms"] > time.time() * 1e3 + 3_000_000)

    wait_until(is_pending, 20, "it is shown")
    assert "DeliversTo" in cluster.run("topic", "describe", later).stdout
    assert receiver.values == ["now", "in two seconds", "instead", "the last"]
    for (message, came_ms), delay_ms in zip(receiver.found, (0, 2_000, 4_500, 5_500), strict=True):
        assert came_ms >= began_ms + delay_ms
        assert message.timestamp()[1] >= began_ms + delay_ms
    headers = dict(receiver.found[1][0].headers())
    assert headers.pop("raftmq-created-at").isdigit()
    assert headers == {"trace": b"7", "raftmq-delayed-at": b"orders.later/0/1"}


def test_what_is_refused(cluster: Cluster) -> None:
    later = make_topics(cluster, "bills", 1)
    sender = Sender(cluster.bootstrap, later)
    sender.send("a", "x", {"deliver-afer": "2s"})
    sender.finish()
    assert [error.code() for error in sender.refused] == [confluent_kafka.KafkaError.INVALID_RECORD]
    for words, why in (
        (("l2", "--delivers-to", later), "delay topic itself"),
        (("l3", "--delivers-to", "nothing"), "no such topic"),
    ):
        done = cluster.run("topic", "create", *words)
        assert done.returncode != 0
        assert why in done.stderr


def test_each_comes_once_while_leaders_are_killed(cluster: Cluster) -> None:
    """kill -9 of the leaders of both topics, in turn, while records become due."""
    seed = 20_261
    chance = random.Random(seed)
    later = make_topics(cluster, "jobs", 2)
    sender = Sender(cluster.bootstrap, later)
    began_ms = int(time.time() * 1e3)
    due: dict[str, int] = {}
    for number in range(600):
        due_ms = began_ms + chance.randrange(0, 12_000)
        due[str(number)] = due_ms
        sender.send(str(number), str(number), {"deliver-at": due_ms}, number % 2)
    cancelled = [str(number) for number in range(400, 440)]
    sender.finish()
    early = {value for value, due_ms in due.items() if due_ms < time.time() * 1e3 + 1_000}
    for value in cancelled:
        sender.send(value, "", {"deliver-at": "never"}, int(value) % 2)
    sender.finish()
    assert sender.refused == []
    for turn, topic in enumerate((later, "jobs", later, "jobs")):
        victim = cluster.nodes[leaders(cluster.bootstrap, topic)[turn % 2]]
        victim.kill()
        wait_until(
            lambda dead=victim.node_id, name=topic: (
                dead not in leaders(cluster.bootstrap, name).values()
            ),
            60,
            "others lead",
        )
        cluster.bring_back()
    last = Sender(cluster.bootstrap, later)
    for partition in (0, 1):
        last.send("", f"last {partition}", {"deliver-at": began_ms + 12_001}, partition)
    last.finish()
    receiver = Receiver(cluster.bootstrap, "jobs", 2)
    receiver.read_until("last 0")
    if "last 1" not in receiver.values:
        receiver.read_until("last 1")
    values = [value for value in receiver.values if not value.startswith("last")]
    assert len(values) == len(set(values)), "none twice"
    assert set(due) - set(values) - set(cancelled) == set(), "none lost"
    assert set(values) & (set(cancelled) - early) == set(), "none that was cancelled in time"
    for message, came_ms in receiver.found:
        if message.value().decode() in due:
            assert min(message.timestamp()[1], came_ms) >= due[message.value().decode()], "early"


def test_a_record_that_fails_is_retried_dead_and_replayed(cluster: Cluster) -> None:
    """By our client in a group; a stock consumer sees what is dead."""
    assert cluster.run("topic", "create", "bread", "-p", "2", "-r", "3").returncode == 0
    policy = ("--min", "200ms", "--max", "1s", "--attempts", "3")
    made = cluster.run("retry", "create", "bake", "--of", "bread", *policy)
    assert made.returncode == 0, made.stderr
    tries: list[tuple[str, str, float]] = []

    def handle(consumer: raftmq_client.Consumer, message: raftmq_client.ConsumerRecord) -> None:
        """One fails twice, the other always."""
        attempt = (dict(message.headers).get("raftmq-attempt") or b"1").decode()
        tries.append((message.value.decode(), attempt, time.monotonic()))
        if message.value != b"good" or attempt != "3":
            consumer.retry(message, reason="the oven is cold")

    with raftmq_client.Producer(cluster.bootstrap) as producer:
        for value in (b"good", b"bad"):
            producer.send("bread", value, value, partition=1).result()
    options = {"group": "bake", "topics": ["bread", "bread.bake"], "delivery": "at_least_once"}
    with raftmq_client.Consumer(cluster.bootstrap, **options) as consumer:
        dead = Receiver(cluster.bootstrap, "bread.bake.dead", 2)
        began = time.monotonic()
        while len(tries) < 6:
            assert time.monotonic() - began < 60, tries
            for message in consumer.poll(0.2):
                handle(consumer, message)
        dead.read_until("bad")
        headers = dict(dead.found[0][0].headers())
        assert headers["raftmq-attempt"] == headers["__dlq.errors.delivery.count"] == b"3"
        assert (headers["__dlq.errors.topic"], headers["__dlq.errors.partition"]) == (
            b"bread",
            b"1",
        )
        assert headers["__dlq.errors.message"] == b"the oven is cold"
        assert [attempt for name, attempt, _ in tries if name == "bad"] == ["1", "2", "3"]
        times = [at for name, _, at in tries if name == "bad"]
        assert times[1] - times[0] > 0.2
        assert times[2] - times[1] > 0.4, "each wait is longer"
        replayed = cluster.run("dead", "replay", "bread.bake.dead")
        assert "1 records sent to bread.bake" in replayed.stdout, replayed.stderr
        while len(tries) < 7:
            assert time.monotonic() - began < 60, tries
            for message in consumer.poll(0.2):
                handle(consumer, message)
    assert tries[-1][:2] == ("bad", "1"), "attempts count anew"
    assert "0 records sent" in cluster.run("dead", "replay", "bread.bake.dead").stdout


def test_what_has_no_target_any_more_is_dead_and_replayed(cluster: Cluster) -> None:
    """By stock clients: the target is deleted, and made again for the replay."""
    ends = ("--delivers-to", "soup", "--dead-to", "soup.dead")
    for words in (
        ("soup",),
        ("soup.dead", "-c", "retention.ms=-1"),
        ("soup.later", *ends, "-c", "raftmq.delivery.giveup.ms=1000"),
    ):
        done = cluster.run("topic", "create", *words, "-p", "1", "-r", "3")
        assert done.returncode == 0, done.stderr
    sender = Sender(cluster.bootstrap, "soup.later")
    sender.send("a", "served", {"deliver-after": "1"})
    sender.finish()
    Receiver(cluster.bootstrap, "soup", 1).read_until("served")
    assert cluster.run("topic", "delete", "soup").returncode == 0
    sender.send("b", "cold", {"deliver-after": "2s", "trace": "7"})
    sender.send("c", "much later", {"deliver-after": "1h"})
    sender.send("d", "cold, too", {})
    sender.finish()
    assert sender.refused == []
    dead = Receiver(cluster.bootstrap, "soup.dead", 1)
    dead.read_until("cold")
    assert dead.values == ["cold, too", "cold"], "in the order in which they were due"
    headers = dict(dead.found[1][0].headers())
    assert headers.pop("raftmq-created-at").isdigit()
    assert headers.pop("raftmq-delayed-at").startswith(b"soup.later/0/")
    assert headers == {"trace": b"7", "raftmq-given-up": NOT_DELIVERED}
    rows = json.loads(cluster.run("topic", "describe", "soup.later", "--json").stdout)["Delays"]
    assert [(row["to"], row["is_dead"], row["pending"]) for row in rows] == [
        ("soup", False, 1),
        ("soup.dead", True, 0),
    ]
    listed = json.loads(cluster.run("dead", "list", "--json").stdout)
    assert [row for row in listed if row["Topic"] == "soup.dead"] == [
        {"Topic": "soup.dead", "Of": "soup.later", "Records": 2, "NotReplayed": 2}
    ]
    refused = cluster.run("dead", "replay", "soup.dead")
    assert "there is no topic soup; --to says where to" in refused.stderr
    assert cluster.run("topic", "create", "soup", "-p", "1", "-r", "3").returncode == 0
    replayed = cluster.run("dead", "replay", "soup.dead")
    assert "2 records sent to soup" in replayed.stdout, replayed.stderr
    again = Receiver(cluster.bootstrap, "soup", 1)
    again.read_until("cold")
    assert again.values == ["cold, too", "cold"]
    assert again.found[1][0].headers() == [("trace", b"7")]
    sender.send("e", "warm", {})
    sender.finish()
    again.read_until("warm")


def test_a_worker_retries_buries_and_reads_what_is_replayed(cluster: Cluster) -> None:
    """One task fails twice and succeeds, one fails until it is dead; `raftmq dead replay` brings it
    back. The leader of the retry topic is killed in between, and no attempt is lost."""
    assert cluster.run("topic", "create", "mail", "-p", "2", "-r", "3").returncode == 0
    policy = ("--min", "200ms", "--max", "1s", "--attempts", "3")
    made = cluster.run("retry", "create", "post", "--of", "mail", *policy)
    assert made.returncode == 0, made.stderr
    tries: list[tuple[str, str]] = []

    def handle(message: raftmq_client.ConsumerRecord) -> None:
        attempt = (dict(message.headers).get("raftmq-attempt") or b"1").decode()
        tries.append((message.value["to"], attempt))
        if message.value["to"] == "nobody" or attempt != "3":
            raise ConnectionError("the letter box is shut")

    with raftmq_client.Producer(cluster.bootstrap, value_serializer="json") as producer:
        for to in ("slow", "nobody"):
            producer.send("mail", {"to": to}, to.encode(), partition=1).result()
        producer.send("mail", None, b"no letter", partition=0).result()
    options = {"group": "post", "topics": "mail", "value_deserializer": "json"}

    def work_until(count: int) -> None:
        with raftmq_client.Worker(cluster.bootstrap, **options) as worker:
            for message in worker:
                with worker.handling(message):
                    if message.value is None:
                        worker.dead(message, reason="no letter")
                    else:
                        handle(message)
                if len(tries) == count:
                    worker.stop()

    work_until(2)
    victim = cluster.nodes[leaders(cluster.bootstrap, "mail.post.retry")[1]]
    victim.kill()
    cluster.bring_back()
    work_until(6)
    attempts = {to: [found for name, found in tries if name == to] for to in ("slow", "nobody")}
    assert attempts == {"slow": ["1", "2", "3"], "nobody": ["1", "2", "3"]}

    def dead() -> str:
        return cluster.run("dead", "show", "mail.post.dead", "--json").stdout

    wait_until(lambda: "nobody" in dead() and "no letter" in dead(), 60, "both are dead")
    assert "the letter box is shut" in dead()
    replayed = cluster.run("dead", "replay", "mail.post.dead")
    assert "2 records sent to mail.post" in replayed.stdout, replayed.stderr
    work_until(7)
    assert tries[6] == ("nobody", "1"), "attempts count anew"
    with raftmq_client.Consumer(cluster.bootstrap, group="post") as consumer:
        places = [
            raftmq_client.TopicPartition(topic, number)
            for topic in ("mail", "mail.post")
            for number in (0, 1)
        ]
        consumer.assign(places)
        wait_until(
            lambda: consumer.poll(0.1) == [] and set(consumer.lag().values()) == {0},
            60,
            "all is committed",
        )


def test_exactly_once_a_retry_and_its_position_are_one(cluster: Cluster) -> None:
    """What is sent for a message, its retry and its position count together: leaders of the retry
    topic are killed meanwhile, and workers end by errors in the middle of a transaction."""
    for name in ("parcels", "sent"):
        assert cluster.run("topic", "create", name, "-p", "2", "-r", "3").returncode == 0
    policy = ("--min", "100ms", "--max", "300ms", "--attempts", "3")
    made = cluster.run("retry", "create", "carry", "--of", "parcels", *policy)
    assert made.returncode == 0, made.stderr
    count, seen = 60, 0
    with raftmq_client.Producer(cluster.bootstrap) as producer:
        for number in range(count):
            producer.send("parcels", b"%d" % number, b"%d" % number, partition=number % 2)
    options = {
        "group": "carry",
        "topics": "parcels",
        "delivery": "exactly_once",
        "transactional_id": "carrier",
    }

    def work(worker: raftmq_client.Worker, limit: int) -> None:
        """Numbers that 3 divides fail once, and those that 10 divides always."""
        nonlocal seen
        for message in worker:
            number = int(message.value)
            attempt = int(dict(message.headers).get("raftmq-attempt") or b"1")
            worker.transaction.send("sent", b"%d %d" % (number, attempt))
            seen += 1
            if seen == limit:
                raise KeyboardInterrupt
            with worker.handling(message):
                if number % 10 == 0 or (number % 3 == 0 and attempt == 1):
                    raise ConnectionError("nobody opens")

    reader = Receiver(cluster.bootstrap, "sent", 2)
    dead = Receiver(cluster.bootstrap, "parcels.carry.dead", 2)

    def is_over() -> bool:
        for receiver in (reader, dead):
            while (message := receiver.consumer.poll(0)) is not None:
                assert message.error() is None
                receiver.found.append((message, 0.0))
        return len(reader.found) + len(dead.found) >= count

    def stop_when_over(worker: raftmq_client.Worker) -> None:
        try:
            wait_until(is_over, 120, "all are sent, or dead")
        finally:
            worker.stop()

    for limit, victim in ((20, 0), (45, 1)):
        with (
            pytest.raises(KeyboardInterrupt),
            raftmq_client.Worker(cluster.bootstrap, **options) as worker,
        ):
            work(worker, limit)
        cluster.nodes[leaders(cluster.bootstrap, "parcels.carry.retry")[victim]].kill()
        cluster.bring_back()
    with raftmq_client.Worker(cluster.bootstrap, **options) as worker:
        watch = threading.Thread(target=stop_when_over, args=(worker,))
        watch.start()
        work(worker, -1)
        watch.join()
    assert sorted(reader.values) == sorted(
        f"{number} {2 if number % 3 == 0 else 1}" for number in range(count) if number % 10
    )
    assert sorted(map(int, dead.values)) == list(range(0, count, 10)), "and each once"


def test_what_has_no_target_any_more_is_dead_after_a_while(cluster: Cluster) -> None:
    """Once each, also what was noted for the target before it was deleted."""
    assert cluster.run("topic", "create", "cards", "-p", "1", "-r", "3").returncode == 0
    policy = ("--min", "100ms", "--max", "100ms", "--attempts", "5")
    made = cluster.run("retry", "create", "read", "--of", "cards", *policy)
    assert made.returncode == 0, made.stderr
    with raftmq_client.Admin(cluster.bootstrap) as admin:
        admin.alter_configs(
            raftmq_client.ResourceType.TOPIC,
            "cards.read.retry",
            {"raftmq.delivery.giveup.ms": "3000"},
        )
        sender = Sender(cluster.bootstrap, "cards.read.retry")
        sender.send("", "delivered", {})
        sender.finish()
        Receiver(cluster.bootstrap, "cards.read", 1).read_until("delivered")
        admin.delete_topic("cards.read")
        for number in range(250):
            sender.send("", str(number), {"raftmq-attempt": "2"})
        sender.send("", "tried often enough", {"raftmq-attempt": "5"})
        sender.finish()
        cluster.nodes[leaders(cluster.bootstrap, "cards.read.retry")[0]].kill()
        cluster.bring_back()
        dead = Receiver(cluster.bootstrap, "cards.read.dead", 1)
        wait_until(lambda: _reads(dead, 251) and dead.values[-1] == "249", 90, "all are dead")
        assert dead.values[0] == "tried often enough", "which did not wait for the others"
        given_up = dead.values[1:]
        if given_up[0] == "delivered":  # that it had been was known to its target and its leader
            del given_up[0]
        assert given_up == [str(number) for number in range(250)], "each once, in order"
        headers = dict(dead.found[5][0].headers())
        assert headers["raftmq-given-up"] == NOT_DELIVERED
        assert headers["raftmq-attempt"] == b"2"
        # With a target there again, it is delivered to.
        admin.create_topic("cards.read", 1, 3)
    sender.send("", "again", {})
    sender.finish()
    Receiver(cluster.bootstrap, "cards.read", 1).read_until("again")
    assert not _reads(dead, len(dead.found) + 1)


def _reads(receiver: Receiver, count: int) -> bool:
    while (message := receiver.consumer.poll(0.2)) is not None:
        assert message.error() is None
        receiver.found.append((message, 0.0))
    return len(receiver.found) >= count
