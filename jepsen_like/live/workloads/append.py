"""Append: idempotent producers under any faults.

Each process appends to one partition, an operation of several records at a time, and begins the
next when the outcome of all is known. No producer gives a record up: from then on librdkafka may
send what was under way twice (`message.timeout.ms`). Values are numbers, unique in a run.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from typing import Final

from attrs import define, field

from jepsen_like.history_events import OFFSET_UNKNOWN, Value
from jepsen_like.live.workloads.base import Around, join_all, parts_of, tagged
from jepsen_like.live.workloads.senders import Sender, senders

OPERATION_RECORDS_MAX: Final = 64
BACKLOG_S: Final = 20.0
"""What a stalled process makes up for afterwards."""
PROCESSES_MAX: Final = 256
PAUSE_S: Final = (0.05, 0.15)
TWO_WRITERS: Final = 2
"""So many partitions are written by two processes."""


@define(eq=False)
class _Sending:
    """An operation under way."""

    values: list[int]
    offsets: dict[int, int] = field(factory=dict)
    errors: set[str] = field(factory=set)
    done: threading.Event = field(factory=threading.Event)

    def settle(self, value: int, offset: int, error: str) -> None:
        """Note the outcome of one record."""
        self.offsets[value] = offset
        if error:
            self.errors.add(error)
        if len(self.offsets) == len(self.values):
            self.done.set()

    @property
    def records(self) -> list[tuple[int, Value]]:
        """What is known of each record."""
        return [(self.offsets.get(value, OFFSET_UNKNOWN), value) for value in self.values]


class Appenders:
    """All appending processes and their producers."""

    def __init__(self, around: Around) -> None:
        self._around = around
        self._senders = senders(around)
        keys = around.plan.keys
        keys += keys[:TWO_WRITERS]
        rate = around.plan.rate / len(keys)
        self._threads = [
            threading.Thread(target=self._run, args=(i, key, rate), name=f"append-{i}")
            for i, key in enumerate(keys)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until every record's outcome is known."""
        is_done = join_all(self._threads, timeout_s)
        for sender in self._senders:
            sender.close()
        return is_done

    def _run(self, number: int, key: str, rate: float) -> None:
        around = self._around
        process = around.process()
        sender = self._senders[number % len(self._senders)]
        rng = random.Random(around.plan.seed * 1000 + number)
        count, began = 0, time.monotonic()
        while not around.stop.wait(rng.uniform(*PAUSE_S)):
            now = time.monotonic()
            began = max(began, now - BACKLOG_S - count / rate)
            due = min(OPERATION_RECORDS_MAX, int((now - began) * rate) - count)
            if due > 0:
                values = [(count + i) * PROCESSES_MAX + number for i in range(due)]
                count += due
                self._append(process, sender, key, _Sending(values))

    def _append(self, process: int, sender: Sender, key: str, sending: _Sending) -> None:
        around = self._around
        topic, partition = parts_of(key)

        invoked = around.recorder.invoke(process, "append", records={key: sending.records})
        padding = b"." * around.plan.size
        for value in sending.values:
            data = (b"%d " % value + padding)[: around.plan.size]
            sender.send(topic, partition, data, partial(sending.settle, value), tagged(value))
        while not sending.done.wait(1.0):
            if around.is_over.is_set():
                around.recorder.info(
                    invoked, records={key: sending.records}, error="no answer to the end"
                )
                return
        if sending.errors:
            error = "; ".join(sorted(sending.errors))
            around.refused.add(f"{key}: {error}")
            around.recorder.info(invoked, records={key: sending.records}, error=error)
        else:
            around.acked_records += len(sending.values)
            around.recorder.ok(invoked, records={key: sending.records})


def number_in(data: bytes) -> int:
    """The number that a record carries."""
    return int(data.split(b" ", 1)[0])
