"""Exactly once, on real nodes: a pipeline that is killed all the time loses and doubles nothing.

Members of a group read a topic, change each record and write it to another one, records and offsets
in one transaction. Nodes and members are killed -9 in turn. In the end what readers of committed
records see is the input, each record once, in the order of its partition.

A member is a process of its own (`python -m jepsen_like.live.pipeline`), so that a kill is one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final, TextIO

import confluent_kafka
from attrs import field, frozen, mutable
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from jepsen_like.live.cluster import Cluster, Node
from jepsen_like.live.links import ProxyLinks
from jepsen_like.live.storage import PlainDisk

GROUP: Final = "pipeline"
SOURCE, TARGET = "source", "target"
PARTITIONS: Final = 6
RECORDS_PER_TRANSACTION: Final = 200
TRANSACTION_MS: Final = 10_000
PAUSE_S: Final = (1.0, 3.0)
"""Between two kills, and until what was killed comes back."""
STALL_S: Final = 120.0
DEFAULTS: Final = {
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
}


def changed(value: bytes) -> bytes:
    """What the pipeline makes of a record."""
    return b"<" + value + b">"


# ---- one member ----


def work(bootstrap: str, name: str) -> None:
    """Read, change and write until the process is killed."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": GROUP,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "session.timeout.ms": 6_000,
            "partition.assignment.strategy": "cooperative-sticky",
        }
    )
    consumer.subscribe([SOURCE])
    while True:
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "transaction.timeout.ms": TRANSACTION_MS,
                "linger.ms": 2,
            }
        )
        with contextlib.suppress(KafkaException):
            # A coordinator that is not there is waited for; whatever else ends this producer.
            producer.init_transactions(60)
            _serve(consumer, producer)


def _serve(consumer: Consumer, producer: Producer) -> None:
    while True:
        messages = consumer.consume(RECORDS_PER_TRANSACTION, 0.2)
        found = [message for message in messages if message.error() is None]
        if not found:
            continue
        try:
            _transact(consumer, producer, found)
        except KafkaException as error:
            if error.args[0].fatal():
                _rewind(consumer)
                raise
            with _forgiving():
                producer.abort_transaction(60)
            _rewind(consumer)


def _transact(consumer: Consumer, producer: Producer, messages: list[Any]) -> None:
    producer.begin_transaction()
    ends: dict[int, int] = {}
    for message in messages:
        producer.produce(TARGET, changed(message.value()), partition=message.partition())
        ends[message.partition()] = message.offset() + 1
    positions = [TopicPartition(SOURCE, index, end) for index, end in ends.items()]
    producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata(), 60)
    while True:
        try:
            producer.commit_transaction(60)
            return
        except KafkaException as error:
            if not error.args[0].retriable():
                raise


def _rewind(consumer: Consumer) -> None:
    """Go back to what is committed: what was read since was not written."""
    assigned = consumer.assignment()
    while assigned:
        try:
            committed = consumer.committed(assigned, 30)
        except KafkaException:
            continue
        for at in committed:
            offset = at.offset if at.offset >= 0 else confluent_kafka.OFFSET_BEGINNING
            with _forgiving():  # taken away meanwhile
                consumer.seek(TopicPartition(at.topic, at.partition, offset))
        return


@contextlib.contextmanager
def _forgiving() -> Iterator[None]:
    with contextlib.suppress(KafkaException):
        yield


# ---- the run ----


@mutable(eq=False)
class Member:
    """The process of one member."""

    bootstrap: str
    name: str
    folder: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run it."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jepsen_like.live.pipeline", self.bootstrap, self.name],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@frozen
class Verdict:
    """What came out at the other end."""

    written: int
    seconds: float
    kills: dict[str, int]
    missing: list[tuple[int, str]] = field(factory=list)
    doubled: list[tuple[int, str]] = field(factory=list)
    strange: list[tuple[int, str]] = field(factory=list)
    reordered: list[int] = field(factory=list)

    @property
    def is_clean(self) -> bool:
        """Each record once, in its order, and nothing else."""
        return not (self.missing or self.doubled or self.strange or self.reordered)


def run(folder: Path, *, seconds: float, records: int, members: int, seed: int) -> Verdict:
    """Kill and write for so long, then let all of it end, and compare."""
    random = Random(seed)
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    links = ProxyLinks()
    cluster = Cluster(folder, 3, links, PlainDisk, DEFAULTS)
    team: list[Member] = []
    try:
        cluster.start()
        for topic in (SOURCE, TARGET):
            words = (
                "topic",
                "create",
                topic,
                "--partitions",
                f"{PARTITIONS}",
                "--replication-factor",
                "3",
            )
            made = cluster.command(*words)
            assert made.returncode == 0, made.stderr
        writer = threading.Thread(
            target=_write, args=(cluster.bootstrap, records, seconds * 0.8), daemon=True
        )
        writer.start()
        for number in range(members):
            member = Member(cluster.bootstrap, f"member-{number}", folder)
            team.append(member)
            member.start()
        kills = _kill_in_turn(cluster, team, random, seconds)
        writer.join(STALL_S)
        assert not writer.is_alive(), "the input could not be written"
        cluster.wait_whole(STALL_S)
        wanted = _read(cluster.bootstrap, SOURCE, lambda seen: seen >= records)
        found = _read(cluster.bootstrap, TARGET, lambda seen: seen >= records)
        return _compare(wanted, found, records, time.monotonic() - began, kills)
    finally:
        for member in team:
            member.kill()
        cluster.stop()
        links.close()


