"""Ten times the usual rate, suddenly: `python -m benchmarks.surge [--seconds 60] [--json FILE]`.

A steady stream of 20 MB/s is joined by 50 producers that together offer ten times as much, and left
alone again. Producers here are sockets with prebuilt batches and five requests in flight, paced by
a clock: what the brokers do not take in time is offered later, nothing gives up. A stock group
member, a committer and a client that asks for metadata live through it. Prints what was taken, the
latency before, during and after, memory and elections; fails when an acknowledgement is not in the
log, a request failed, a leader changed, or latency does not come back within ten seconds.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from attrs import define, field
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks import stats
from benchmarks.dev_run import Asker, DevRun
from benchmarks.rolling import CommitProbe
from benchmarks.wire import (
    PRODUCE_VERSION,
    batch_of,
    leader_addresses,
    produce_frame,
    settled_leaders,
)
from raftmq.cli.console import out
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, decode_response_header
from raftmq.protocol.produce import decode_produce_response

TOPIC: Final = "surge"
RECORD_BYTES: Final = 1024
IN_FLIGHT_MAX: Final = 5
WINDOW_S: Final = 2.0
BACK_WITHIN_S: Final = 10.0
BACK_FACTOR: Final = 1.5
BACK_FLOOR_MS: Final = 5.0
_MOVED: Final = (ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH)
_SIZE: Final = struct.Struct(">i")


def _connected(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


@define(eq=False)
class Producer:
    """One connection that offers the same batch at a fixed rate."""

    frame: memoryview
    records: int
    interval_s: float
    sock: socket.socket
    due: float
    offered: int = 0
    acked_records: int = 0
    unsent: memoryview = memoryview(b"")
    sent: deque[float] = field(factory=deque)
    received: bytearray = field(factory=bytearray)
    latencies: list[tuple[float, float]] = field(factory=list)
    codes: Counter[str] = field(factory=Counter)
    partition: int = 0
    moves: int = 0
    must_move: bool = False

    def move_to(self, address: tuple[str, int]) -> None:
        """Go on at another leader; what was under way is sent again."""
        self.sock.close()
        self.sock = _connected(address)
        self.due = time.perf_counter()
        self.unsent = memoryview(b"")
        self.sent.clear()
        self.received.clear()
        self.moves += 1
        self.must_move = False

    def pump(self, now: float) -> bool:
        """Send what is due and fits; True when the socket is full."""
        while True:
            if not self.unsent:
                if now < self.due or len(self.sent) >= IN_FLIGHT_MAX:
                    return False
                self.unsent = self.frame
                self.sent.append(max(self.due, now - 0.001))
                self.due = max(self.due + self.interval_s, now - self.interval_s)
                self.offered += 1
            try:
                count = self.sock.send(self.unsent)
            except BlockingIOError:
                return True
            self.unsent = self.unsent[count:]

    def read(self) -> None:
        """Take answers in."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionResetError("a broker hung up on a producer")
        now = time.perf_counter()
        self.received += data
        while len(self.received) >= 4:
            end = 4 + _SIZE.unpack_from(self.received)[0]
            if len(self.received) < end:
                return
            frame = memoryview(bytes(self.received[4:end]))
            del self.received[:end]
            _, position = decode_response_header(ApiKey.PRODUCE, PRODUCE_VERSION, frame)
            answer = decode_produce_response(PRODUCE_VERSION, frame[position:])
            code = answer.topics[0].partitions[0].error_code
            if code in _MOVED:
                self.must_move = True
                return
            if code:
                self.codes[ErrorCode(code).name] += 1
            else:
                self.acked_records += self.records
            self.latencies.append((now, 1e3 * (now - self.sent.popleft())))


