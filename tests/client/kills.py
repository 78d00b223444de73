"""Kills by the hundred under our own client, and what of its promises holds.

    python -m tests.client.kills --promise at_least_once --kills 200
    python -m tests.client.kills --promise idempotent --records 2000000 --seconds 180 --consumers 4

Three nodes, a producer and the members of a group, each a process; kill -9 of the nodes in turn,
and of clients in between, each started again. At the end everything is read back by librdkafka and
counted: that is the verdict. The diaries of `kill_clients.py` tell what each client saw.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from attrs import asdict, define, field

from raftmq.cli.console import out
from tests.client.kill_clients import Order
from tests.live.harness import Cluster, wait_until
from tests.live.load import create_topic, read_partitions

TOPIC = "kills"
LIFE = 100_000_000
"""Numbers of a producer's next life begin so much higher."""
DRIVERS = ("asyncio", "trio", "blocking")
PROMISES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "idempotent": ({}, {"reset": "earliest"}),
    "at_least_once": ({"delivery": "at_least_once"}, {"delivery": "at_least_once"}),
    "at_most_once": ({"delivery": "at_most_once"}, {"delivery": "at_most_once"}),
}
"""Settings of producer and consumer."""
MEMBER = {"session_timeout_ms": 3_000, "heartbeat_interval_ms": 500}
PROGRESS = 50
"""So many records are acknowledged between two kills: each strikes a cluster at work."""
PATIENCE_S = 120.0


@define
class Plan:
    """What is to be done."""

    promise: str
    kills: int = 0
    seconds: float = 0.0
    """For so long, where no number of kills is given."""
    records: int = 0
    """To be produced by one producer that is never killed; 0: as many as come."""
    consumers: int = 2
    partitions: int = 4
    rate: float = 400.0
    seed: int = 1


@define
class Verdict:
    """What came of it, by counting."""

    promise: str
    kills: dict[str, int]
    left_in_order: int
    """Consumers that were asked to go."""
    seconds: float
    sent_lives: int
    acknowledged: int
    failed: int
    unknown: int
    in_log: int
    handed_out: int
    lost_from_log: int
    """Acknowledged, and not where its receipt says."""
    twice_in_log: int
    out_of_order: int
    """Of one producer's life, in the log after a later one."""
    never_handed_out: int
    """Acknowledged, and seen by no consumer."""
    handed_out_twice: int
    unexplained_twice: int
    """Handed out again though nobody died, left or was rebalanced in between."""
    skipped: int
    """Passed over by a member between two records of one assignment."""
    died_by_themselves: list[str] = field(factory=list)

    @property
    def broken(self) -> list[str]:
        """The promises that do not hold."""
        wrong = {
            "a client ended by itself": bool(self.died_by_themselves),
            "handed out twice without cause": self.unexplained_twice,
            "passed over": self.skipped,
        }
        if self.promise == "at_most_once":
            wrong["twice in the log"] = self.twice_in_log
            wrong["handed out twice"] = self.handed_out_twice
        else:
            wrong["acknowledged and lost"] = self.lost_from_log
            wrong["acknowledged and never handed out"] = self.never_handed_out
            wrong["twice in the log"] = self.twice_in_log
            wrong["out of order"] = self.out_of_order
        return [f"{what}: {count}" for what, count in wrong.items() if count]


class Member:
    """A client process, again and again."""

    def __init__(self, name: str, order: Order) -> None:
        self.name = name
        self.order = order
        self.lives = 0
        self.unexpected: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def diaries(self) -> list[Path]:
        """One for each life, in order."""
        return [Path(f"{self.order.diary}.{life}") for life in range(1, self.lives + 1)]

    def start(self) -> None:
        self.lives += 1
        order = msgspec.structs.replace(
            self.order,
            diary=f"{self.order.diary}.{self.lives}",
            first=self.order.first + self.lives * LIFE,
        )
        words = [
            sys.executable,
            "-m",
            "tests.client.kill_clients",
            msgspec.json.encode(order).decode(),
        ]
        with Path(f"{order.diary}.err").open("wb") as errors:
            self._process = subprocess.Popen(words, stderr=errors)

    def end(self, number: int, timeout_s: float = PATIENCE_S) -> None:
        """Send a signal and reap; an end that came before is noted."""
        process, self._process = self._process, None
        assert process is not None
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(timeout_s)
        if code not in (0, -number):
            text = Path(f"{self.diaries[-1]}.err").read_text()[-2_000:]
            self.unexpected.append(f"{self.name} {self.lives}: {code} {text}")

    def wait(self, timeout_s: float) -> None:
        """Until it ends by itself, its work done."""
        assert self._process is not None
        self._process.wait(timeout_s)
        self.end(signal.SIGTERM)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None


