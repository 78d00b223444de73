"""An export in a process of its own that dies, by SIGKILL, when a step is reached.

    python crash_driver.py BOOTSTRAP DIR GROUP TOPIC STEP [MASTER]

STEP is a name of `Step`, `TASK` to die before the second range is written, or `NONE`. With a MASTER
a real Spark writes the files, and there is no `TASK`.
"""

from __future__ import annotations

import os
import signal
import sys

from raftmq_spark.export.job import Step, Watcher, export
from raftmq_spark.export.runner import SparkRunner
from tests.export.inline import make_order, run_export


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(Watcher):
    """Kills this process at a step."""

    def __init__(self, step: str) -> None:
        self._step = step

    def reached(self, step: Step) -> None:
        if step.name == self._step:
            die()


def main(bootstrap: str, to: str, group: str, topic: str, step: str, master: str = "") -> None:
    order = make_order(bootstrap, to, group, topic, records_per_file=700)
    if master:
        with SparkRunner(master) as runner:
            export(order, runner, Killer(step))
        return
    dies_at_task = 1 if step == "TASK" else -1
    run_export(
        order,
        Killer(step),
        before_task=lambda number: die() if number == dies_at_task else None,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
