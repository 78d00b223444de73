"""The clients of a run, in a process of their own.

`python -m jepsen_like.live.load PLAN.json HISTORY` runs the workloads of the plan until standard
input ends, waits for what is under way, reads everything back, and says as its last line what came
of it. A line of counts is written every second meanwhile. Exit 0: the history is whole;
2: the cluster did not answer to the end; 3: a client is broken.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from jepsen_like.history_events import HistoryFile, Recorder
from jepsen_like.live.workloads.append import Appenders
from jepsen_like.live.workloads.base import (
    CRASHED,
    DELAYS,
    LAST_ANSWERS_S,
    READ_BACK_S,
    TRANSACTIONS,
    UNFINISHED,
    VIEWS,
    WORKLOADS,
    Around,
    Client,
    Plan,
)
from jepsen_like.live.workloads.delays import Delays
from jepsen_like.live.workloads.group import GroupMembers
from jepsen_like.live.workloads.poll import Pollers, read_to_end
from jepsen_like.live.workloads.registers import Registers
from jepsen_like.live.workloads.stable import look_back
from jepsen_like.live.workloads.topics import Topics, list_topics, new_admin
from jepsen_like.live.workloads.transactions import GROUPS, Transactions
from jepsen_like.live.workloads.views import Views

CLIENTS: Final[Mapping[str, Callable[[Around], Client]]] = {
    "append": Appenders,
    "poll": Pollers,
    "group": GroupMembers,
    "registers": Registers,
    "topics": Topics,
    TRANSACTIONS: Transactions,
    VIEWS: Views,
    DELAYS: Delays,
}
"""By name; `append` and `poll` are what the others rest on."""


assert tuple(CLIENTS) == WORKLOADS


def read_plan(path: Path) -> Plan:
    """Read what `write_plan` wrote."""
    told: dict[str, Any] = json.loads(path.read_text())
    return Plan(**{**told, "workloads": tuple(told["workloads"])})


def _tell(**counts: Any) -> None:
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()


def _wait_for_end_of_input(stop: threading.Event) -> None:
    sys.stdin.buffer.read()
    stop.set()


def run(plan: Plan, history: Path) -> int:
    """Run the workloads until told to stop; the exit code."""
    with HistoryFile(history) as file:
        recorder = Recorder(file, time.monotonic_ns, threading.Lock())
        around = Around(plan, recorder)
        crashes: list[str] = []

        def note_crash(crash: threading.ExceptHookArgs) -> None:
            crashes.append(f"{crash.thread}: {crash.exc_value!r}")
            threading.__excepthook__(crash)

        threading.excepthook = note_crash
        threading.Thread(target=_wait_for_end_of_input, args=(around.stop,), daemon=True).start()
        clients = [CLIENTS[name](around) for name in plan.workloads]
        for client in clients:
            client.start()
        while not around.stop.wait(1.0):
            _tell(acked=around.acked_records, polled=around.polled_records)
        patience = threading.Timer(LAST_ANSWERS_S, around.is_over.set)
        patience.start()
        unfinished = [
            name
            for name, client in zip(plan.workloads, clients, strict=True)
            if not client.join(LAST_ANSWERS_S + 10)
        ]
        patience.cancel()
        if unfinished:
            faulthandler.dump_traceback()  # to the load's log: what each of them waits for
        has_read = read_to_end(around, READ_BACK_S)
        if TRANSACTIONS in plan.workloads:
            has_read &= look_back(around, GROUPS, READ_BACK_S)
        for client in clients:
            if isinstance(client, Views | Delays):
                has_read &= client.look_back()
        has_read &= list_topics(around, around.process(), new_admin(plan.bootstrap), stale=False)
    _tell(
        acked=around.acked_records,
        polled=around.polled_records,
        unfinished=unfinished,
        has_read=has_read,
        fatal=around.fatal,
        hung=around.hung,
        unanswered=around.unanswered,
        refused=sorted(around.refused),
        crashes=crashes,
    )
    if crashes:
        return CRASHED
    return 0 if has_read and not unfinished else UNFINISHED


if __name__ == "__main__":
    sys.exit(run(read_plan(Path(sys.argv[1])), Path(sys.argv[2])))
