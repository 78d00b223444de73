"""Exactly-once export of topics to Parquet, its check and its replay (docs/export.md).

    from raftmq_spark.export import export_topics

    report = export_topics("orders", group="archive", to="/data/archive")

`manifest.py` says what counts, `store.py` where it lies, `archive.py` joins the two; `lease.py`
keeps a group to one export, `writer.py` writes a range, `job.py` leads a run, `engines.py` says on
what; `verify.py` and `replay.py` read it all back. pyarrow is needed by all of it, pyspark and Java
by `runner.py` alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raftmq_spark.export.job import Report, Watcher
    from raftmq_spark.security import ClientSettings


def export_topics(
    topics: str | Iterable[str],
    *,
    group: str,
    to: str,
    bootstrap: str | ClientSettings = "127.0.0.1:9092",
    engine: str = "auto",
    until: str = "stable",
    compression: str = "zstd",
    records_per_file: int = 500_000,
    accept_loss: bool = False,
    skip_to_committed: bool = False,
    skip_unreadable: bool = False,
    watcher: Watcher | None = None,
) -> Report:
    """Export what is new, exactly once; as `raftmq export`, whose options these are.

    Args:
        bootstrap: the cluster, or settings that say more of it (TLS, SASL, timeouts).
        engine: `arrow` writes in this process, `spark` in Spark's tasks (a session that is active
            is used), `auto` in this process where that is sooner.
        watcher: is told how far it is.

    Raises:
        BusyError: another export has the group.
        LostRecordsError: retention took records first.
        ArchiveError: archive, group and log contradict each other.
        RaftmqError: something else is in the way; nothing of this run counts.
    """
    from raftmq_spark.export import engines, job, manifest, planning, store
    from raftmq_spark.security import ClientSettings

    client = bootstrap if isinstance(bootstrap, ClientSettings) else ClientSettings(bootstrap)
    wishes = planning.Wishes(
        group=group,
        until=manifest.Until(until),
        accepts_loss=accept_loss,
        skips_to_committed=skip_to_committed,
        records_per_file=records_per_file,
    )
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    runner = engines.EngineRunner(engines.Engine(engine))
    runner.check()
    location = store.locate(to)
    order = job.Order(names, location, client, wishes, compression, skip_unreadable)
    return job.export(order, runner, watcher)
