"""Offset commits: `python -m benchmarks.commits [--json FILE]`.

Three loads on a cluster of its own: 100 consumers of ten groups that commit each 100 ms, 1,000
groups that commit each second, and 100 consumers that commit as fast as they are answered. Prints
commits per second, latency, and the CPU of the three nodes per thousand commits.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any, Final

from attrs import define, field
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.dev_run import Asker, DevRun
from benchmarks.stats import percentile
from benchmarks.wire import Line, Loop
from raftmq.cli.console import out
from raftmq.protocol import ApiKey, Struct, encode_request, encode_request_header

TOPIC: Final = "commits"
VERSION: Final = 7
PARTITIONS: Final = 6


def commit_frame(group: str, partition: int) -> bytes:
    """A whole OffsetCommit of a consumer outside of group management."""
    row = Struct(
        partition_index=partition,
        committed_offset=1,
        committed_leader_epoch=-1,
        committed_metadata="",
    )
    body = encode_request(
        ApiKey.OFFSET_COMMIT,
        VERSION,
        Struct(
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=[Struct(name=TOPIC, partitions=[row])],
        ),
    )
    head = encode_request_header(ApiKey.OFFSET_COMMIT, VERSION, 1, "bench")
    return struct.pack(">i", len(head) + len(body)) + head + body


def coordinators(run: DevRun, groups: list[str]) -> dict[str, tuple[str, int]]:
    """Where each group's coordinator listens."""
    row = run.rows[0]
    asker = Asker(row["host"], row["port"])
    found = {}
    for group in groups:
        answer = asker.ask(ApiKey.FIND_COORDINATOR, 2, Struct(key=group, key_type=0))
        found[group] = (answer.host, answer.port)
    asker.close()
    return found


@define
class Committers:
    """Lines that commit in turn for the groups that they carry."""

    loop: Loop
    interval_s: float
    started: float = 0.0
    latencies_ms: list[float] = field(factory=list)
    errors: int = 0
    must_end: bool = False

    def add(self, address: tuple[str, int], frames: list[bytes], phase: float) -> None:
        """One connection; with an interval of 0 it commits again as soon as it was answered."""
        state = {"due": time.perf_counter() + phase * self.interval_s, "next": 0}
        step_s = self.interval_s / len(frames)

        def send() -> None:
            if not self.must_end:
                index = int(state["next"])
                state["next"] = (index + 1) % len(frames)
                line.send(frames[index])

        def answered(line: Line, answer: bytes) -> None:
            now = time.perf_counter()
            self.latencies_ms.append(1e3 * (now - line.sent_at))
            self.errors += answer[-2:] != b"\0\0"
            if not self.interval_s:
                send()
                return
            state["due"] = max(state["due"] + step_s, now)
            self.loop.at(state["due"], send)

        line = self.loop.connect(address, answered)
        self.loop.at(state["due"], send)


def measure(
    run: DevRun, name: str, *, groups: int, lines: int, interval_s: float, seconds: float
) -> dict[str, Any]:
    """One load; the first seconds, in which groups are claimed, do not count."""
    names = [f"{name}-{i}" for i in range(groups)]
    where = coordinators(run, names)
    by_address: dict[tuple[str, int], list[str]] = {}
    for group in names:
        by_address.setdefault(where[group], []).append(group)
    with Loop() as loop:
        committers = Committers(loop, interval_s)
        carried = lines // len(by_address)
        for address, mine in by_address.items():
            for i in range(carried):
                share = mine[i::carried] or [mine[i % len(mine)]]
                frames = [commit_frame(group, i % PARTITIONS) for group in share]
                committers.add(address, frames, i / carried)
        loop.run_until(time.perf_counter() + 3)
        committers.latencies_ms.clear()
        committers.errors = 0
        cpu_s, started = run.cpu_s(), time.perf_counter()
        loop.run_until(started + seconds)
        took_s, cpu_s = time.perf_counter() - started, run.cpu_s() - cpu_s
        committers.must_end = True
    count = len(committers.latencies_ms)
    return {
        "load": name,
        "commits_per_s": round(count / took_s),
        "p50_ms": round(percentile(committers.latencies_ms, 0.5), 2),
        "p99_ms": round(percentile(committers.latencies_ms, 0.99), 2),
        "errors": committers.errors,
        "cpu_cores": round(cpu_s / took_s, 2),
        "cpu_ms_per_1000": round(1e6 * cpu_s / max(1, count)),
    }


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loads = (
        ("consumers", {"groups": 10, "lines": 100, "interval_s": 0.1}),
        ("groups", {"groups": 1000, "lines": 100, "interval_s": 1.0}),
        ("fastest", {"groups": 100, "lines": 100, "interval_s": 0.0}),
    )
    rows: list[dict[str, Any]] = []
    with DevRun() as run:
        admin = AdminClient({"bootstrap.servers": run.bootstrap})
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 3)])[TOPIC].result(30)
        idle_s, started = run.cpu_s(), time.perf_counter()
        time.sleep(2)
        idle = (run.cpu_s() - idle_s) / (time.perf_counter() - started)
        for name, load in loads:
            rows.append(measure(run, name, seconds=options.seconds, **load))  # type: ignore[arg-type]
            out(str(rows[-1]))
        idle_s, started = run.cpu_s(), time.perf_counter()
        time.sleep(5)
        loaded = (run.cpu_s() - idle_s) / (time.perf_counter() - started)
    result = {
        "loads": rows,
        "idle_cores": round(idle, 3),
        "idle_cores_with_1000_groups": round(loaded, 3),
    }
    out(json.dumps(result, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    return int(any(row["errors"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
