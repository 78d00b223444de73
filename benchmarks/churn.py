"""Does a node grow for ever? `python -m benchmarks.churn [--minutes 15] [--json FILE]`.

Topics, groups, connections and producers come and go, several at a time: each round creates a
topic, sends to it with a new idempotent producer, reads it with a new group that commits, and
deletes group and topic. Prints the resident memory of each node over time. Exits 1 unless the
curve levels: in the last third of the run no node may grow by more than `--level` MiB a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

import confluent_kafka
from attrs import define, field
from confluent_kafka.admin import AdminClient, NewTopic

from raftmq.cli.console import out
from raftmq.testing import Cluster

WORKERS: Final = 4
RECORDS: Final = 20
SAMPLE_S: Final = 10.0
ANSWER_S: Final = 60.0


@define(slots=True)
class Curve:
    """Resident MiB of each node over the minutes of a run."""

    minutes: list[float] = field(factory=list)
    resident_mib: dict[int, list[float]] = field(factory=dict)

    def sample(self, minute: float, pids: dict[int, int]) -> None:
        """Look once."""
        self.minutes.append(minute)
        for node, pid in pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            mib = pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
            self.resident_mib.setdefault(node, []).append(mib)

    def slope(self, node: int, since: float) -> float:
        """MiB a minute from that minute on, by least squares."""
        mib = self.resident_mib[node]
        points = [(x, y) for x, y in zip(self.minutes, mib, strict=True) if x >= since]
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        together = sum((x - mean_x) * (y - mean_y) for x, y in points)
        return together / spread if spread else 0.0


class Churner:
    """One worker: a round after the other until told to stop."""

    def __init__(self, bootstrap: str, number: int, stop: threading.Event) -> None:
        self.rounds = 0
        self._bootstrap = bootstrap
        self._number = number
        self._stop = stop
        self.thread = threading.Thread(target=self._run, name=f"churn-{number}")

    def _run(self) -> None:
        while not self._stop.is_set():
            self._round(f"churn-{self._number}-{self.rounds}")
            self.rounds += 1

    def _round(self, name: str) -> None:
        where = {"bootstrap.servers": self._bootstrap, "client.id": name}
        admin = AdminClient(where)
        admin.create_topics([NewTopic(name, 2)])[name].result(ANSWER_S)
        producer = confluent_kafka.Producer({**where, "enable.idempotence": True, "linger.ms": 1})
        for i in range(RECORDS):
            producer.produce(name, b"%d" % i, partition=i % 2)
        if producer.flush(ANSWER_S):
            raise TimeoutError(f"{name}: not all records were acknowledged")
        consumer = confluent_kafka.Consumer(
            {**where, "group.id": name, "auto.offset.reset": "earliest"}
        )
        consumer.subscribe([name])
        deadline, count = time.monotonic() + ANSWER_S, 0
        while count < RECORDS:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: {count} of {RECORDS} records were read")
            message = consumer.poll(0.2)
            count += message is not None and message.error() is None
        consumer.commit(asynchronous=False)
        consumer.close()
        admin.delete_consumer_groups([name])[name].result(ANSWER_S)
        admin.delete_topics([name])[name].result(ANSWER_S)


def churn(minutes: float) -> tuple[Curve, int]:
    """Run against a cluster of three; the curve and the number of rounds."""
    curve, stop = Curve(), threading.Event()
    with Cluster() as cluster:
        pids = {node: cluster.node(node).pid for node in cluster.node_ids}
        workers = [Churner(cluster.bootstrap, i, stop) for i in range(WORKERS)]
        for worker in workers:
            worker.thread.start()
        began = time.monotonic()
        try:
            while (elapsed := (time.monotonic() - began) / 60) < minutes:
                curve.sample(elapsed, pids)
                told = " ".join(f"{mib[-1]:.1f}" for mib in curve.resident_mib.values())
                rounds = sum(worker.rounds for worker in workers)
                out(f"{elapsed:6.2f} min  {rounds:6} rounds  MiB {told}")
                if not all(worker.thread.is_alive() for worker in workers):
                    raise RuntimeError("a client gave up; its thread said why")
                stop.wait(SAMPLE_S)
        finally:
            stop.set()
            for worker in workers:
                worker.thread.join(2 * ANSWER_S)
    return curve, sum(worker.rounds for worker in workers)


def main(words: list[str]) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--level", type=float, default=0.2, help="MiB a minute that count as level")
    parser.add_argument("--json", type=Path, help="write the curve there")
    arguments = parser.parse_args(words)
    curve, rounds = churn(arguments.minutes)
    slopes = {node: curve.slope(node, arguments.minutes * 2 / 3) for node in curve.resident_mib}
    for node, mib in curve.resident_mib.items():
        out(f"node {node}: {mib[0]:.1f} to {mib[-1]:.1f} MiB, {slopes[node]:+.2f} a minute at last")
    if arguments.json:
        told = {"minutes": curve.minutes, "resident_mib": curve.resident_mib, "rounds": rounds}
        arguments.json.write_text(json.dumps(told))
    is_level = all(slope <= arguments.level for slope in slopes.values())
    out(f"{rounds} rounds; {'level' if is_level else 'still growing'}")
    return 0 if is_level else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