class Storm:
    """One run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.folder = folder
        self.rng = random.Random(plan.seed)
        self.killed: Counter[str] = Counter()
        self.left = 0
        self._positions: dict[Path, tuple[int, int]] = {}

    def run(self) -> Verdict:
        """Start everything, kill, end everything, count."""
        plan = self.plan
        began = time.monotonic()
        # Starting a node takes as long as it takes; a member is given up after three seconds.
        with Cluster(self.folder, defaults={"group.min.session.timeout.ms": "1000"}) as cluster:
            create_topic(cluster.bootstrap, TOPIC, plan.partitions, min_insync_replicas="2")
            self.producer, self.consumers = self._clients(cluster)
            everybody = [*self.consumers, self.producer]
            try:
                for client in everybody:
                    client.start()
                self._kill(cluster)
                cluster.bring_back()
                if plan.records:
                    self.producer.wait(900)
                else:
                    self.producer.end(signal.SIGTERM)
                self._drain()
                for consumer in self.consumers:
                    consumer.end(signal.SIGTERM)
            finally:
                for client in everybody:
                    if client.is_running:
                        client.end(signal.SIGKILL)
            log = read_partitions(cluster.bootstrap, TOPIC, range(plan.partitions))
        return self._judge(log, time.monotonic() - began)

    def _clients(self, cluster: Cluster) -> tuple[Member, list[Member]]:
        plan = self.plan
        producing, consuming = PROMISES[plan.promise]
        common: dict[str, Any] = {"bootstrap": cluster.bootstrap, "topic": TOPIC}
        order = Order(
            role="producer",
            driver=DRIVERS[plan.seed % 3],
            diary=str(self.folder / "producer"),
            rate=plan.rate,
            count=plan.records or 1 << 60,
            settings=producing,
            **common,
        )
        consumers = [
            Member(
                f"consumer-{number}",
                Order(
                    role="consumer",
                    driver=DRIVERS[(plan.seed + number) % 3],
                    diary=str(self.folder / f"consumer-{number}"),
                    settings={"group": "kills", **consuming, **MEMBER},
                    **common,
                ),
            )
            for number in range(1, plan.consumers + 1)
        ]
        return Member("producer", order), consumers

    # Killing.

    def _victims(self) -> Iterator[str]:
        """Nodes in turn, and after two of them a client."""
        nodes = itertools.cycle(("node-1", "node-2", "node-3"))
        clients = itertools.cycle(
            [consumer.name for consumer in self.consumers]
            + ([] if self.plan.records else ["producer"])
        )
        while True:
            yield next(nodes)
            yield next(nodes)
            yield next(clients)

    def _kill(self, cluster: Cluster) -> None:
        plan = self.plan
        self._wait_for_progress()
        ends_at = time.monotonic() + plan.seconds
        victims = self._victims()
        while sum(self.killed.values()) < plan.kills if plan.kills else time.monotonic() < ends_at:
            victim = next(victims)
            if self._strike(cluster, victim):
                self.killed[victim.partition("-")[0]] += 1
            else:
                self.left += 1
            self._wait_for_progress()
            count = sum(self.killed.values())
            if not count % 20:
                out(f"{count} kills, {self._acknowledged:,} acknowledged")

    def _strike(self, cluster: Cluster, victim: str) -> bool:
        """Kill it and start it again; False where it was asked to go in order."""
        kind, _, number = victim.partition("-")
        if kind == "node":
            node = cluster[int(number)]
            node.kill()
            time.sleep(self.rng.choice([0.0, 0.1, 0.5]))  # how long it is away
            node.start()
            node.wait_ready()
            return True
        client = self.producer if kind == "producer" else self.consumers[int(number) - 1]
        # Now and then one goes in order: then nothing of its partitions may be handed out twice.
        must_die = kind == "producer" or self.rng.random() < 0.7
        client.end(signal.SIGKILL if must_die else signal.SIGTERM)
        client.start()
        return must_die

    _acknowledged = 0

    def _wait_for_progress(self) -> None:
        """Until records are acknowledged again, or the producer has done its work."""
        goal = self._count(self.producer, b"a") + PROGRESS

        def is_there() -> bool:
            self._acknowledged = self._count(self.producer, b"a")
            return self._acknowledged >= goal or not self.producer.is_running

        wait_until(is_there, PATIENCE_S, f"{PROGRESS} more acknowledgements")

    def _drain(self) -> None:
        """Until the group has handed out everything that was acknowledged."""
        ends: dict[int, int] = {}
        for kind, *rest in self._lines(self.producer):
            if kind == "a":
                partition, offset = int(rest[0]), int(rest[1])
                ends[partition] = max(ends.get(partition, -1), offset)
        seen: dict[int, int] = {}

        def is_drained() -> bool:
            for consumer in self.consumers:
                for diary in consumer.diaries:
                    for line in self._tail(diary):
                        if line[:1] == b"h":
                            _, partition, offset, _ = line.split()
                            known = seen.get(int(partition), -1)
                            seen[int(partition)] = max(known, int(offset))
            return all(seen.get(partition, -1) >= end for partition, end in ends.items())

        self._positions.clear()
        wait_until(is_drained, 300, "everything handed out")

    # Reading diaries.

    def _tail(self, diary: Path) -> list[bytes]:
        """The whole lines that are new since the last look."""
        if not diary.exists():
            return []
        position, _ = self._positions.get(diary, (0, 0))
        with diary.open("rb") as file:
            file.seek(position)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        self._positions[diary] = position + whole, 0
        return content[:whole].splitlines()

    def _count(self, member: Member, kind: bytes) -> int:
        total = 0
        for diary in member.diaries:
            _, before = self._positions.get(diary, (0, 0))
            more = sum(1 for line in self._tail(diary) if line[:1] == kind)
            position, _ = self._positions.get(diary, (0, 0))
            self._positions[diary] = position, before + more
            total += before + more
        return total

    @staticmethod
    def _lines(member: Member) -> Iterator[list[str]]:
        for diary in member.diaries:
            if diary.exists():
                for line in diary.read_text().splitlines():
                    yield line.split(" ")

    # Counting.

    def _judge(self, log: dict[int, list[tuple[int, int]]], seconds: float) -> Verdict:
        acknowledged: dict[int, tuple[int, int]] = {}
        outcomes: Counter[str] = Counter()
        for kind, *rest in self._lines(self.producer):
            if kind == "a":
                acknowledged[int(rest[2])] = int(rest[0]), int(rest[1])
            elif kind == "f":
                outcomes[rest[1]] += 1
        at = {(p, offset): number for p, read in log.items() for offset, number in read}
        copies = Counter(at.values())
        handed: Counter[int] = Counter()
        skipped = unexplained = 0
        for consumer in self.consumers:
            for diary in consumer.diaries:
                if diary.exists():
                    more, bad_gaps, bad_repeats = follow(diary.read_text().splitlines(), at)
                    handed += more
                    skipped += bad_gaps
                    unexplained += bad_repeats
        return Verdict(
            promise=self.plan.promise,
            kills=dict(self.killed),
            left_in_order=self.left,
            seconds=round(seconds, 1),
            sent_lives=self.producer.lives,
            acknowledged=len(acknowledged),
            failed=outcomes["FAILED"],
            unknown=outcomes["UNKNOWN"],
            in_log=len(at),
            handed_out=sum(handed.values()),
            lost_from_log=sum(
                1
                for number, (partition, offset) in acknowledged.items()
                # An offset that the broker forgot is told as -1: then it is there somewhere.
                if (at.get((partition, offset)) if offset >= 0 else number) != number
                or number not in copies
            ),
            twice_in_log=sum(1 for count in copies.values() if count > 1),
            out_of_order=sum(map(inversions, log.values())),
            never_handed_out=sum(1 for number in acknowledged if number not in handed),
            handed_out_twice=sum(1 for count in handed.values() if count > 1),
            unexplained_twice=unexplained,
            skipped=skipped,
            died_by_themselves=[
                text for member in (self.producer, *self.consumers) for text in member.unexpected
            ],
        )


def follow(lines: Sequence[str], at: dict[tuple[int, int], int]) -> tuple[Counter[int], int, int]:
    """One consumer's life: what it handed out, what it passed over, what it repeated.

    From one assignment of a partition to the next its offsets go up one by one.
    """
    handed: Counter[int] = Counter()
    following: dict[int, int] = {}
    skipped = repeated = 0
    for line in lines:
        kind, *rest = line.split(" ")
        if kind in "+-":
            for word in filter(None, rest):
                following.pop(int(word), None)
        elif kind == "h":
            partition, offset, number = map(int, rest)
            handed[number] += 1
            expected = following.get(partition, offset)
            skipped += offset > expected
            repeated += offset < expected
            following[partition] = offset + 1
            assert at.get((partition, offset)) == number, f"{line} is not what the log has"
    return handed, skipped, repeated


def inversions(read: Sequence[tuple[int, int]]) -> int:
    """How often a record of a producer's life stands behind a later one of the same life."""
    latest: dict[int, int] = {}
    wrong = 0
    for _, number in read:
        life = number // LIFE
        wrong += number < latest.get(life, -1)
        latest[life] = max(latest.get(life, -1), number)
    return wrong


def run(plan: Plan, folder: Path | None = None) -> Verdict:
    """Run a storm, in a folder that goes unless it is given."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return Storm(plan, folder).run()
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        return Storm(plan, Path(name)).run()


def main() -> int:
    """0: every promise held; 1: one did not."""
    parser = argparse.ArgumentParser(prog="python -m tests.client.kills", description=__doc__)
    parser.add_argument("--promise", choices=PROMISES, default="idempotent")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--records", type=int, default=0)
    parser.add_argument("--consumers", type=int, default=2)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--rate", type=float, default=400.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the diaries and the disks here")
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    verdict = run(Plan(**options), folder)
    out(json.dumps(asdict(verdict), indent=1))
    for what in verdict.broken:
        out(f"BROKEN {what}")
    return int(bool(verdict.broken))


if __name__ == "__main__":
    sys.exit(main())
