"""Who writes the files of an export: this process by pyarrow, or Spark's tasks.

Both write the same ranges by the same function, so files and manifests are the same. The choice is
made when the plan is known: Spark takes seconds to start, and nothing new, little that is new, or
a wrong name should not wait for it. pyspark and Java are needed only where Spark is chosen.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final

from attrs import frozen

from raftmq_spark.export.job import Progress
from raftmq_spark.export.writer import RangeTask, Written, write_range

ARROW_OFFSETS_MAX: Final = 10_000_000
"""Up to so many new offsets `auto` does not start Spark.

On two busy cores pyarrow was faster by 2.4 times still at eight million records of 100 bytes, since
Spark's start took most of its time (docs/export.md). pyarrow needs 0.7 s of a core for a million
more: with many cores Spark catches up at about this number, with few later.
"""


class Engine(Enum):
    """What an export runs on."""

    AUTO = "auto"
    """pyarrow up to `ARROW_OFFSETS_MAX` new offsets, and where there is no Spark."""
    ARROW = "arrow"
    SPARK = "spark"


class ArrowRunner:
    """Writes ranges one after the other, in this process."""

    def write(self, task: RangeTask) -> Written:
        """One range; leaves nothing behind when it fails."""
        return write_range(task)

    def run(
        self, tasks: Sequence[RangeTask], progress: Callable[[Progress], None]
    ) -> list[Written]:
        """Write all ranges.

        Raises:
            DataLossError: records of one are not there any more.
            ReadError: one cannot be read.
            StoreError: one cannot be written.
        """
        written: list[Written] = []
        rows = 0
        progress(Progress(0, len(tasks), 0))
        for task in tasks:
            written.append(self.write(task))
            rows += written[-1].rows
            progress(Progress(len(written), len(tasks), rows))
        return written


@frozen
class EngineRunner:
    """Runs on what is asked for, or on what fits."""

    engine: Engine = Engine.AUTO
    master: str | None = None
    """Where Spark runs; naming it asks for Spark."""
    conf: Mapping[str, str] = {}
    say: Callable[[str], None] = lambda _text: None

    def check(self) -> None:
        """Make sure that what was asked for is installed, before anything begins.

        Raises:
            MissingPrerequisiteError: it is not; says what to install.
        """
        if self._asks_for_spark:
            from raftmq_spark.session import check_prerequisites

            check_prerequisites()

    def run(
        self, tasks: Sequence[RangeTask], progress: Callable[[Progress], None]
    ) -> list[Written]:
        """Write all ranges.

        Raises:
            DataLossError: records of one are not there any more.
            ExportError, ReadError, StoreError: one cannot be written.
        """
        if not self._takes_spark(tasks):
            return ArrowRunner().run(tasks, progress)
        from raftmq_spark.export.runner import MASTER, SparkRunner

        self.say("starting Spark")
        master = self.master or MASTER
        with SparkRunner(master, self.conf) as runner:
            return runner.run(tasks, progress)

    @property
    def _asks_for_spark(self) -> bool:
        is_named = self.master is not None or bool(self.conf)
        return self.engine is Engine.SPARK or (self.engine is Engine.AUTO and is_named)

    def _takes_spark(self, tasks: Sequence[RangeTask]) -> bool:
        if self.engine is not Engine.AUTO or self._asks_for_spark:
            return self._asks_for_spark
        return sum(task.part.size for task in tasks) > ARROW_OFFSETS_MAX and _has_spark()


def _has_spark() -> bool:
    from raftmq_spark.errors import MissingPrerequisiteError
    from raftmq_spark.session import check_prerequisites

    if importlib.util.find_spec("pyspark") is None:
        return False
    try:
        check_prerequisites()
    except MissingPrerequisiteError:
        return False
    return True
