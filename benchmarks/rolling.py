"""Restart every node in turn under load: `python -m benchmarks.rolling [--rounds N] [--json FILE]`.

Probes without back-off show what the brokers do (one per partition, one that commits offsets of a
group), a stock producer and two stock group members show what applications see of it. Prints, for
each handover, the longest time in which a partition acknowledged nothing (and, for comparison, the
longest while nothing restarted), how soon all brokers name the node in Metadata once it is back,
every error code that anybody was told, and how soon preferred leaders lead again; fails when a
record is missing or an application was told an error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from attrs import define, field
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.dev_run import Asker, DevRun, polling
from raftmq.cli.console import out
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.records import NewRecord, build_batch

TOPIC: Final = "rolling"
PROBE_PAUSE_S: Final = 0.008
COMMIT_PAUSE_S: Final = 0.02
GROUP: Final = "rolling-probe"
WARM_S: Final = 4.0
REST_S: Final = 8.0
SWITCH_INTERVAL_S: Final = 0.0005
"""A probe that waits for the interpreter behind ten other threads measures them, not the broker."""


@define
class Probe(ABC):
    """One raw client that repeats a request until stopped, wherever it must go."""

    run: DevRun
    name: str
    codes: Counter[str] = field(factory=Counter)
    acked: list[float] = field(factory=list)
    stop: threading.Event = field(factory=threading.Event)
    _wires: dict[int, Asker] = field(factory=dict)
    _thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=self.name)
        self._thread.start()

    def end(self) -> None:
        self.stop.set()
        assert self._thread is not None
        self._thread.join(30)
        for wire in self._wires.values():
            wire.close()

    def gap_ms(self, start: float, end: float) -> float:
        """The longest silence that touches this span of time."""
        times = self.acked
        longest = 0.0
        for before, after in itertools.pairwise(times):
            if after >= start and before <= end:
                longest = max(longest, after - before)
        return 1e3 * longest

    @abstractmethod
    def _loop(self) -> None:
        """Repeat the request until told to stop."""

    def _wire(self, node_id: int) -> Asker:
        wire = self._wires.get(node_id)
        if wire is None:
            row = self.run.node(node_id)
            wire = self._wires[node_id] = Asker(row["host"], row["port"], self.name)
        return wire

    def _drop(self, node_id: int, error: OSError) -> None:
        self.codes[type(error).__name__] += 1
        wire = self._wires.pop(node_id, None)
        if wire is not None:
            wire.close()

    def _anybody(self) -> int:
        """A node that can be reached."""
        for row in self.run.rows:
            try:
                self._wire(row["id"])
            except OSError:
                continue
            return int(row["id"])
        raise ConnectionRefusedError("no node is up")


class ProduceProbe(Probe):
    """One record at a time to one partition, acks=all."""

    partition: int = 0

    def _loop(self) -> None:
        leader = -1
        number = 0
        while not self.stop.is_set():
            if leader < 0:
                leader = self._ask_leader()
                if leader < 0:
                    self.stop.wait(0.002)
                    continue
            value = b"p%d" % number
            batch = build_batch([NewRecord(None, value)], timestamp=int(time.time() * 1e3))
            try:
                answer = self._wire(leader).produce(TOPIC, self.partition, batch)
            except OSError as error:
                self._drop(leader, error)
                leader = -1
                continue
            row = answer.topics[0].partitions[0]
            if row.error_code:
                self.codes[ErrorCode(row.error_code).name] += 1
                hint = row.current_leader
                leader = hint.leader_id if hint is not None and hint.leader_id != leader else -1
                continue
            number += 1
            self.acked.append(time.perf_counter())
            self.stop.wait(PROBE_PAUSE_S)

    def _ask_leader(self) -> int:
        node_id = -1
        try:
            node_id = self._anybody()
            answer = self._wire(node_id).metadata(TOPIC)
            return int(answer.topics[0].partitions[self.partition].leader_id)
        except OSError as error:
            self._drop(node_id, error)
            return -1


class CommitProbe(Probe):
    """Commits an offset outside of group management, again and again."""

    group: str = GROUP
    topic: str = TOPIC

    def _loop(self) -> None:
        coordinator = -1
        number = 0
        while not self.stop.is_set():
            if coordinator < 0:
                coordinator = self._find()
                if coordinator < 0:
                    self.stop.wait(0.002)
                    continue
            row = Struct(
                partition_index=0,
                committed_offset=number,
                committed_leader_epoch=-1,
                committed_metadata="",
            )
            request = Struct(
                group_id=self.group,
                generation_id_or_member_epoch=-1,
                member_id="",
                group_instance_id=None,
                topics=[Struct(name=self.topic, partitions=[row])],
            )
            try:
                answer = self._wire(coordinator).ask(ApiKey.OFFSET_COMMIT, 8, request)
            except OSError as error:
                self._drop(coordinator, error)
                coordinator = -1
                continue
            code = answer.topics[0].partitions[0].error_code
            if code:
                self.codes[ErrorCode(code).name] += 1
                coordinator = -1
                continue
            number += 1
            self.acked.append(time.perf_counter())
            self.stop.wait(COMMIT_PAUSE_S)

    def _find(self) -> int:
        node_id = -1
        try:
            node_id = self._anybody()
            answer = self._wire(node_id).ask(
                ApiKey.FIND_COORDINATOR, 2, Struct(key=self.group, key_type=0)
            )
        except OSError as error:
            self._drop(node_id, error)
            return -1
        if answer.error_code:
            self.codes[ErrorCode(answer.error_code).name] += 1
            return -1
        return int(answer.node_id)


@define
class Application:
    """A stock producer and two stock members of a group that commits what it read."""

    bootstrap: str
    partitions: int
    rate: float = 500.0
    errors: list[str] = field(factory=list)
    notes: Counter[str] = field(factory=Counter)
    acked: dict[int, dict[int, int | None]] = field(factory=dict)
    """Offsets by number, by partition; None where the client told none."""
    acked_at: list[float] = field(factory=list)
    read: dict[int, dict[int, int]] = field(factory=dict)
    committed: int = 0
    positions: dict[int, int] = field(factory=dict)
    """Offsets whose commit was answered, by partition."""
    rebalances: int = 0
    latencies_ms: list[tuple[float, float]] = field(factory=list)
    stop: threading.Event = field(factory=threading.Event)
    _threads: list[threading.Thread] = field(factory=list)
    _consumers_stop: threading.Event = field(factory=threading.Event)

    def begin(self) -> None:
        self.acked = {index: {} for index in range(self.partitions)}
        self.read = {index: {} for index in range(self.partitions)}
        targets = [self._produce, self._consume, self._consume]
        self._threads = [threading.Thread(target=target) for target in targets]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        self._threads[0].join(90)
        for _ in polling(60, "everything read by the group"):
            if not self.lost:
                break
        self._consumers_stop.set()
        for thread in self._threads[1:]:
            thread.join(60)

    @property
    def lost(self) -> int:
        """Acknowledged records that the group did not read at their offsets."""
        count = 0
        for partition, offsets in self.acked.items():
            read = self.read[partition].copy()
            found = set(read.values())
            count += sum(
                number not in found if offset is None else read.get(offset) != number
                for number, offset in offsets.items()
            )
        return count

    def _note(self, who: str) -> Any:
        def noted(error: confluent_kafka.KafkaError) -> None:
            self.notes[f"{who}: {error.name()}"] += 1
            if error.fatal():
                self.errors.append(f"{who}: {error}")

        return noted

    def _produce(self) -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 2,
                "error_cb": self._note("producer"),
            }
        )
        started = time.perf_counter()
        number = 0

        def delivered(sent_at: float, number: int) -> Any:
            def done(error: Any, message: Any) -> None:
                now = time.perf_counter()
                if error is not None:
                    self.errors.append(f"producer: {error}")
                    return
                self.acked[message.partition()][number] = message.offset()
                self.acked_at.append(now)
                self.latencies_ms.append((now, 1e3 * (now - sent_at)))

            return done

        while not self.stop.is_set():
            if number > (time.perf_counter() - started) * self.rate:
                producer.poll(0.002)
                continue
            producer.produce(
                TOPIC,
                b"%d" % number,
                partition=number % self.partitions,
                on_delivery=delivered(time.perf_counter(), number),
            )
            number += 1
        producer.flush(60)

    def _consume(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.bootstrap,
                "group.id": "rolling",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "error_cb": self._note("consumer"),
            }
        )

        def counted(_consumer: Any, _partitions: Any) -> None:
            self.rebalances += 1

        consumer.subscribe([TOPIC], on_assign=counted)
        commit_at = time.monotonic()
        while not self._consumers_stop.is_set():
            for message in consumer.consume(500, 0.05):
                if message.error() is not None:
                    self.errors.append(f"consumer: {message.error()}")
                elif not message.value().startswith(b"p"):
                    self.read[message.partition()][message.offset()] = int(message.value())
            if time.monotonic() >= commit_at and consumer.assignment():
                commit_at = time.monotonic() + 0.1
                try:
                    for saved in consumer.commit(asynchronous=False) or ():
                        self.positions[saved.partition] = saved.offset
                    self.committed += 1
                except confluent_kafka.KafkaException as error:
                    code = error.args[0]
                    if code.code() != confluent_kafka.KafkaError._NO_OFFSET:
                        self.errors.append(f"commit: {code}")
        consumer.close()


def caught_up(run: DevRun) -> bool:
    """True when every partition has all its replicas in sync, as Metadata tells it."""
    for row in run.rows:
        try:
            wire = Asker(row["host"], row["port"])
        except OSError:
            return False
        try:
            topic = wire.metadata(TOPIC).topics[0]
        finally:
            wire.close()
        if any(len(p.isr_nodes) < len(p.replica_nodes) for p in topic.partitions):
            return False
    return True


def named_everywhere_s(run: DevRun, node_id: int) -> float:
    """How long after a node answers Metadata itself all brokers name it in theirs.

    Raises:
        TimeoutError: they do not.
    """
    up_at = 0.0
    missing = [node_id, *(row["id"] for row in run.rows if row["id"] != node_id)]
    for _ in polling(30, f"node {node_id} is named by all", 0.005):
        while missing:
            row = run.node(missing[0])
            try:
                wire = Asker(row["host"], row["port"])
            except OSError:
                break  # not up yet
            try:
                named = {broker.node_id for broker in wire.metadata(None).brokers}
            except OSError:
                break
            finally:
                wire.close()
            if missing[0] == node_id and not up_at:
                up_at = time.perf_counter()
            if node_id not in named:
                break
            del missing[0]
        if not missing:
            break
    return time.perf_counter() - up_at


def balanced_s(run: DevRun) -> float:
    """How long it takes until every partition is led by its preferred leader.

    Raises:
        TimeoutError: they are not.
    """
    started = time.perf_counter()
    row = run.rows[0]
    wire = Asker(row["host"], row["port"])
    try:
        for _ in polling(120, "preferred leaders lead"):
            partitions = wire.metadata(TOPIC).topics[0].partitions
            if all(p.leader_id == p.replica_nodes[0] for p in partitions):
                break
    finally:
        wire.close()
    return time.perf_counter() - started


def rest(probes: list[Probe]) -> dict[str, float]:
    """The longest silences while nothing restarts: a gap can hardly be shorter than these."""
    started = time.perf_counter()
    time.sleep(REST_S)
    ended = time.perf_counter()
    return {
        "rest_gap_ms": round(max(p.gap_ms(started, ended) for p in probes[:-1]), 1),
        "rest_commit_gap_ms": round(probes[-1].gap_ms(started, ended), 1),
    }


def restart_all(
    run: DevRun, probes: list[Probe], application: Application | None
) -> list[dict[str, Any]]:
    """One round; a row per node."""
    rows = []
    for node in [row["id"] for row in run.rows]:
        started = time.perf_counter()
        stop_s = run.terminate(node)
        stopped = time.perf_counter()
        handover = max(probe.gap_ms(started, stopped) for probe in probes[:-1])
        commits = probes[-1].gap_ms(started, stopped)
        run.start(node)
        named_s = named_everywhere_s(run, node)
        run.wait_ready(node)
        for _ in polling(30, f"node {node} in sync"):
            if caught_up(run):
                break
        ended = time.perf_counter()
        latencies = [] if application is None else application.latencies_ms
        rows.append(
            {
                "node": node,
                "gap_ms": round(handover, 1),
                "return_gap_ms": round(max(p.gap_ms(stopped, ended) for p in probes[:-1]), 1),
                "commit_gap_ms": round(commits, 1),
                "stop_s": round(stop_s, 2),
                "back_s": round(ended - stopped, 2),
                "named_ms": round(1e3 * named_s, 1),
                "latency_max_ms": round(
                    max((ms for at, ms in latencies if started <= at <= ended), default=0.0), 1
                ),
            }
        )
        out(str(rows[-1]))
    return rows


def main() -> int:
    """Run it; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--probes-only", action="store_true", help="no stock clients")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    with DevRun() as run:
        admin = AdminClient({"bootstrap.servers": run.bootstrap})
        new = NewTopic(TOPIC, options.partitions, 3, config={"min.insync.replicas": "2"})
        admin.create_topics([new])[TOPIC].result(30)
        probes: list[Probe] = []
        for index in range(options.partitions):
            probe = ProduceProbe(run, f"probe-{index}")
            probe.partition = index
            probes.append(probe)
        probes.append(CommitProbe(run, "committer"))
        application = None
        if not options.probes_only:
            application = Application(run.bootstrap, options.partitions)
            application.begin()
        for probe in probes:
            probe.begin()
        time.sleep(WARM_S)
        rows, balance = [], []
        try:
            resting = rest(probes)
            for _ in range(options.rounds):
                rows += restart_all(run, probes, application)
                balance.append(round(balanced_s(run), 1))
        finally:
            for probe in probes:
                probe.end()
            if application is not None:
                application.end()
    codes: Counter[str] = sum((probe.codes for probe in probes[:-1]), Counter())
    result: dict[str, Any] = {
        **resting,
        "handovers": rows,
        "balanced_s": balance,
        "gap_ms_max": max(row["gap_ms"] for row in rows),
        "produce_codes": codes,
        "commit_codes": probes[-1].codes,
    }
    is_good = True
    if application is not None:
        result |= {
            "acknowledged": sum(len(numbers) for numbers in application.acked.values()),
            "lost": application.lost,
            "commits": application.committed,
            "rebalances": application.rebalances,
            "errors": application.errors[:20],
            "notes": application.notes,
        }
        is_good = not application.lost and not application.errors
    out(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
