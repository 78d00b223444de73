"""A node comes back with a long gap: `python -m benchmarks.catchup [--mib 1024] [--limits 64,32]`.

One of three nodes is stopped, the others take a gigabyte, which is then put out of the page cache:
the node was away for hours. Small records arrive at a steady rate all the while, each timed from
when it was due. Prints their latency with all well, with the node away, while it starts and while
it catches up, and how fast it did; the last two stand apart, since a process that starts takes a
core for a second, whatever it lacks. Leaders are never on that node, so that none moves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from attrs import define, field
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from benchmarks.dev_run import Asker, DevRun, polling
from benchmarks.loop_clients import Punctual, Tally, TopicLeaders
from benchmarks.page_cache import forget
from benchmarks.stats import percentile
from benchmarks.wire import (
    CREATE_VERSION,
    Loop,
    Wire,
    batch_of,
    check_produced,
    produce_frame,
    settled_leaders,
)
from benchmarks.workloads.latency import no_collector
from raftmq.cli.console import out
from raftmq.protocol import ApiKey, Struct

AWAY: Final = 3
LEADERS: Final = (1, 2)
GAP: Final = "gap"
LIVE: Final = "live"
PARTITIONS: Final = 6
REST_S: Final = 10.0
RECORD_BYTES: Final = 1024
BATCH_BYTES: Final = 512 << 10
LIMIT_KEY: Final = "replica.catchup.bytes.per.s"


def _create(run: DevRun, topic: str) -> None:
    """A topic that the node which goes away never leads."""
    rows = [
        Struct(
            partition_index=part,
            broker_ids=[LEADERS[part % 2], LEADERS[1 - part % 2], AWAY],
        )
        for part in range(PARTITIONS)
    ]
    new = Struct(
        name=topic,
        num_partitions=-1,
        replication_factor=-1,
        assignments=rows,
        configs=[Struct(name="min.insync.replicas", value="2")],
    )
    request = Struct(topics=[new], timeout=10_000, validate_only=False)
    for _ in polling(30, f"topic {topic}", 0.2):
        with Wire(_address(run)) as wire:
            answer = wire.ask(ApiKey.CREATE_TOPICS, CREATE_VERSION, request)
        if not answer.topics[0].error_code:
            return


def _address(run: DevRun) -> tuple[str, int]:
    row = run.node(LEADERS[0])
    return row["host"], row["port"]


def _set_limit(run: DevRun, limit_bytes: int) -> None:
    """The limit of those who lead, changed while they run."""
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    for node in LEADERS:
        entry = ConfigEntry(
            LIMIT_KEY, str(limit_bytes), incremental_operation=AlterConfigOpType.SET
        )
        resource = ConfigResource(ResourceType.BROKER, str(node), incremental_configs=[entry])
        (future,) = admin.incremental_alter_configs([resource]).values()
        future.result(10)


def _default_limit(run: DevRun) -> int:
    """The limit that nodes begin with."""
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    resource = ConfigResource(ResourceType.BROKER, str(LEADERS[0]))
    (future,) = admin.describe_configs([resource]).values()
    return int(future.result(10)[LIMIT_KEY].value)


def _fill(run: DevRun, mebibytes: int) -> None:
    """What the node that is away will lack."""
    batch = batch_of(BATCH_BYTES // RECORD_BYTES, RECORD_BYTES, os.urandom(1 << 20))
    frames = [produce_frame(GAP, part, batch) for part in range(PARTITIONS)]
    leaders = settled_leaders(run.bootstrap, GAP)
    with ExitStack() as stack:
        wires = {address: stack.enter_context(Wire(address)) for address in set(leaders.values())}
        for number in range((mebibytes << 20) // BATCH_BYTES):
            part = number % PARTITIONS
            check_produced(wires[leaders[part]].exchange(frames[part]))


def _lacks(run: DevRun) -> int:
    """In how many partitions the node is not in sync."""
    asker = Asker(*_address(run))
    try:
        topics = [asker.metadata(name).topics[0] for name in (GAP, LIVE)]
    finally:
        asker.close()
    return sum(AWAY not in part.isr_nodes for topic in topics for part in topic.partitions)


class _Writer(Punctual):
    def __init__(self, steady: Steady, part: int, frame: bytes, due: float) -> None:
        tally, interval_s = Tally(), steady.interval_s
        super().__init__(
            steady.loop, tally, steady.leaders, part, frame, due=due, interval_s=interval_s
        )
        self._times = steady.times

    def acknowledged(self, now: float, taken_s: float) -> None:
        """Note when, and how long it took."""
        self._times.append((now, taken_s))


@define
class Steady:
    """Producers at a steady rate, in a thread of their own."""

    run: DevRun
    rate: float
    loop: Loop = field(factory=Loop)
    times: list[tuple[float, float]] = field(factory=list)
    """When it was acknowledged, how long it took; seconds."""
    leaders: TopicLeaders = field(init=False)
    interval_s: float = field(init=False)
    _is_ending: bool = False
    _thread: threading.Thread | None = None

    def __attrs_post_init__(self) -> None:
        self.leaders = TopicLeaders(self.run.bootstrap, LIVE)
        self.interval_s = PARTITIONS / self.rate

    def begin(self) -> None:
        """Start writing."""
        batch = batch_of(1, 100, os.urandom(4096))
        start = time.perf_counter() + 0.1
        for part in range(PARTITIONS):
            due = start + part * self.interval_s / PARTITIONS
            _Writer(self, part, produce_frame(LIVE, part, batch), due)
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def end(self) -> None:
        """Stop writing."""
        self._is_ending = True
        if self._thread is not None:
            self._thread.join()
        self.loop.__exit__()

    def told(self, start: float, end: float) -> dict[str, float]:
        """The latency between two moments."""
        taken = [1e3 * seconds for at, seconds in self.times if start <= at < end]
        return {
            "p50_ms": round(percentile(taken, 0.5), 2),
            "p99_ms": round(percentile(taken, 0.99), 2),
            "max_ms": round(max(taken), 1),
            "records": len(taken),
        }

    def _work(self) -> None:
        with no_collector():
            while not self._is_ending:
                self.loop.run_until(time.perf_counter() + 0.5)


def _rest(steady: Steady, seconds: float) -> dict[str, float]:
    start = time.perf_counter()
    time.sleep(seconds)
    return steady.told(start, time.perf_counter())


def one_round(run: DevRun, steady: Steady, mebibytes: int, limit_bytes: int) -> dict[str, Any]:
    """Away, and back."""
    _set_limit(run, limit_bytes)
    well = _rest(steady, REST_S)
    run.terminate(AWAY)
    _fill(run, mebibytes)
    forget(run.folder.rglob("*.log"))
    away = _rest(steady, REST_S)
    began = time.perf_counter()
    run.start(AWAY)
    run.wait_ready(AWAY)
    up = time.perf_counter()
    for _ in polling(600, f"node {AWAY} is in sync everywhere", 0.1):
        if not _lacks(run):
            break
    ended = time.perf_counter()
    catching_up = steady.told(up, ended)
    return {
        "limit_mib_per_s": limit_bytes >> 20,
        "well": well,
        "away": away,
        "starting": steady.told(began, up),
        "catching_up": catching_up,
        "seconds": round(ended - up, 1),
        "mib_per_s": round(mebibytes / (ended - up), 1),
        "p99_ratio": round(catching_up["p99_ms"] / well["p99_ms"], 2),
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="how much the node lacks [1024]")
    parser.add_argument("--rate", type=float, default=300, help="records a second [300]")
    parser.add_argument("--limits", default="", help="MiB/s per leading node, one round for each")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with DevRun() as run:
        limits = [int(text) << 20 for text in options.limits.split(",") if text]
        limits = limits or [_default_limit(run)]
        for topic in (GAP, LIVE):
            _create(run, topic)
        steady = Steady(run, options.rate)
        steady.begin()
        rounds = []
        try:
            time.sleep(2)
            for limit in limits * options.rounds:
                rounds.append(one_round(run, steady, options.mib, limit))
                out(json.dumps(rounds[-1]))
        finally:
            steady.end()
    if options.json is not None:
        options.json.write_text(json.dumps(rounds, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