@define
class Fleet:
    """Producers on one selector, in a thread of its own."""

    producers: list[Producer] = field(factory=list)
    bootstrap: str = ""
    failure: str = ""
    _stop: threading.Event = field(factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def make(cls, bootstrap: str, count: int, rate: float, batch: int) -> Fleet:
        """`count` connections that together offer `rate` bytes per second in batches of `batch`."""
        leaders = settled_leaders(bootstrap, TOPIC)
        records = max(1, batch // RECORD_BYTES)
        payload = batch_of(records, RECORD_BYTES, bytes(range(256)) * 8)
        interval_s = count * len(payload) / rate
        now = time.perf_counter()
        fleet = cls(bootstrap=bootstrap)
        for i in range(count):
            partition = i % len(leaders)
            sock = _connected(leaders[partition])
            frame = memoryview(produce_frame(TOPIC, partition, payload))
            fleet.producers.append(
                Producer(
                    *(frame, records, interval_s, sock, now + interval_s * i / count),
                    partition=partition,
                )
            )
        return fleet

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        """Offer no more, wait for the answers under way."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(120)

    @property
    def acked_records(self) -> int:
        return sum(producer.acked_records for producer in self.producers)

    @property
    def latencies(self) -> list[tuple[float, float]]:
        return [row for producer in self.producers for row in producer.latencies]

    @property
    def codes(self) -> Counter[str]:
        return sum((producer.codes for producer in self.producers), Counter())

    def _run(self) -> None:
        try:
            self._serve()
        except OSError as error:
            self.failure = repr(error)
        finally:
            for producer in self.producers:
                producer.sock.close()

    def _serve(self) -> None:
        selector = selectors.DefaultSelector()
        for producer in self.producers:
            selector.register(producer.sock, selectors.EVENT_READ, producer)
        full: set[int] = set()
        while True:
            now = time.perf_counter()
            is_over = self._stop.is_set()
            if is_over and not any(p.sent for p in self.producers):
                return
            for i, producer in enumerate(self.producers):
                if is_over and not producer.unsent:
                    producer.due = float("inf")
                is_full = producer.pump(now)
                if is_full != (i in full):
                    events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_full else 0)
                    selector.modify(producer.sock, events, producer)
                    (full.add if is_full else full.discard)(i)
            next_due = min(p.due for p in self.producers)
            for key, events in selector.select(min(0.05, max(0.0005, next_due - now))):
                if events & selectors.EVENT_READ:
                    key.data.read()
            for i, producer in enumerate(self.producers):
                if producer.must_move:
                    selector.unregister(producer.sock)
                    full.discard(i)
                    where = leader_addresses(self.bootstrap, TOPIC)
                    producer.move_to(where[producer.partition])
                    selector.register(producer.sock, selectors.EVENT_READ, producer)


@define
class Bystanders:
    """A stock group member, a committer and somebody who asks for metadata."""

    run: DevRun
    rebalances: int = 0
    consumer_errors: list[str] = field(factory=list)
    metadata_ms: list[tuple[float, float]] = field(factory=list)
    rss: list[tuple[float, dict[int, int]]] = field(factory=list)
    committer: CommitProbe | None = None
    _stop: threading.Event = field(factory=threading.Event)
    _threads: list[threading.Thread] = field(factory=list)

    def begin(self) -> None:
        self.committer = CommitProbe(self.run, "committer")
        self.committer.topic = TOPIC
        self.committer.begin()
        self._threads = [threading.Thread(target=t) for t in (self._consume, self._ask)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        assert self.committer is not None
        self.committer.end()
        for thread in self._threads:
            thread.join(30)

    def _consume(self) -> None:
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": self.run.bootstrap,
                "group.id": "bystander",
                "session.timeout.ms": 6000,
                "auto.offset.reset": "latest",
                "auto.commit.interval.ms": 500,
            }
        )

        def counted(_consumer: Any, _partitions: Any) -> None:
            self.rebalances += 1

        consumer.subscribe(["quiet"], on_assign=counted)
        while not self._stop.is_set():
            message = consumer.poll(0.2)
            if message is not None and message.error() is not None:
                self.consumer_errors.append(str(message.error()))
        consumer.close()

    def _ask(self) -> None:
        row = self.run.rows[0]
        asker = Asker(row["host"], row["port"])
        while not self._stop.wait(0.1):
            started = time.perf_counter()
            asker.metadata(TOPIC)
            now = time.perf_counter()
            self.metadata_ms.append((now, 1e3 * (now - started)))
            self.rss.append((now, self.run.rss_bytes()))
        asker.close()


def percentile(values: list[float], share: float) -> float:
    """As `stats.percentile`; 0 of nothing."""
    return stats.percentile(values, share) if values else 0.0


def between(rows: list[tuple[float, float]], start: float, end: float) -> list[float]:
    """Values of this span of time."""
    return [value for at, value in rows if start <= at < end]


def epochs(run: DevRun) -> dict[str, int]:
    """Leader epochs of all partitions and of the metadata group."""
    found = {}
    for row in run.rows:
        status = run.status(row["id"])
        found["metadata"] = max(found.get("metadata", 0), status["metadata"]["leader_epoch"])
        for part in status["partitions"]:
            name = f"{part['topic']}-{part['partition']}"
            found[name] = max(found.get(name, 0), part["leader_epoch"])
    return found


def high_watermarks(run: DevRun) -> int:
    """Records committed in all partitions since the topic was made."""
    total: dict[int, int] = {}
    for row in run.rows:
        for part in run.status(row["id"])["partitions"]:
            if part["topic"] == TOPIC:
                index = part["partition"]
                total[index] = max(total.get(index, 0), part["high_watermark"])
    return sum(total.values())


def recovered_s(latencies: list[tuple[float, float]], end: float, p99_ms: float) -> float:
    """How long after `end` the p99 of a window is what it was; infinite when it never is."""
    goal = max(BACK_FLOOR_MS, BACK_FACTOR * p99_ms)
    for step in range(60):
        start = end + step * 0.5
        values = between(latencies, start, start + WINDOW_S)
        if values and percentile(values, 0.99) <= goal:
            return step * 0.5
    return float("inf")


@define
class Surge:
    """One run: the streams, who lives through it, and when what happened."""

    run: DevRun
    steady: Fleet
    flood: Fleet
    bystanders: Bystanders
    before: float = 0.0
    begin: float = 0.0
    end: float = 0.0
    over: float = 0.0
    taken: int = 0
    cpu_s: float = 0.0

    def perform(self, options: argparse.Namespace) -> None:
        """Steady, flooded, and left alone again."""
        self.before = time.perf_counter()
        time.sleep(options.before)
        self.begin = time.perf_counter()
        cpu_s = self.run.cpu_s()
        for producer in self.flood.producers:
            producer.due = self.begin
        self.flood.begin()
        time.sleep(options.seconds)
        self.end = time.perf_counter()
        self.cpu_s = self.run.cpu_s() - cpu_s
        self.taken = self.flood.acked_records
        self.flood.end()
        time.sleep(BACK_WITHIN_S + WINDOW_S)
        self.over = time.perf_counter()

    @property
    def phases(self) -> tuple[tuple[str, float, float], ...]:
        """Name, start and end of each."""
        return (
            ("before", self.before, self.begin),
            ("surge", self.begin, self.end),
            ("after", self.end, self.over),
        )

    def rows(self) -> list[dict[str, Any]]:
        """What each phase was like."""
        rows = []
        assert self.bystanders.committer is not None
        for name, start, stop in self.phases:
            mine = between(self.steady.latencies, start, stop)
            theirs = between(self.flood.latencies, start, stop)
            asked = between(self.bystanders.metadata_ms, start, stop)
            sizes = [sum(r.values()) for at, r in self.bystanders.rss if start <= at < stop]
            rows.append(
                {
                    "phase": name,
                    "steady_p50_ms": round(percentile(mine, 0.5), 1),
                    "steady_p99_ms": round(percentile(mine, 0.99), 1),
                    "steady_max_ms": round(max(mine, default=0.0), 1),
                    "surge_p99_ms": round(percentile(theirs, 0.99), 1),
                    "metadata_p99_ms": round(percentile(asked, 0.99), 1),
                    "commit_gap_ms": round(self.bystanders.committer.gap_ms(start, stop), 1),
                    "rss_mb": round(max(sizes, default=0) / 1e6),
                }
            )
        return rows

    def recovered_s(self) -> float:
        """How long after the surge the steady stream's p99 is what it was before."""
        p99_ms = percentile(between(self.steady.latencies, self.before, self.begin), 0.99)
        return recovered_s(self.steady.latencies, self.end, p99_ms)


def prepare(run: DevRun, options: argparse.Namespace) -> Surge:
    """Topics, leaders, connections."""
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    bounds = {"retention.bytes": str(256 << 20), "segment.bytes": str(64 << 20)}
    topics = [
        NewTopic(TOPIC, options.partitions, 3, config={"min.insync.replicas": "2", **bounds}),
        NewTopic("quiet", 3, 3),
    ]
    for done in admin.create_topics(topics).values():
        done.result(30)
    time.sleep(1)
    rate = options.rate * 1e6
    return Surge(
        run,
        Fleet.make(run.bootstrap, options.partitions, rate, options.steady_batch),
        Fleet.make(run.bootstrap, options.producers, 10 * rate, options.surge_batch),
        Bystanders(run),
    )


def surge(run: DevRun, options: argparse.Namespace) -> dict[str, Any]:
    """Run it on a cluster that is up."""
    it = prepare(run, options)
    it.bystanders.begin()
    it.steady.begin()
    time.sleep(options.warm)
    epochs_before = epochs(run)
    it.perform(options)
    it.steady.end()
    it.bystanders.end()
    epochs_after = epochs(run)
    acked = it.steady.acked_records + it.flood.acked_records
    deadline = time.monotonic() + 10
    while (committed := high_watermarks(run)) < acked and time.monotonic() < deadline:
        time.sleep(0.1)
    assert it.bystanders.committer is not None
    return {
        "phases": it.rows(),
        "offered_mb_s": round(11 * options.rate),
        "taken_mb_s": round(it.taken * RECORD_BYTES / 1e6 / (it.end - it.begin), 1),
        "server_cores": round(it.cpu_s / (it.end - it.begin), 2),
        "acknowledged": acked,
        "committed": committed,
        "lost": max(0, acked - committed),
        "moves": sum(p.moves for p in it.steady.producers + it.flood.producers),
        "codes": dict(it.steady.codes + it.flood.codes),
        "failures": [f for f in (it.steady.failure, it.flood.failure) if f],
        "elections": {
            name: epoch - epochs_before.get(name, 0)
            for name, epoch in epochs_after.items()
            if epoch != epochs_before.get(name, 0)
        },
        "rebalances": it.bystanders.rebalances,
        "consumer_errors": it.bystanders.consumer_errors,
        "commit_codes": dict(it.bystanders.committer.codes),
        "rss_node_max_mb": round(
            max((max(r.values()) for _, r in it.bystanders.rss if r), default=0) / 1e6
        ),
        "loop_stalls": {row["id"]: run.status(row["id"])["loop_stalls"] for row in run.rows},
        "recovered_s": it.recovered_s(),
    }


def is_good(result: dict[str, Any]) -> bool:
    """True when every promise was kept."""
    return (
        not result["lost"]
        and not result["codes"]
        and not result["failures"]
        and not result["elections"]
        and not result["consumer_errors"]
        and result["rebalances"] == 1
        and result["recovered_s"] <= BACK_WITHIN_S
    )


def main() -> int:
    """Run it; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--before", type=float, default=10)
    parser.add_argument("--warm", type=float, default=4)
    parser.add_argument("--rate", type=float, default=20, help="MB/s of the steady stream")
    parser.add_argument("--producers", type=int, default=50)
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--steady-batch", type=int, default=16 << 10)
    parser.add_argument("--surge-batch", type=int, default=256 << 10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with DevRun() as run:
        result = surge(run, options)
    for row in result["phases"]:
        out("  ".join(f"{key} {value}" for key, value in row.items()))
    out(json.dumps({k: v for k, v in result.items() if k != "phases"}, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    out("kept" if is_good(result) else "BROKEN")
    return 0 if is_good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
