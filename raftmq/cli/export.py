"""`raftmq export TOPIC... --group G --to DIR`: topics to Parquet, exactly once; check and replay.

Only the command line: what is asked is read and refused here, how far it is and what came of it is
shown here. All else is `raftmq_spark.export`, which is loaded when the command runs, since pyarrow,
pyspark and Java are there only where `raftmq[spark]` was installed. docs/export.md tells the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import evolve

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bar,
    Bootstrap,
    CommandError,
    check_reachable,
    client_access,
    parse_pairs,
    progress_bar,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_USAGE, out

if TYPE_CHECKING:
    from raftmq_spark.export.engines import EngineRunner
    from raftmq_spark.export.job import Report
    from raftmq_spark.export.manifest import Manifest
    from raftmq_spark.export.replay import Replayed
    from raftmq_spark.export.verify import Verdict
    from raftmq_spark.security import ClientSettings

INSTALL = 'pip install "raftmq[export]"'


class Until(StrEnum):
    """`raftmq_spark.export.manifest.Until`, for --help without loading it."""

    STABLE = "stable"
    COMMITTED = "committed"


class Engine(StrEnum):
    """`raftmq_spark.export.engines.Engine`."""

    AUTO = "auto"
    ARROW = "arrow"
    SPARK = "spark"


class Compression(StrEnum):
    """Of Parquet files."""

    ZSTD = "zstd"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    GZIP = "gzip"
    NONE = "none"


Topics = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TOPIC",
        autocompletion=completion.topics,
        help="What to export; for --replay all without any.",
    ),
]
Group = Annotated[
    str | None,
    typer.Option(
        "-g",
        "--group",
        autocompletion=completion.groups,
        help="The group whose offsets say what is new.",
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        "--archive",
        metavar="DIR|s3://BUCKET/PREFIX|hdfs://HOST:PORT/DIR",
        help="The archive.",
    ),
]
UntilOption = Annotated[
    Until,
    typer.Option(
        help="stable: all that is committed, and commit the group's offsets. committed: what the"
        " group's consumers have committed, and commit nothing."
    ),
]
EngineOption = Annotated[
    Engine,
    typer.Option(help="arrow: in this process. spark: Spark's tasks. auto: arrow for little data."),
]
Master = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where Spark runs: local[N,FAILURES], spark://..., yarn."),
]
Conf = Annotated[
    list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="A setting of Spark's.")
]
RecordsPerFile = Annotated[int, typer.Option(min=1, help="Most records of a file, and of a task.")]
AcceptLoss = Annotated[
    bool, typer.Option("--accept-loss", help="Go on where retention was faster; note the gap.")
]
SkipToCommitted = Annotated[
    bool,
    typer.Option(
        "--skip-to-committed", help="Go on where the group is ahead of the archive; note the gap."
    ),
]
SkipUnreadable = Annotated[
    bool,
    typer.Option("--skip-unreadable", help="Go on behind batches that break their format; note."),
]
Verify = Annotated[bool, typer.Option("--verify", help="Check the archive; change nothing.")]
NoLog = Annotated[bool, typer.Option("--no-log", help="--verify: do not compare with the log.")]
Replay = Annotated[bool, typer.Option("--replay", help="Produce the archive back into topics.")]
Into = Annotated[
    str | None, typer.Option(metavar="NAME", help="--replay: another name for the one topic.")
]
Append = Annotated[
    bool, typer.Option("--append", help="--replay: also into a topic that has other records.")
]


def export(
    topics: Topics = None,
    to: To = "",
    group: Group = None,
    until: UntilOption = Until.STABLE,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    engine: EngineOption = Engine.AUTO,
    master: Master = None,
    conf: Conf = None,
    records_per_file: RecordsPerFile = 500_000,
    compression: Annotated[Compression, typer.Option(help="Of the files.")] = Compression.ZSTD,
    accept_loss: AcceptLoss = False,
    skip_to_committed: SkipToCommitted = False,
    skip_unreadable: SkipUnreadable = False,
    verify: Verify = False,
    no_log: NoLog = False,
    replay: Replay = False,
    into: Into = None,
    append: Append = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1.0)] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Export topics to Parquet exactly once; check an archive; produce one back.

    Run it again after a crash, or every hour: nothing is lost, nothing comes twice.

    Examples:

    raftmq export orders clicks --group archive --to /data/archive

    raftmq export orders -g archive --to s3://bucket/orders --master spark://host:7077

    raftmq export orders -g billing --until committed --to /data/billed

    raftmq export --to /data/archive --verify

    raftmq export orders --to /data/archive --replay --into orders-again
    """
    with reported(), _installed():
        names = tuple(topics or ())
        _check_words(names, to, group, verify=verify, replay=replay)
        _check_replay_words(replay, into, append)
        if engine is Engine.ARROW and (master or conf):
            raise CommandError("--master and --conf are Spark's, not --engine arrow's", EXIT_USAGE)
        from raftmq_spark.export.store import locate

        location = locate(to)
        client = _client(bootstrap, timeout)
        if verify:
            _verify(location, None if no_log else client, as_json=as_json)
            return
        if replay:
            _replay(location, client, names, into, append, as_json=as_json)
            return
        from raftmq_spark.export import engines, job, planning
        from raftmq_spark.export import manifest as manifests

        assert group is not None, "checked with the words"
        wishes = planning.Wishes(
            group=group,
            until=manifests.Until(until.value),
            accepts_loss=accept_loss,
            skips_to_committed=skip_to_committed,
            records_per_file=records_per_file,
        )
        order = job.Order(names, location, client, wishes, compression.value, skip_unreadable)
        kind, settings = engines.Engine(engine.value), parse_pairs(conf or (), "--conf")
        runner = engines.EngineRunner(kind, master, settings)
        _export(order, runner, as_json=as_json)


