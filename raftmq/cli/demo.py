"""`raftmq demo`: three nodes, a producer, kill -9 of the leader, and every record read back.

The last line is a contract: `acknowledged N, read N, lost 0, duplicates 0, failover M ms`. The exit
code is 1 unless every acknowledged record came back exactly once and in order. Nodes are forked
before any thread or rich exists in this process.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import define, field

from raftmq.cli.console import EXIT_INTERRUPTED, note, out, silence_client_log
from raftmq.cli.dev import Signals, a_number, start_cluster
from raftmq.cli.dev_cluster import DevCluster, DevError, free_ports
from raftmq.errors import RaftmqError

if TYPE_CHECKING:
    from raftmq_client.core.accumulator import Receipt

_EXAMPLES: Final = """\
examples:
  raftmq demo
  raftmq demo --records 600000
  raftmq demo --export /tmp/archive     Parquet, too; needs raftmq[export]

exit codes: 0 nothing was lost, 1 failed, 2 usage, 130 ended by Ctrl-C
"""
TOPIC: Final = "demo"
RECORDS: Final = 60_000
_PACE_S: Final = 0.004
_BURST: Final = 100
_VALUE: Final = b"%012d a record of the demo, long enough to be no toy, short enough to be quick"
_DELIVERY_MS: Final = 30_000.0
_PORT_TRIES: Final = 10
_ELECTION_S: Final = 10.0


def demo(arguments: Sequence[str]) -> int:
    """Tell the whole story; gives the exit code."""
    options = _parser().parse_args(list(arguments))
    try:
        if options.export is not None:
            _check_export()
    except RaftmqError as error:
        note(f"raftmq demo: {error}")
        return 1
    silence_client_log()
    signals = Signals()
    folder = Path(tempfile.mkdtemp(prefix="raftmq-demo-"))
    cluster: DevCluster | None = None
    begun = time.monotonic()
    try:
        cluster = _plan(folder, options.port)
        if not start_cluster(cluster, signals):
            return EXIT_INTERRUPTED
        _be_interruptible()
        return _Story(cluster, begun, options.records, options.plain, options.export).tell()
    except KeyboardInterrupt:
        note("raftmq demo: interrupted")
        return EXIT_INTERRUPTED
    except (DevError, RaftmqError, TimeoutError) as error:
        note(f"raftmq demo: {error}")
        return 1
    finally:
        if cluster is not None:
            cluster.close()
            cluster.stop()
        signals.close()
        shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raftmq demo",
        description="Three nodes on this machine, one of them killed under load, nothing lost.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--port", type=a_number(1, 65535), help="client port of the first node [free ones]")
    add("--records", type=a_number(1), default=RECORDS, help=f"how many [{RECORDS}]")
    add("--export", metavar="DIR", help="also export the records to Parquet")
    add("--plain", action="store_true", help="no colours, also on a terminal")
    return parser


def _check_export() -> None:
    """Raise what is missing for an export before anything is started."""
    if not _can_export():
        raise DevError('an export needs pyarrow: pip install "raftmq[export]"')


def _can_export() -> bool:
    """Whether an export could run here."""
    return importlib.util.find_spec("pyarrow") is not None


def _plan(folder: Path, port: int | None) -> DevCluster:
    """Three nodes on ports that are bound already: another process might take a free one."""
    for attempt in range(_PORT_TRIES):
        try:
            first = port or free_ports(3, start=random.randrange(20_000, 30_000))[0]
            cluster = DevCluster.plan(folder / str(attempt), nodes=3, port=first)
            cluster.bind()
        except DevError:
            if port is not None or attempt == _PORT_TRIES - 1:
                raise
        else:
            return cluster
    raise AssertionError("the last try returns or raises")


def _be_interruptible() -> None:
    """From here on Ctrl-C and SIGTERM are exceptions in this thread."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


@define
class _Acks:
    """Receipts in the order of sending, and when they were kept."""

    waiting: deque[tuple[int, Receipt]] = field(factory=deque)
    acknowledged: list[int] = field(factory=list)
    unknown: list[int] = field(factory=list)
    failed: list[int] = field(factory=list)
    gap_start: float = 0.0
    gap_s: float = 0.0
    last_at: float = 0.0

    def settle(self, *, watch_gap: bool) -> None:
        """Take what is settled off the queue; measure the longest silence while watched."""
        from raftmq_client.errors import Outcome

        now = time.monotonic()
        heard = False
        while self.waiting and self.waiting[0][1].is_done:
            number, receipt = self.waiting.popleft()
            if receipt.outcome is Outcome.OK:
                self.acknowledged.append(number)
                heard = True
            elif receipt.outcome is Outcome.UNKNOWN:
                self.unknown.append(number)
            else:
                self.failed.append(number)
        if heard:
            if watch_gap and self.last_at:
                self.gap_s = max(self.gap_s, now - self.last_at)
            self.last_at = now