def _write(bootstrap: str, records: int, seconds: float) -> None:
    """Write the input, spread over that time; nothing is given up."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "message.timeout.ms": 0,
            "linger.ms": 5,
        }
    )
    began = time.monotonic()
    for number in range(records):
        while True:
            try:
                producer.produce(SOURCE, b"%d" % number, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 100 == 0:
            producer.poll(0)
            ahead_s = number / records * seconds - (time.monotonic() - began)
            if ahead_s > 0:
                time.sleep(ahead_s)
    assert producer.flush(STALL_S) == 0, "the input could not be written"


def _kill_in_turn(
    cluster: Cluster, team: list[Member], random: Random, seconds: float
) -> dict[str, int]:
    """Kill a node or a member, bring it back, and again; one node at a time is down."""
    kills = {"node": 0, "member": 0}
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(random.uniform(*PAUSE_S))
        victim: Node | Member
        if random.random() < 0.5:
            victim = random.choice(list(cluster.nodes.values()))
            kills["node"] += 1
        else:
            victim = random.choice(team)
            kills["member"] += 1
        victim.kill()
        if isinstance(victim, Node):
            time.sleep(random.uniform(*PAUSE_S))
        victim.start()
        if isinstance(victim, Node):
            cluster.wait_whole(STALL_S)
    return kills


def _read(bootstrap: str, topic: str, is_enough: Callable[[int], bool]) -> list[list[str]]:
    """All that a reader of committed records sees by partition, once it is enough and a little
    longer, so that what came twice shows."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"{topic}-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    found: list[list[str]] = [[] for _ in range(PARTITIONS)]
    ended: set[int] = set()
    silent_since = time.monotonic()
    try:
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        while time.monotonic() < silent_since + STALL_S:
            messages: list[Any] = consumer.consume(1_000, 0.5)
            for message in messages:
                error = message.error()
                if error is None:
                    found[message.partition()].append(message.value().decode())
                    silent_since = time.monotonic()
                    ended.discard(message.partition())
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(message.partition())
            if len(ended) == PARTITIONS and is_enough(sum(map(len, found))):
                return found
        return found
    finally:
        consumer.close()


def _compare(
    wanted: list[list[str]],
    found: list[list[str]],
    records: int,
    seconds: float,
    kills: dict[str, int],
) -> Verdict:
    written = sum(map(len, wanted))
    assert written == records, f"{written} of {records} records are in the input"
    verdict = Verdict(written, seconds, kills)
    for index in range(PARTITIONS):
        expected = [changed(value.encode()).decode() for value in wanted[index]]
        seen: dict[str, int] = {}
        for value in found[index]:
            seen[value] = seen.get(value, 0) + 1
        known = set(expected)
        verdict.missing.extend((index, value) for value in expected if value not in seen)
        verdict.doubled.extend((index, value) for value, count in seen.items() if count > 1)
        verdict.strange.extend((index, value) for value in seen if value not in known)
        if found[index] != expected and sorted(found[index]) == sorted(expected):
            verdict.reordered.append(index)
    return verdict


# ---- the command ----


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = commands.add_parser("pipeline", help="exactly once under kills, on real nodes")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--seed", type=int, help="chooses what is killed")
    parser.add_argument("--out", type=Path, help="folder for the nodes' data and logs")
    parser.set_defaults(action=_command)


def _command(arguments: argparse.Namespace, out: TextIO) -> int:
    seed = arguments.seed if arguments.seed is not None else time.time_ns() % (1 << 32)
    folder = arguments.out or Path("out") / f"pipeline-{time.strftime('%Y%m%d-%H%M%S')}"
    verdict = run(
        folder.resolve(),
        seconds=arguments.minutes * 60,
        records=arguments.records,
        members=arguments.members,
        seed=seed,
    )
    out.write(f"seed {seed}: {verdict.written} records, {verdict.seconds:.0f} s, ")
    out.write(f"kills {json.dumps(verdict.kills)}\n")
    for name in ("missing", "doubled", "strange", "reordered"):
        wrong = getattr(verdict, name)
        out.write(f"{name}: {len(wrong)} {wrong[:10] if wrong else ''}\n")
    return 0 if verdict.is_clean else 1


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work(*sys.argv[1:])
