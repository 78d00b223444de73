"""Writes ranges as a Spark job, one task each. The only module of exports that needs Spark.

Spark runs a range again where its task failed, or twice at once where it is slow; the one result
that it hands back names the files that count. Lost records are a result and no failure: trying
again would not bring them back. Stops before it loads anything where Java or pyspark is missing.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from attrs import frozen

from raftmq_spark.errors import DataLossError
from raftmq_spark.export.errors import ExportError
from raftmq_spark.export.job import Progress
from raftmq_spark.export.writer import RangeTask, Written, write_range
from raftmq_spark.session import check_prerequisites

MASTER: Final = "local[*,4]"
"""All cores of this machine; a task may fail three times before the export does."""
_POLL_S: Final = 0.2
LOG_BYTES_MAX: Final = 64 << 10


@frozen
class _Lost:
    """What a task gives for records that are gone."""

    message: str


def _run_task(task: RangeTask) -> Written | _Lost:
    try:
        return write_range(task)
    except DataLossError as error:
        return _Lost(str(error))


class SparkRunner:
    """A Spark session for exports: `with SparkRunner("local[2]") as runner: export(..., runner)`.

    A session that is there already is used and left running.
    """

    def __init__(self, master: str = MASTER, conf: Mapping[str, str] | None = None) -> None:
        self._master = master
        self._conf = dict(conf or {})
        self._spark: Any = None
        self._is_mine = False
        self.log = ""
        """What Java says goes to this file; removed at the end, but kept after a failure."""

    def __enter__(self) -> Self:
        check_prerequisites()
        from pyspark.sql import SparkSession

        if (active := SparkSession.getActiveSession()) is not None:
            self._spark = active
            return self
        # Workers run the same Python and find the same packages as this process.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = SparkSession.builder.master(self._master).appName("raftmq export")
        settings = {
            "spark.ui.showConsoleProgress": "false",
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.python.worker.reuse": "true",
            **_local_address(self._master),
            **self._conf,
        }
        for name, value in settings.items():
            builder = builder.config(name, value)
        try:
            self._start_java(settings)
            self._spark = builder.getOrCreate()
        except Exception as error:
            told = self._with_log(self._said_by_java() or told_by(error))
            raise ExportError(f"Spark does not start at {self._master}: {told}") from error
        self._is_mine = True
        return self

    def _start_java(self, settings: Mapping[str, str]) -> None:
        """Start the JVM, with its words in a file: they would go through a bar on the terminal.

        One that runs already, or was given from outside, has its output where it began.
        """
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway

        if SparkContext._gateway is not None or "PYSPARK_GATEWAY_PORT" in os.environ:
            return
        conf = SparkConf(loadDefaults=False)
        for name, value in {"spark.master": self._master, **settings}.items():
            conf.set(name, value)
        handle, self.log = tempfile.mkstemp(prefix="raftmq-export-", suffix=".log")
        with open(handle, "wb") as log:
            gateway = launch_gateway(conf, {"stdout": log, "stderr": log})
        SparkContext._ensure_initialized(gateway=gateway)

    def _said_by_java(self) -> str:
        """Why there is no JVM, in its own words; "" where it said nothing of the kind."""
        if not self.log:
            return ""
        with open(self.log, errors="replace") as log:
            text = log.read(LOG_BYTES_MAX)
        found = re.search(r"(?:\w+\.)*(\w+(?:Error|Exception): .+)", text)
        return found[1].strip() if found else ""

    def _with_log(self, told: str) -> str:
        """A failure, with the file that has the whole story of Java's side."""
        return f"{told} (log: {self.log})" if self.log else told

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        spark, self._spark = self._spark, None
        if self._is_mine:
            spark.stop()
        if self.log and kind is None:
            os.unlink(self.log)

    def run(
        self, tasks: Sequence[RangeTask], progress: Callable[[Progress], None]
    ) -> list[Written]:
        """Write all ranges.

        Raises:
            DataLossError: records of one are not there any more.
            ExportError: a task failed as often as the master allows, or was cancelled.
        """
        context = self._spark.sparkContext
        job = _Job(context, tasks)
        try:
            while not job.is_over(_POLL_S):
                progress(job.progress())
        except BaseException:
            context.cancelJobGroup(job.group)
            job.is_over(None)
            raise
        try:
            results = job.results()
        except ExportError as error:
            raise ExportError(self._with_log(str(error))) from error
        for result in results:
            if isinstance(result, _Lost):
                raise DataLossError(result.message)
        ranges = [result for result in results if isinstance(result, Written)]
        progress(Progress(len(tasks), len(tasks), sum(item.rows for item in ranges)))
        return ranges


class _Job:
    """One Spark job, run by a thread so that others can watch it."""

    def __init__(self, context: Any, tasks: Sequence[RangeTask]) -> None:
        from pyspark import InheritableThread

        self.group = f"raftmq-export-{secrets.token_hex(4)}"
        self._context = context
        self._tasks = tasks
        self._rows = context.accumulator(0)
        self._results: list[Written | _Lost] = []
        self._error: BaseException | None = None
        self._is_over = threading.Event()
        InheritableThread(target=self._run, daemon=True).start()

    def is_over(self, timeout_s: float | None) -> bool:
        """Wait for the end for a while; None waits until it comes."""
        return self._is_over.wait(timeout_s)

    def results(self) -> list[Written | _Lost]:
        """What the tasks gave.

        Raises:
            ExportError: one failed for good.
        """
        if self._error is not None:
            raise ExportError(f"writing failed: {told_by(self._error)}") from self._error
        return self._results

    def progress(self) -> Progress:
        """How far it is."""
        tracker = self._context.statusTracker()
        done = 0
        for job in tracker.getJobIdsForGroup(self.group):
            info = tracker.getJobInfo(job)
            for stage in info.stageIds if info is not None else ():
                stage_info = tracker.getStageInfo(stage)
                done += stage_info.numCompletedTasks if stage_info is not None else 0
        return Progress(done, len(self._tasks), int(self._rows.value))

    def _run(self) -> None:
        context, rows = self._context, self._rows

        def work(task: RangeTask) -> Written | _Lost:
            result = _run_task(task)
            rows.add(0 if isinstance(result, _Lost) else result.rows)
            return result

        try:
            context.setJobGroup(self.group, "raftmq export", interruptOnCancel=True)
            slices = context.parallelize(self._tasks, len(self._tasks))
            self._results = slices.map(work).collect()
        except BaseException as error:  # noqa: BLE001 - told by results() in the caller's thread
            self._error = error
        finally:
            self._is_over.set()


def told_by(error: BaseException) -> str:
    """What went wrong within Spark, in one line: the Python error below it, if there is one."""
    text = str(error)
    found = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception)): (.+)$", text, re.MULTILINE)
    if found:
        kind, told = found[0]
        python = [item for item in found if item[0].endswith("Error")]
        kind, told = python[0] if python else (kind, told)
        return f"{kind}: {told.strip()}"
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _local_address(master: str) -> dict[str, str]:
    """A local Spark needs no address but this machine's own."""
    if not master.startswith("local"):
        return {}
    return {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1"}