class _Story:
    """The steps, told as they happen."""

    def __init__(
        self, cluster: DevCluster, begun: float, records: int, plain: bool, to: str | None
    ) -> None:
        self._cluster = cluster
        self._begun = begun
        self._records = records
        self._to = to
        self._console: Any = None
        if sys.stdout.isatty() and not plain:
            from rich.console import Console

            self._console = Console(highlight=False)

    def tell(self) -> int:
        """Run all steps; gives the exit code."""
        from raftmq_client.blocking.admin import Admin
        from raftmq_client.blocking.producer import Producer

        bootstrap = self._cluster.bootstrap
        self._say(f"three nodes are up: {bootstrap}", "green")
        with Admin(bootstrap, client_id="raftmq-demo") as admin:
            admin.create_topic(TOPIC, partitions=1, replication_factor=3)
            leader = self._leader(admin)
            self._say(f"topic {TOPIC!r}: one partition, three replicas, led by node {leader}")
            acks = _Acks()
            with Producer(
                bootstrap, delivery_timeout_ms=_DELIVERY_MS, client_id="raftmq-demo"
            ) as producer:
                third = self._records // 3
                self._send(producer, acks, 0, third, watch_gap=False)
                self._kill(leader, acks)
                self._send(producer, acks, third, self._records, watch_gap=True)
                while acks.waiting:  # the delivery timeout ends this at the latest
                    acks.settle(watch_gap=True)
                    time.sleep(_PACE_S / 2)
            leader = self._leader(admin)
            self._say(f"node {leader} leads now; {len(acks.acknowledged)} records acknowledged")
        read = self._read_back(bootstrap, acks)
        if self._to is not None:
            self._export(bootstrap, self._to)
        elif _can_export():
            self._say("`raftmq demo --export DIR` also exports them to Parquet, exactly once")
        return self._judge(acks, read)

    def _leader(self, admin: Any) -> int:
        """The node that leads the demo's partition, waited for while a first one is elected."""
        deadline = time.monotonic() + _ELECTION_S
        while (leader := int(admin.topic(TOPIC).partitions[0].leader)) < 0:
            if time.monotonic() > deadline:
                raise TimeoutError(f"topic {TOPIC!r} has no leader after {_ELECTION_S:.0f} s")
            time.sleep(_PACE_S)
        return leader

    def _send(self, producer: Any, acks: _Acks, start: int, end: int, *, watch_gap: bool) -> None:
        due = time.monotonic()
        for number in range(start, end):
            acks.waiting.append((number, producer.send(TOPIC, _VALUE % number)))
            if number % _BURST == 0:
                due += _PACE_S
                time.sleep(max(0.0, due - time.monotonic()))
                acks.settle(watch_gap=watch_gap)

    def _kill(self, leader: int, acks: _Acks) -> None:
        node = next(node for node in self._cluster.nodes if node.plan.id == leader)
        acks.settle(watch_gap=False)
        acks.last_at = time.monotonic()
        os.kill(node.pid, signal.SIGKILL)
        self._say(
            f"kill -9 {node.pid}: node {leader}, the leader, is gone; "
            f"{len(acks.acknowledged)} records acknowledged so far",
            "red",
        )

    def _read_back(self, bootstrap: str, acks: _Acks) -> list[int]:
        from raftmq.types import TopicPartition
        from raftmq_client.blocking.consumer import Consumer
        from raftmq_client.core.admin import LATEST

        key = TopicPartition(TOPIC, 0)
        read: list[int] = []
        with Consumer(bootstrap, client_id="raftmq-demo") as consumer:
            end = consumer.offsets([key], LATEST, timeout=20)[key].offset
            consumer.assign({key: 0})
            deadline = time.monotonic() + 20
            while (consumer.position(key) or 0) < end and time.monotonic() < deadline:
                read.extend(
                    int(record.value[:12])
                    for record in consumer.poll(1.0, 10_000)
                    if record.value is not None
                )
        self._say(f"read back {len(read)} records from the two nodes that are left")
        del acks
        return read

    def _export(self, bootstrap: str, to: str) -> None:
        """Every record to Parquet, with a node down, and the archive held against the log."""
        from raftmq.cli.export import export_all

        rows = export_all(bootstrap, TOPIC, "raftmq-demo-archive", to)
        self._say(f"exported {rows} rows to {to} and held them against the log: all equal", "green")
        self._say(f"check the files again with `raftmq export --to {to} --verify --no-log`")

    def _judge(self, acks: _Acks, read: list[int]) -> int:
        seen = set(read)
        lost = sum(number not in seen for number in acks.acknowledged)
        duplicates = len(read) - len(seen)
        in_order = read == sorted(read)
        failover_ms = round(acks.gap_s * 1000)
        if acks.unknown or acks.failed:
            self._say(f"{len(acks.unknown)} records unknown, {len(acks.failed)} failed", "yellow")
        if not in_order:
            self._say("records came back out of order", "red")
        is_good = (
            lost == 0
            and duplicates == 0
            and in_order
            and len(read) >= len(acks.acknowledged) >= min(self._records, 50_000)
        )
        self._say(
            "not one acknowledged record is missing" if is_good else "this must not happen",
            "green" if is_good else "red",
        )
        out(
            f"acknowledged {len(acks.acknowledged)}, read {len(read)}, lost {lost}, "
            f"duplicates {duplicates}, failover {failover_ms} ms"
        )
        return 0 if is_good else 1

    def _say(self, text: str, colour: str = "") -> None:
        at = f"{time.monotonic() - self._begun:6.2f} s"
        if self._console is None:
            out(f"{at}  {text}")
        else:
            style = f"bold {colour}" if colour else ""
            self._console.print(f"[dim]{at}[/dim]  ", end="")
            self._console.print(text, style=style or None, markup=False)
