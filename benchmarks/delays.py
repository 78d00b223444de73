"""Many delayed records: `python -m benchmarks.delays [--records N] [--within S] [--json FILE]`.

A stock producer sends records with random due times into a delay topic of a local cluster, all of
them before the first is due; a stock consumer reads the target. Prints how late records were when
they were delivered (their timestamp) and when they were read, the nodes' memory and CPU, and how
busy the machine was; fails when a record was early, twice, missing, or before one of its partition
that was due sooner, or at the same time and sent first.

Records name a time (`deliver-at`), or with `--after` how long they wait, counted by the broker.
`--kill-every 20` kills (-9) a leader of the delay topic or of its target every so many seconds
while records are due; `--kill-all` all nodes in the middle, once; `--cut-power` takes their power
there, so that what was not synced is gone (needs root and xfsprogs); `--skew` lets one node's clock
run a day fast from a third of the time on (needs libfaketime). Killed nodes are started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import struct
import sys
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from attrs import define, field
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks import stats
from benchmarks.dev_run import DevRun
from jepsen_like.live import clocks
from jepsen_like.live.storage import LackError, PowerDisk
from raftmq.cli.console import out

TARGET: Final = "due"
LATER: Final = "due.later"
VALUE: Final = struct.Struct(">qq")
"""Number and due time, ms; padded to the size that is asked for."""
IN_FLIGHT_MAX: Final = 500
"""Records that wait in the client, where a delay counts from the append: some are late by that."""
DISK_BYTES: Final = 2 << 30
"""Of each node, where power is cut."""
SEEN: Final = (0.5, 0.9, 0.99, 0.999, 1.0)


@define
class Seen:
    """What the consumer saw."""

    has_order: bool
    """Due times are the broker's, too: what is due later comes later."""
    delivered_late: array[int] = field(factory=lambda: array("q"))
    read_late: array[int] = field(factory=lambda: array("q"))
    early: int = 0
    early_ms_max: float = 0.0
    doubles: int = 0
    disorders: int = 0
    numbers: bytearray = field(factory=bytearray)
    last: dict[int, tuple[int, int]] = field(factory=dict)

    def take(self, message: confluent_kafka.Message, now_ms: float) -> None:
        """Judge one record."""
        number, due_ms = VALUE.unpack_from(message.value() or b"")
        self.doubles += self.numbers[number]
        self.numbers[number] = 1
        delivered_ms = message.timestamp()[1]
        ahead_ms = due_ms - min(delivered_ms, now_ms)
        self.early += ahead_ms > 0
        self.early_ms_max = max(self.early_ms_max, ahead_ms)
        partition = message.partition() or 0
        self.disorders += self.has_order and (due_ms, number) <= self.last.get(partition, (0, -1))
        self.last[partition] = due_ms, number
        self.delivered_late.append(delivered_ms - due_ms)
        self.read_late.append(int(now_ms - due_ms))


def make_topics(run: DevRun, partitions: int) -> None:
    """The target, and the delay topic that delivers to it."""
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    for name, configs in ((TARGET, {}), (LATER, {"raftmq.delivers.to": TARGET})):
        new = NewTopic(name, partitions, min(3, run.nodes), config=configs)
        admin.create_topics([new])[name].result(60)


def produce(run: DevRun, options: argparse.Namespace) -> tuple[float, list[int]]:
    """Send all records; how long that took, and when each is due."""
    chance = random.Random(options.seed)
    first_ms = int(time.time() * 1e3 + options.lead * 1e3)
    due = [first_ms + chance.randrange(int(options.within * 1e3)) for _ in range(options.records)]
    refused: list[str] = []

    def told(error: confluent_kafka.KafkaError | None, _: object) -> None:
        if error is not None:
            refused.append(str(error))

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": run.bootstrap,
            "enable.idempotence": True,
            "linger.ms": 20,
            "queue.buffering.max.messages": 50_000,
            "log_level": 0,
        }
    )
    padding = bytes(max(0, options.size - VALUE.size))
    began = time.monotonic()
    for number, due_ms in enumerate(due):
        header = ("deliver-at", str(due_ms))
        if options.after:
            while len(producer) > IN_FLIGHT_MAX:
                producer.poll(0.01)
            now_ms = int(time.time() * 1e3)
            due[number] = max(due_ms, now_ms)
            header = ("deliver-after", str(due[number] - now_ms))
        headers: list[tuple[str, str | bytes | None]] = [header]
        value = VALUE.pack(number, due[number]) + padding
        while True:
            try:
                producer.produce(
                    LATER,
                    value,
                    headers=headers,
                    partition=number % options.partitions,
                    on_delivery=told,
                )
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1_000 == 0:
            producer.poll(0)
    if producer.flush(300) or refused:
        raise RuntimeError(f"not taken: {refused[:3]}")
    return time.monotonic() - began, due


