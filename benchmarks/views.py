"""One tag of many: `python -m benchmarks.views [--records N] [--share S] [--json FILE]`.

A topic of a local cluster holds records of which a share has a certain tag, in batches of one tag
or mixed with others. A stock consumer reads those by a view, and another one reads everything and
filters. Compared are bytes on the wire, the consumer's CPU, the brokers' CPU and the time; told as
well is what it cost to make the index of the view. Exit 1: more than what is wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.dev_run import Asker, DevRun, polling
from raftmq.cli.console import out
from raftmq.records import NewRecord, build_batch

TAG: Final = b"refund"
OTHERS: Final = (b"order", b"payment", b"shipment", b"invoice")
BATCH_RECORDS: Final = 1_000
DIFFERENT: Final = 100
"""So many batches are made, and sent in turn."""
LAYOUTS: Final = ("one tag", "mixed")
WANTED: Final = {
    "one tag": {"bytes": 0.02, "consumer_cpu": 0.1, "seconds": 0.3},
    "mixed": {"bytes": 0.05, "consumer_cpu": 0.1, "seconds": 1.0},
}
"""By the view, at most so much of what reading everything takes."""
STATISTICS_MS: Final = 200
FILL_S: Final = 1_800.0
SILENT_S: Final = 60.0


# ---- one consumer, in a process of its own ----


def consume(bootstrap: str, topic: str, partitions: int, wanted: int) -> dict[str, float]:
    """Read so many records, and count those with the tag; what that took."""
    received = [0, 0]  # bytes, and how often it was told

    def told(text: str) -> None:
        received[0] = int(json.loads(text)["rx_bytes"])
        received[1] += 1

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "one-of-many",
            "enable.auto.commit": False,
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": told,
        }
    )
    began, cpu = time.monotonic(), time.process_time()
    consumer.assign([confluent_kafka.TopicPartition(topic, n, 0) for n in range(partitions)])
    seen = read = 0
    last = began
    while read < wanted:
        messages = consumer.consume(1_000, 0.05)
        now = time.monotonic()
        last = now if messages else last
        if now > last + SILENT_S:
            raise TimeoutError(f"{read} of {wanted} came from {topic}")
        for message in messages:
            if message.error() is None:
                read += 1
                seen += dict(message.headers() or ()).get("tag") == TAG
    took, used = time.monotonic() - began, time.process_time() - cpu
    count = received[1]
    while received[1] < count + 2:  # of which the second began when all was there
        consumer.poll(0.1)
    consumer.close()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {
        "seconds": took,
        "consumer_cpu": used,
        "bytes": received[0],
        "read": read,
        "matches": seen,
        "rss_mib": peak_mib,
    }


def consume_apart(
    run: DevRun, topic: str, wanted: int, options: argparse.Namespace
) -> dict[str, float]:
    """The same in another process, with what the brokers used meanwhile."""
    words = [run.bootstrap, topic, str(options.partitions), str(wanted)]
    before = run.cpu_s()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.views", "--consume", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    figures: dict[str, float] = json.loads(done.stdout)
    if figures["matches"] != matches_of(options):
        raise RuntimeError(f"{topic}: {figures['matches']} matches, not {matches_of(options)}")
    return {**figures, "broker_cpu": run.cpu_s() - before}


# ---- what it reads ----


def matches_of(options: argparse.Namespace) -> int:
    """How many records have the tag: as many in each round of batches."""
    rounds = options.records // (BATCH_RECORDS * DIFFERENT)
    return int(rounds * round(options.share * DIFFERENT * BATCH_RECORDS))


def batches(layout: str, options: argparse.Namespace) -> list[bytes]:
    """The batches of one round."""
    chance = random.Random(options.seed)
    count = round(options.share * DIFFERENT * BATCH_RECORDS)
    places = set(range(count))
    if layout == "mixed":
        places = set(chance.sample(range(DIFFERENT * BATCH_RECORDS), count))
    made = []
    for number in range(DIFFERENT):
        records = []
        for at in range(number * BATCH_RECORDS, (number + 1) * BATCH_RECORDS):
            tag = TAG if at in places else chance.choice(OTHERS)
            records.append(
                NewRecord(b"%d" % at, chance.randbytes(options.size), headers=[("tag", tag)])
            )
        made.append(bytes(build_batch(records, timestamp=int(time.time() * 1e3))))
    return made


def produce(run: DevRun, topic: str, layout: str, options: argparse.Namespace) -> float:
    """Fill the topic; how long that took."""
    made = batches(layout, options)
    rounds = options.records // (BATCH_RECORDS * DIFFERENT)
    leaders = _leaders(run, topic)
    askers = {node: Asker(*_address(run, node)) for node in set(leaders.values())}
    began = time.monotonic()
    for number in range(rounds):
        for at, batch in enumerate(made):
            partition = (number + at) % options.partitions
            answer = askers[leaders[partition]].produce(topic, partition, batch)
            if code := answer.topics[0].partitions[0].error_code:
                raise RuntimeError(f"{topic}-{partition}: not taken, error {code}")
    for asker in askers.values():
        asker.close()
    return time.monotonic() - began


def _address(run: DevRun, node: int) -> tuple[str, int]:
    row = run.node(node)
    return str(row["host"]), int(row["port"])


def _leaders(run: DevRun, topic: str) -> dict[int, int]:
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    parts = admin.list_topics(topic, timeout=30).topics[topic].partitions
    return {number: part.leader for number, part in parts.items()}


def make_view(run: DevRun, view: str, topic: str) -> dict[str, float]:
    """Make the view, and wait until every replica has examined all; what that cost."""
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    where = {"raftmq.view.of": topic, "raftmq.view.where": f"tag = '{TAG.decode()}'"}
    began, cpu = time.monotonic(), run.cpu_s()
    admin.create_topics([NewTopic(view, -1, -1, config=where)])[view].result(60)
    nodes = [int(row["id"]) for row in run.rows]
    for _ in polling(FILL_S, f"{view} filled", 0.2):
        rows = [row for node in nodes for row in run.status(node)["views"] if row["view"] == view]
        if rows and not any(row["lacks_bytes"] for row in rows):
            break
    return {"seconds": time.monotonic() - began, "broker_cpu": run.cpu_s() - cpu}


# ---- the comparison ----


def compare(run: DevRun, layout: str, options: argparse.Namespace) -> dict[str, Any]:
    """One layout: everything, then the view twice, as the first reader has mixed batches made."""
    topic = f"events-{layout.replace(' ', '-')}"
    view = f"refunds-{layout.replace(' ', '-')}"
    admin = AdminClient({"bootstrap.servers": run.bootstrap})
    replicas = min(3, run.nodes)
    admin.create_topics([NewTopic(topic, options.partitions, replicas)])[topic].result(60)
    took_s = produce(run, topic, layout, options)
    out(f"{layout}: {options.records} records in {took_s:.0f} s")
    index = make_view(run, view, topic)
    out(f"{layout}: index after {index['seconds']:.1f} s, {index['broker_cpu']:.1f} s of CPU")
    matches = matches_of(options)
    figures = {
        "everything": consume_apart(run, topic, options.records, options),
        "view": consume_apart(run, view, matches, options),
        "view again": consume_apart(run, view, matches, options),
    }
    everything, by_view = figures["everything"], figures["view"]
    ratios = {
        name: round(by_view[name] / everything[name], 4)
        for name in ("bytes", "consumer_cpu", "seconds", "broker_cpu")
    }
    admin.delete_topics([topic])[topic].result(60)
    rounded = {
        name: {key: round(value, 3) for key, value in row.items()} for name, row in figures.items()
    }
    index = {key: round(value, 1) for key, value in index.items()}
    return {"layout": layout, "index": index, "ratios": ratios, **rounded}


def main() -> int:
    """Run it; 1 when a view costs more than what is wanted."""
    if sys.argv[1:2] == ["--consume"]:
        bootstrap, topic, partitions, wanted = sys.argv[2:]
        out(json.dumps(consume(bootstrap, topic, int(partitions), int(wanted))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--share", type=float, default=0.01, help="of them with the tag")
    parser.add_argument("--size", type=int, default=100, help="bytes of a value")
    parser.add_argument("--nodes", type=int, choices=(1, 3), default=1)
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--layout", choices=LAYOUTS, action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.records % (BATCH_RECORDS * DIFFERENT):
        parser.error(f"--records has to be a multiple of {BATCH_RECORDS * DIFFERENT}")
    rows, loads = [], [os.getloadavg()[0]]
    with DevRun(nodes=options.nodes) as run:
        for layout in options.layout or LAYOUTS:
            rows.append(compare(run, layout, options))
            loads.append(os.getloadavg()[0])
    result = {
        "records": options.records,
        "share": options.share,
        "bytes": options.size,
        "nodes": options.nodes,
        "partitions": options.partitions,
        "load": [round(load, 1) for load in loads],
        "layouts": rows,
    }
    text = json.dumps(result, indent=1)
    for line in text.splitlines():
        out(line)
    if options.json is not None:
        options.json.write_text(text + "\n")
    over = [
        f"{row['layout']}: {name} {row['ratios'][name]:.3f}, wanted at most {limit}"
        for row in rows
        for name, limit in WANTED[row["layout"]].items()
        if row["ratios"][name] > limit
    ]
    for line in over:
        out(line)
    out("too much" if over else "as wanted")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