def _check_replay_words(replay: bool, into: str | None, append: bool) -> None:
    if not replay and (into is not None or append):
        raise CommandError("--into and --append belong to --replay", EXIT_USAGE)


def _check_words(
    names: tuple[str, ...], to: str, group: str | None, *, verify: bool, replay: bool
) -> None:
    if not to:
        raise CommandError("where is the archive? --to DIR, s3://... or hdfs://...", EXIT_USAGE)
    if verify and replay:
        raise CommandError("--verify and --replay are two commands; run one at a time", EXIT_USAGE)
    if verify and names:
        raise CommandError("--verify checks the whole archive and takes no topics", EXIT_USAGE)
    if (verify or replay) and group is not None:
        raise CommandError("--group belongs to exports: the archive knows its group", EXIT_USAGE)
    if not (verify or replay):
        if not names:
            raise CommandError("which topics? `raftmq export TOPIC... --group G --to DIR`", 2)
        if group is None:
            raise CommandError("--group: whose committed offsets say what is new?", EXIT_USAGE)


def _client(bootstrap: str, timeout_s: float) -> ClientSettings:
    from raftmq_spark.security import ClientSettings

    timeout_ms = int(timeout_s * 1000)
    return ClientSettings(bootstrap, "raftmq-cli", timeout_ms=timeout_ms, access=client_access())