def consume(run: DevRun, options: argparse.Namespace, seen: Seen, stop: threading.Event) -> None:
    """Read all partitions of the target from the start."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": run.bootstrap,
            "group.id": "delays",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 100,
            "log_level": 0,
        }
    )
    parts = range(options.partitions)
    consumer.assign([confluent_kafka.TopicPartition(TARGET, n, 0) for n in parts])
    while not stop.is_set():
        message = consumer.poll(0.1)
        if message is not None and message.error() is None:
            seen.take(message, time.time() * 1e3)
    consumer.close()


@define
class Trouble:
    """What befalls the nodes while records are due."""

    run: DevRun
    options: argparse.Namespace
    first_s: float
    stop: threading.Event
    disks: list[PowerDisk]
    kills: int = 0
    environments: dict[int, dict[str, str]] = field(factory=dict)

    def go_on(self) -> None:
        """Until told to stop."""
        for at_s, what in sorted(self._planned()):
            if self.stop.wait(max(0.0, self.first_s + at_s - time.time())):
                return
            what()

    def _planned(self) -> Iterator[tuple[float, Any]]:
        options = self.options
        if options.kill_every:
            for number in range(1, int(options.within / options.kill_every)):
                yield number * options.kill_every, lambda number=number: self._kill_leader(number)
        if options.kill_all or options.cut_power:
            yield options.within / 2 + 0.5, self._kill_all
        if options.skew:
            yield options.within / 3 + 0.25, self._skew

    def _kill_leader(self, number: int) -> None:
        admin = AdminClient({"bootstrap.servers": self.run.bootstrap, "log_level": 0})
        topic = (LATER, TARGET)[number % 2]
        parts = admin.list_topics(topic, timeout=10).topics[topic].partitions
        victim = parts[number // 2 % len(parts)].leader
        if victim >= 0:
            self._kill([victim])

    def _kill_all(self) -> None:
        self._kill([row["id"] for row in self.run.rows], self.disks)

    def _skew(self) -> None:
        """Its clock goes right until it serves again."""
        node_id = self.run.rows[-1]["id"]
        told = self.run.folder / f"clock-{node_id}"
        clocks.set_off(told, 0.0)
        self.environments[node_id] = clocks.environment(told)
        self._kill([node_id])
        clocks.set_off(told, clocks.DAY_S)

    def _kill(self, victims: list[int], disks: Sequence[PowerDisk] = ()) -> None:
        """End them, with the power of these disks of theirs, and start them again."""
        for disk in disks:
            disk.lose_power()
        for node_id in victims:
            self.run.kill(node_id)
            self.kills += 1
        for disk in disks:
            disk.repower()
        for node_id in victims:
            self.run.start(node_id, self.environments.get(node_id))
        for node_id in victims:
            with contextlib.suppress(TimeoutError):  # what is missing is told in the end
                self.run.wait_ready(node_id, 60)


def measure(run: DevRun, options: argparse.Namespace, disks: list[PowerDisk]) -> dict[str, Any]:
    """All of it."""
    make_topics(run, options.partitions)
    seen = Seen(has_order=not options.after, numbers=bytearray(options.records))
    stop = threading.Event()
    took_s, due = produce(run, options)
    left_s = min(due) / 1e3 - time.time()
    if left_s < 0:
        raise RuntimeError(f"sent {-left_s:.0f} s too late: raise --lead above {took_s:.0f}")
    reader = threading.Thread(target=consume, args=(run, options, seen, stop))
    reader.start()
    trouble = Trouble(run, options, min(due) / 1e3, stop, disks)
    troubling = threading.Thread(target=trouble.go_on)
    troubling.start()
    cpu_s, began, loads, rss = run.cpu_s(), time.monotonic(), [], [0]
    until = max(due) / 1e3 + options.grace
    try:
        while time.time() < until and len(seen.read_late) < options.records:
            time.sleep(1.0)
            loads.append(os.getloadavg()[0])
            rss.append(max(run.rss_bytes().values(), default=0))
    finally:
        stop.set()
        reader.join()
        troubling.join()
    took = time.monotonic() - began

    def shares(late: array[int]) -> dict[str, float]:
        return {f"p{share * 100:g}": stats.percentile(late, share) for share in SEEN}

    return {
        "records": options.records,
        "within_s": options.within,
        "partitions": options.partitions,
        "bytes": options.size,
        "produce_s": round(took_s, 1),
        "delivered_late_ms": shares(seen.delivered_late),
        "read_late_ms": shares(seen.read_late),
        "kills": trouble.kills,
        "early": seen.early,
        "early_ms_max": round(seen.early_ms_max, 1),
        "disorders": seen.disorders,
        "doubles": seen.doubles,
        "missing": options.records - sum(seen.numbers),
        "rss_mib_max": max(rss) >> 20,
        "cpu_cores": round((run.cpu_s() - cpu_s) / took, 2),
        "load_median": stats.median(loads),
    }


def main() -> int:
    """Run it; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--within", type=float, default=300, help="seconds in which they are due")
    parser.add_argument("--lead", type=float, default=90, help="seconds until the first is due")
    parser.add_argument("--grace", type=float, default=60, help="seconds to wait after the last")
    parser.add_argument("--nodes", type=int, choices=(1, 3, 5), default=3)
    parser.add_argument("--partitions", type=int, default=6)
    parser.add_argument("--size", type=int, default=100, help="bytes of a value")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", type=int, help="delay_memory_bytes_max of the nodes")
    parser.add_argument("--kill-every", type=float, default=0, help="seconds between kills")
    parser.add_argument("--kill-all", action="store_true")
    parser.add_argument("--cut-power", action="store_true", help="of all nodes in the middle")
    parser.add_argument("--skew", action="store_true", help="one clock is a day fast")
    parser.add_argument("--after", action="store_true", help="by deliver-after")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.skew and clocks.lack():
        parser.error(f"--skew {clocks.lack()}")
    settings = {"delay_memory_bytes_max": str(options.memory)} if options.memory else {}
    run, disks = DevRun(nodes=options.nodes, settings=settings), []
    powered = range(1, options.nodes + 1) if options.cut_power else ()
    with contextlib.ExitStack() as stack:
        try:
            for node_id in powered:
                disks.append(PowerDisk(run.folder / f"node-{node_id}", DISK_BYTES))
                stack.callback(disks[-1].close)
        except LackError as error:
            parser.error(f"--cut-power {error}")
        stack.enter_context(run)
        result = measure(run, options, disks)
    for line in json.dumps(result, indent=1).splitlines():
        out(line)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    is_good = not any(result[key] for key in ("early", "doubles", "missing", "disorders"))
    out("kept" if is_good else "BROKEN")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