@contextmanager
def _installed() -> Iterator[None]:
    """Say what to install where something is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        raise CommandError(
            f"raftmq export needs {missing}, which is not installed: {INSTALL}"
            ' (much data: "raftmq[spark]" and Java 17 or later)'
        ) from None


def _export(order: Any, runner: EngineRunner, *, as_json: bool) -> None:
    from raftmq_spark.export.job import export as run

    runner.check()
    check_reachable(order.client.bootstrap)
    with progress_bar("exporting", as_json) as bar:
        watcher = _watcher(bar)
        runner = evolve(runner, say=watcher.say)
        report = run(order, runner, watcher)
    _show_report(report, order, as_json=as_json)


def _watcher(bar: Bar) -> Any:
    from raftmq_spark.export.job import Progress, Step, Watcher

    class Shown(Watcher):
        """Shows steps and progress."""

        def reached(self, step: Step) -> None:
            bar.name(step.value)

        def progress(self, progress: Progress) -> None:
            bar.update(progress.tasks_done, progress.tasks, f"{progress.rows:,} rows")

        def say(self, text: str) -> None:
            bar.say(text)

    return Shown()


def _show_report(report: Report, order: Any, *, as_json: bool) -> None:
    manifest = report.manifest
    rows = [] if manifest is None else _summary(manifest)
    if as_json:
        show_json(
            {
                "archive": str(order.location),
                "group": order.wishes.group,
                "manifest": None if manifest is None else manifest.number,
                "rows": 0 if manifest is None else manifest.rows,
                "bytes": 0 if manifest is None else manifest.bytes,
                "partitions": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
                "finished_manifest": report.finished,
                "voided_runs": list(report.voided),
                "deleted_files": list(report.deleted),
            }
        )
        return
    if report.finished is not None:
        out(f"finished manifest {report.finished} of an earlier run: its offsets are committed")
    for run in report.voided:
        out(f"run {run} died before its manifest; {len(report.deleted)} files of it deleted")
    if manifest is None:
        out(f"nothing new for group {order.wishes.group}")
        return
    show(_COLUMNS, rows, as_json=False)
    out(
        f"manifest {manifest.number}: {manifest.rows:,} rows, {manifest.bytes:,} bytes in"
        f" {sum(1 for _ in manifest.files())} files at {order.location}"
    )


_COLUMNS = ("TOPIC", "PARTITION", "START", "END", "ROWS", "FILES", "BYTES", "GAP")


def _summary(manifest: Manifest) -> list[tuple[object, ...]]:
    """A line for each partition."""
    from raftmq_spark.export.manifest import ExportedRange, in_order

    found: dict[tuple[str, int], list[int]] = {}
    for item in in_order(manifest.ranges, manifest.gaps):
        line = found.setdefault((item.topic, item.partition), [item.start, item.end, 0, 0, 0, 0])
        line[0], line[1] = min(line[0], item.start), max(line[1], item.end)
        if isinstance(item, ExportedRange):
            line[2] += item.rows
            line[3] += len(item.files)
            line[4] += sum(file.bytes for file in item.files)
        else:
            line[5] += item.end - item.start
    return [(*key, *line) for key, line in sorted(found.items())]


def _verify(location: Any, client: Any, *, as_json: bool) -> None:
    from raftmq_spark.export.archive import find_archive
    from raftmq_spark.export.store import open_store
    from raftmq_spark.export.verify import verify

    if client is not None:
        check_reachable(client.bootstrap)
    archive = find_archive(open_store(location))
    with progress_bar("checking", as_json) as bar:
        verdict = verify(
            archive, client, progress=lambda done, of: bar.update(done, of, f"{done} files")
        )
    _show_verdict(verdict, location, compared=client is not None, as_json=as_json)
    if not verdict.is_good:
        raise typer.Exit(EXIT_FAILED)


def _show_verdict(verdict: Verdict, location: Any, *, compared: bool, as_json: bool) -> None:
    findings = [(item.kind.value, item.what, item.why) for item in verdict.findings]
    if as_json:
        show_json(
            {
                "archive": str(location),
                "ok": verdict.is_good,
                "manifests": verdict.manifests,
                "voided": verdict.voided,
                "files": verdict.files,
                "rows": verdict.rows,
                "bytes": verdict.bytes,
                "rows_compared_with_log": verdict.rows_in_log if compared else None,
                "findings": [
                    dict(zip(("kind", "what", "why"), row, strict=True)) for row in findings
                ],
                "notes": verdict.notes,
            }
        )
        return
    for text in verdict.notes:
        out(f"note: {text}")
    if findings:
        show(("FINDING", "WHAT", "WHY"), findings, as_json=False)
    log = f", {verdict.rows_in_log:,} rows equal in the log" if compared else ""
    word = "good" if verdict.is_good else f"{len(findings)} findings"
    out(
        f"{word}: {verdict.manifests} manifests, {verdict.files} files, {verdict.rows:,} rows,"
        f" {verdict.bytes:,} bytes read{log if verdict.is_good else ''}"
    )


def _replay(
    location: Any,
    client: Any,
    names: tuple[str, ...],
    into: str | None,
    append: bool,
    *,
    as_json: bool,
) -> None:
    from raftmq_spark.export.archive import find_archive
    from raftmq_spark.export.replay import ReplayWishes, replay
    from raftmq_spark.export.store import open_store

    check_reachable(client.bootstrap)
    archive = find_archive(open_store(location))
    wishes = ReplayWishes(names, into, append)
    with progress_bar("replaying", as_json) as bar:
        done: list[Replayed] = replay(
            archive, client, wishes, progress=lambda n, of: bar.update(n, of, f"{n:,} rows")
        )
    columns = ("TOPIC", "INTO", "PRODUCED", "THERE-BEFORE")
    rows = [(item.topic, item.into, item.rows, item.rows_before) for item in done]
    show(columns, rows, as_json=as_json)


def export_all(bootstrap: str, topic: str, group: str, to: str) -> int:
    """Export a topic and check the archive; how many rows it has.

    Raises:
        RaftmqError: something is missing or in the way, or the archive is not as the log.
    """
    from raftmq_spark.export import archive, engines, job, planning, store, verify
    from raftmq_spark.security import ClientSettings

    client = ClientSettings(bootstrap, "raftmq-cli")
    location = store.locate(to)
    order = job.Order((topic,), location, client, planning.Wishes(group))
    job.export(order, engines.EngineRunner())
    verdict = verify.verify(archive.find_archive(store.open_store(location)), client)
    if not verdict.is_good:
        finding = verdict.findings[0]
        raise CommandError(f"{finding.what}: {finding.kind.value}, {finding.why}")
    return verdict.rows
