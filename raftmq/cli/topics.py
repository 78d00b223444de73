"""`raftmq topic ...`: create, look at, change and delete topics. `raftmq view ...`: views of them.

Columns and settings have Kafka's names. Changes whose answer was lost end with 3, not with a second
try: creating and deleting twice is not the same as once. What becomes of partitions that a topic
lists no more is the cluster's work, as is the index of a view; `describe` shows how far it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer

from raftmq.cli import completion
from raftmq.cli.admin_port import AdminPort, open_admin_port
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    format_time,
    known_offsets,
    open_admin,
    parse_pairs,
    raise_failures,
    reported,
    show,
    show_json,
)
from raftmq.cli.configs import nearest
from raftmq.cli.console import EXIT_FAILED, EXIT_UNKNOWN, EXIT_USAGE, out
from raftmq.errors import ErrorCode
from raftmq.metadata.config_keys import DEAD_TO, DELIVERS_TO, RETRY_ATTEMPTS
from raftmq.types import VIEW_SUFFIX, TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import (
    EARLIEST,
    LATEST,
    VIEW_OF,
    VIEW_WHERE,
    ConfigEntry,
    ResourceType,
    ViewInfo,
)
from raftmq_client.core.metadata import TopicInfo
from raftmq_client.errors import BrokerError, ClientError, ConnectionFailedError

topic_app = typer.Typer(help="Topics.", no_args_is_help=True)
view_app = typer.Typer(
    help="Views: the records of a topic that meet a condition.", no_args_is_help=True
)

Name = Annotated[
    str, typer.Argument(metavar="TOPIC", autocompletion=completion.topics, help="The topic's name.")
]
Configs = Annotated[
    list[str] | None,
    typer.Option("-c", "--config", metavar="KEY=VALUE", help="A setting; repeatable."),
]
DeadTo = Annotated[
    str | None,
    typer.Option(
        "--dead-to",
        metavar="TOPIC",
        autocompletion=completion.topics,
        help="Of a delay topic: what it cannot deliver comes to TOPIC after a day.",
    ),
]


@topic_app.command()
def create(
    name: Name,
    partitions: Annotated[
        int, typer.Option("-p", "--partitions", help="How many; -1: the cluster's default.")
    ] = -1,
    replication_factor: Annotated[
        int, typer.Option("-r", "--replication-factor", help="Copies; -1: the cluster's default.")
    ] = -1,
    config: Configs = None,
    delivers_to: Annotated[
        str | None,
        typer.Option(
            "--delivers-to",
            metavar="TOPIC",
            autocompletion=completion.topics,
            help="Make a delay topic: its records come to TOPIC when they are due.",
        ),
    ] = None,
    dead_to: DeadTo = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="An existing topic is no error.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Only say whether it could be created.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Create a topic.

    Examples: raftmq topic create orders -p 6 -r 3 -c retention.ms=86400000
              raftmq topic create orders.later --delivers-to orders
              raftmq topic create o.later --delivers-to o --dead-to o.dead
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        settings = parse_pairs(config or (), "--config")
        if delivers_to is not None:
            settings[DELIVERS_TO] = delivers_to
        if dead_to is not None:
            settings = {RETRY_ATTEMPTS: "0", **settings, DEAD_TO: dead_to}
        try:
            created = admin.create_topic(
                name,
                partitions,
                replication_factor,
                settings,
                validate_only=validate_only,
            )
        except BrokerError as error:
            if if_not_exists and error.code is ErrorCode.TOPIC_ALREADY_EXISTS:
                _tell_present(admin.topic(name), as_json)
                return
            raise
        if as_json:
            counts = created.partitions, created.replication_factor
            _show_counts(created.name, created.topic_id, *counts)
            return
        verb = "could be created" if validate_only else "created"
        told = ""
        if created.partitions > 0:  # told from CreateTopics v5 on
            copies = created.replication_factor
            told = f": {created.partitions} partitions, replication factor {copies}"
        out(f"topic {name} {verb}{told}")


def _tell_present(topic: TopicInfo, as_json: bool) -> None:
    partitions, copies = len(topic.partitions), _replication_factor(topic)
    if as_json:
        _show_counts(topic.name, topic.topic_id, partitions, copies)
    else:
        out(f"topic {topic.name} is there: {partitions} partitions, replication factor {copies}")


def _show_counts(name: str, topic_id: object, partitions: int, copies: int) -> None:
    show_json(
        {
            "Topic": name,
            "TopicId": topic_id,
            "PartitionCount": partitions,
            "ReplicationFactor": copies,
        }
    )


@topic_app.command("list")
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Internal topics too.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List topics.

    Examples: raftmq topic list --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        topics = [topic for topic in admin.cluster().topics if internal or not topic.is_internal]
        rows = [
            (topic.name, len(topic.partitions), _replication_factor(topic))
            for topic in sorted(topics, key=lambda item: item.name)
        ]
        show(("Topic", "PartitionCount", "ReplicationFactor"), rows, as_json=as_json)


@topic_app.command()
def describe(
    name: Name,
    configs: Annotated[bool, typer.Option("--configs", help="Show every setting.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show a topic's partitions, their leaders, replicas and offsets.

    Examples: raftmq topic describe orders --configs
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        topic = admin.topic(name)
        settings = admin.describe_configs(ResourceType.TOPIC, name)
        rows = _partition_rows(admin, topic)
        retired = _find_states(admin, name, timeout)
        is_delay_topic = any(entry.name == DELIVERS_TO and entry.value for entry in settings)
        delays = _find_delays(admin, name, timeout) if is_delay_topic else None
        views = [view.name for view in admin.views(name)]
        if as_json:
            found = _as_json(topic, settings, rows)
            show_json({**found, "Retired": retired, "Delays": delays, "Views": views})
            return
        changed = [f"{s.name}={s.value}" for s in settings if s.source == "DYNAMIC_TOPIC_CONFIG"]
        out(f"Topic: {topic.name}  TopicId: {topic.topic_id or '-'}")
        out(
            f"PartitionCount: {len(topic.partitions)}  "
            f"ReplicationFactor: {_replication_factor(topic)}  Configs: {','.join(changed) or '-'}"
        )
        if views:
            out(f"Views: {', '.join(views)}")
        show(PARTITION_COLUMNS, rows, as_json=False)
        if retired is not None:
            out("")
            _show_states(retired)
        if delays is not None:
            out("")
            show(DELAY_COLUMNS, [_delay_row(row) for row in delays], as_json=False)
        if configs:
            out("")
            show(CONFIG_COLUMNS, [_config_row(item) for item in settings], as_json=False)


STATE_COLUMNS = ("Partition", "State", "Leader", "Replicas", "Isr", "SealedEnd")
WRITER_COLUMNS = ("Partition", "ClientId", "Software", "Host", "SecondsAgo")
DELAY_COLUMNS = ("Partition", "DeliversTo", "Pending", "NextDue", "LateMs", "Trouble")
PARTITION_COLUMNS = (
    "Partition",
    "Leader",
    "LeaderEpoch",
    "Replicas",
    "Isr",
    "StartOffset",
    "EndOffset",
)
CONFIG_COLUMNS = ("Name", "Value", "Source", "ReadOnly")


@topic_app.command()
def alter(
    name: Name,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Repeatable.")
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="KEY", help="Back to its default.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Change a topic's settings.

    Examples: raftmq topic alter orders --set retention.ms=3600000 --unset segment.bytes
    """
    with reported():
        changes: dict[str, str | None] = dict(parse_pairs(settings or (), "--set"))
        changes.update(dict.fromkeys(unset or ()))
        if not changes:
            raise CommandError("nothing to change; give --set KEY=VALUE or --unset KEY", EXIT_USAGE)
        with open_admin(bootstrap, timeout) as admin:
            if unset:  # brokers take any name for one that is not set
                known = [e.name for e in admin.describe_configs(ResourceType.TOPIC, name)]
                for key in unset:
                    if key not in known:
                        raise BrokerError(
                            ErrorCode.INVALID_CONFIG,
                            f"no setting {key!r}{nearest(key, known)}",
                            about=f"topic {name!r}",
                        )
            admin.alter_configs(ResourceType.TOPIC, name, changes)
        if as_json:
            show_json({"Topic": name, "Changed": changes})
        else:
            out(f"topic {name} changed: {', '.join(changes)}")


@topic_app.command()
def delete(
    names: Annotated[
        list[str],
        typer.Argument(metavar="TOPIC", autocompletion=completion.topics, help="Topics to delete."),
    ],
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="An absent topic is no error.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Delete topics and their records. One that cannot be deleted does not hold up the others.

    Examples: raftmq topic delete orders
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        _delete_each(admin, names, "topic", if_exists=if_exists, as_json=as_json)


def _delete_each(
    admin: Admin, names: Sequence[str], kind: str, *, if_exists: bool, as_json: bool
) -> None:
    deleted: list[str] = []
    failures: dict[str, ClientError] = {}
    for name in dict.fromkeys(names):
        try:
            if kind == "view":
                _view_of(admin, name)
            admin.delete_topic(name)
        except BrokerError as error:
            if not (if_exists and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
                failures[name] = error
            continue
        except ClientError as error:
            failures[name] = error
            if isinstance(error, ConnectionFailedError):
                break  # no broker answers: the other topics would wait as long
            continue
        deleted.append(name)
        if not as_json:
            out(f"{kind} {name} deleted")
    if as_json:
        show_json({"Deleted": deleted})
    raise_failures(failures, len(names), f"{kind}s were not deleted")


@topic_app.command("add-partitions")
def add_partitions(
    name: Name,
    total: Annotated[int, typer.Argument(metavar="TOTAL", help="Partitions in all, afterwards.")],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Give a topic more partitions. Keys may then go to other partitions than before.

    Examples: raftmq topic add-partitions orders 12
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        admin.create_partitions(name, total)
        if as_json:
            show_json({"Topic": name, "PartitionCount": total})
            return
        out(f"topic {name} has {total} partitions")


@topic_app.command()
def shrink(
    name: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")],
    partitions: Annotated[
        int, typer.Option("-p", "--partitions", help="So many stay listed: the first ones.")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would happen, and to which groups.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also where groups lose what they have not read.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Also where retention never ends what is retired.")
    ] = False,
    now: Annotated[
        bool, typer.Option("--now", help="Seal at once, without waiting until nobody writes.")
    ] = False,
    view: Annotated[
        str, typer.Option("--view", help="Name of the view over the retired partitions.")
    ] = "",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List fewer partitions of a topic. The others take no more records, stay readable until their
    retention has passed, and go.

    Examples: raftmq topic shrink orders --partitions 4 --dry-run; raftmq topic shrink orders -p 4
    """
    with reported():
        port = open_admin_port(bootstrap, timeout)
        order = {
            "topic": name,
            "partitions": partitions,
            "view": view,
            "now": now,
            "force": force,
            "keep": keep,
            "dry_run": dry_run,
            "timeout_ms": round(timeout * 1000),
        }
        answer = port.post("/topics/shrink", order)
        lags: dict[str, int | None] = {}
        if answer.get("groups"):
            with open_admin(bootstrap, timeout) as admin:
                lags = _lags(admin, port, name, partitions, answer["groups"])
        if as_json:
            show_json({**answer, "lags": lags})
        else:
            _show_shrunk(name, answer, lags)
            if answer.get("code") == "NONE":
                _show_writers(_states(port, name))
        code = answer.get("code", "UNKNOWN_SERVER_ERROR")
        if code != "NONE":
            is_unknown = code == "REQUEST_TIMED_OUT"
            raise CommandError(
                f"{answer.get('message') or answer.get('error') or code} ({code})",
                EXIT_UNKNOWN if is_unknown else EXIT_FAILED,
            )


@topic_app.command()
def trim(
    name: Name,
    before: Annotated[
        int, typer.Option("--before", metavar="OFFSET", help="First offset to keep; -1: none.")
    ],
    partition: Annotated[
        int | None, typer.Option("-p", "--partition", help="Only this one; default: all.")
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Delete records below an offset. A partition that fails does not hold up the others.

    Examples: raftmq topic trim orders --partition 0 --before 1000
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        numbers = (
            [partition]
            if partition is not None
            else [item.partition for item in admin.topic(name).partitions]
        )
        told = admin.delete_records_each({TopicPartition(name, p): before for p in numbers})
        failures = {
            str(k): item for k, item in sorted(told.items()) if isinstance(item, ClientError)
        }
        rows = [
            (*key, None, str(item)) if isinstance(item, ClientError) else (*key, item, None)
            for key, item in sorted(told.items())
        ]
        if as_json or len(failures) < len(rows):
            columns = ("Topic", "Partition", "LowWatermark", "Error")
            shown = columns if as_json or failures else columns[:3]
            show(shown, [row[: len(shown)] for row in rows], as_json=as_json)
        raise_failures(failures, len(rows), "partitions were not trimmed")


def _replication_factor(topic: TopicInfo) -> int:
    return max((len(item.replicas) for item in topic.partitions), default=0)


def _partition_rows(admin: Admin, topic: TopicInfo) -> list[tuple[object, ...]]:
    keys = [TopicPartition(topic.name, item.partition) for item in topic.partitions]
    starts = known_offsets(admin, keys, EARLIEST)
    ends = known_offsets(admin, keys, LATEST)
    return [
        (
            item.partition,
            item.leader if item.leader >= 0 else None,
            item.leader_epoch,
            list(item.replicas),
            list(item.in_sync),
            starts.get(key),
            ends.get(key),
        )
        for key, item in zip(keys, topic.partitions, strict=True)
    ]


def _config_row(item: ConfigEntry) -> tuple[object, ...]:
    value = "(hidden)" if item.is_sensitive else item.value
    return item.name, value, item.source, item.is_read_only


def _as_json(
    topic: TopicInfo, settings: Sequence[ConfigEntry], rows: Sequence[Sequence[object]]
) -> dict[str, object]:
    return {
        "Topic": topic.name,
        "TopicId": topic.topic_id,
        "PartitionCount": len(topic.partitions),
        "ReplicationFactor": _replication_factor(topic),
        "Configs": {
            item.name: {"Value": item.value, "Source": item.source, "ReadOnly": item.is_read_only}
            for item in settings
        },
        "Partitions": [dict(zip(PARTITION_COLUMNS, row, strict=True)) for row in rows],
    }


# ---- retired partitions ----


def _show_shrunk(name: str, answer: Mapping[str, Any], lags: Mapping[str, int | None]) -> None:
    for step in answer.get("steps", ()):
        out(step)
    for group, lag in lags.items():
        told = "an unknown number of" if lag is None else str(lag)
        out(f"group {group} has {told} records of them to read, and does not read the view")
    if answer.get("code") == "NONE":
        out(f"{answer['message']}: `raftmq topic describe {name}` shows how far it is")


def _lags(
    admin: Admin, port: AdminPort, name: str, partitions: int, groups: list[str]
) -> dict[str, int | None]:
    """How many records of the retired partitions each group has not read; None: not known."""
    told = _states(port, name)
    keys = {}
    for row in told["partitions"]:
        if row["partition"] >= partitions:
            shown = name if row["state"] == "active" else told["view"]
            keys[row["partition"]] = TopicPartition(shown, row["partition"])
    ends = known_offsets(admin, keys.values(), LATEST)
    starts = known_offsets(admin, keys.values(), EARLIEST)
    found: dict[str, int | None] = {}
    for group in groups:
        committed = admin.group_offsets(group).items()
        read = {key.partition: at for key, at in committed if key.topic in (name, told["view"])}
        left = 0
        is_known = all(key in ends and key in starts for key in keys.values())
        for number, key in keys.items() if is_known else ():
            at = read.get(number)
            left += max(0, ends[key] - max(starts[key], 0 if at is None else at.offset))
        found[group] = left if is_known else None
    return found


def _states(port: AdminPort, name: str) -> dict[str, Any]:
    """Every partition that a topic has, with its state, and who writes to it where it should not:
    each node knows that of what it leads."""
    first, *others = port.get_each(f"/topics?name={quote(name, safe='')}")
    if "partitions" not in first:
        return {"partitions": [], "gone": [], "view": None}
    for row in first["partitions"]:
        told = [row, *(r for o in others for r in o.get("partitions", ()) if _is_same(r, row))]
        writers = [writer for one in told for writer in one.get("writers", ())]
        latest: dict[tuple[str, str, str], Any] = {}  # one may have written to two leaders
        for writer in sorted(writers, key=lambda writer: writer["ago_s"]):
            latest.setdefault((writer["client_id"], writer["software"], writer["host"]), writer)
        row["writers"] = list(latest.values())
    return first


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one["partition"] == other["partition"])


def _show_writers(told: Mapping[str, Any]) -> None:
    """Who still writes to partitions that are listed no more."""
    rows = [
        (row["partition"], w["client_id"], w["software"], w["host"], w["ago_s"])
        for row in told["partitions"]
        for w in row.get("writers", ())
    ]
    if rows:
        out("")
        out("Still written to, until these are started again or have asked for metadata:")
        show(WRITER_COLUMNS, rows, as_json=False)


def _find_states(admin: Admin, name: str, timeout_s: float) -> dict[str, Any] | None:
    """The same, where a topic has a view of the usual name and an admin port answers; else None."""
    try:
        admin.topic(f"{name}{VIEW_SUFFIX}")
        port = AdminPort.find(admin, timeout_s)
        return None if port is None else _states(port, name)
    except (BrokerError, CommandError):
        return None


def _find_delays(admin: Admin, name: str, timeout_s: float) -> list[dict[str, Any]] | None:
    """What waits in a delay topic, where an admin port answers; else None."""
    try:
        port = AdminPort.find(admin, timeout_s)
        if port is None:
            return None
        told = port.get_each(f"/topics?name={quote(name, safe='')}")
    except CommandError:
        return None
    rows = [row for one in told for row in one.get("delays", ())]
    return sorted(rows, key=lambda row: (row["partition"], row["is_dead"]))


def _delay_row(row: Mapping[str, Any]) -> tuple[object, ...]:
    due_ms = row["next_due_ms"]
    return (
        row["partition"],
        row["to"],
        row["pending"],
        None if due_ms is None else format_time(due_ms),
        row["late_ms"],
        row["trouble"] or None,
    )


def _show_states(told: Mapping[str, Any]) -> None:
    """The partitions that are listed no more."""
    retired = [row for row in told["partitions"] if row["state"] != "active"]
    out(f"Retired: {len(retired)}, as {told['view']}; gone: {len(told['gone'])}")
    rows = [
        (
            row["partition"],
            row["state"],
            row["leader"],
            row["replicas"],
            row["isr"],
            row["sealed_end"],
        )
        for row in retired
    ]
    rows += [(row["partition"], "gone", None, [], [], row["end_offset"]) for row in told["gone"]]
    show(STATE_COLUMNS, rows, as_json=False)
    _show_writers(told)


# ---- views ----

VIEW_COLUMNS = ("View", "Topic", "Where")
VIEW_PARTITION_COLUMNS = (
    "Partition",
    "Leader",
    "StartOffset",
    "EndOffset",
    "TopicEndOffset",
    "ExaminedEnd",
    "LacksBytes",
    "Trouble",
)
_LANGUAGE = "docs/views.md says what conditions are, and which topics have views."
ViewName = Annotated[
    str, typer.Argument(metavar="VIEW", autocompletion=completion.topics, help="The view's name.")
]


@view_app.command("create")
def create_view(
    name: ViewName,
    of: Annotated[
        str,
        typer.Option(
            "--of",
            metavar="TOPIC",
            autocompletion=completion.topics,
            help="The topic whose records it shows.",
        ),
    ],
    where: Annotated[
        str,
        typer.Option(
            "--where", metavar="CONDITION", help="Over headers and key; see docs/views.md."
        ),
    ],
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="An existing view of the same is no error.")
    ] = False,
    validate_only: Annotated[
        bool, typer.Option("--validate-only", help="Only say whether it could be created.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Create a view: consumers read it as a topic, which has only what meets the condition.

    Examples: raftmq view create refunds --of orders --where "tag in ('refund', 'credit')"
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        wanted = ViewInfo(name, of, where.strip())
        settings = {VIEW_OF: of, VIEW_WHERE: where}
        verb = "could be created" if validate_only else "created"
        try:
            admin.create_topic(name, configs=settings, validate_only=validate_only)
        except BrokerError as error:
            if error.code is ErrorCode.INVALID_CONFIG:
                raise CommandError(str(error), name=error.code.name, hint=_LANGUAGE) from error
            if not if_not_exists or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            if _view_of(admin, name) != wanted:
                raise
            verb = "is there"
        if as_json:
            show_json(dict(zip(VIEW_COLUMNS, (name, of, wanted.condition), strict=True)))
        else:
            out(f"view {name} of {of} {verb}: {wanted.condition}")


@view_app.command("list")
def list_views(
    of: Annotated[
        str | None,
        typer.Option(
            "--of", metavar="TOPIC", autocompletion=completion.topics, help="Of this topic alone."
        ),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List the views whose settings you may see.

    Examples: raftmq view list --of orders
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        rows = [(view.name, view.topic, view.condition) for view in admin.views(of)]
        show(VIEW_COLUMNS, rows, as_json=as_json)


@view_app.command("describe")
def describe_view(
    name: ViewName,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show what a view shows, and how far its index is in each partition.

    It is complete where nothing of the topic is left to examine. That is asked at the
    administrators' port, where one answers.

    Examples: raftmq view describe refunds
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        view = _view_of(admin, name)
        rows = _view_rows(admin, view, timeout)
        told = (view.name, view.topic, view.condition)
        if as_json:
            named = [dict(zip(VIEW_PARTITION_COLUMNS, row, strict=True)) for row in rows]
            show_json({**dict(zip(VIEW_COLUMNS, told, strict=True)), "Partitions": named})
            return
        out(f"View: {view.name}  Topic: {view.topic}")
        out(f"Where: {view.condition}")
        show(VIEW_PARTITION_COLUMNS, rows, as_json=False)


@view_app.command("delete")
def delete_views(
    names: Annotated[
        list[str],
        typer.Argument(metavar="VIEW", autocompletion=completion.topics, help="Views to delete."),
    ],
    if_exists: Annotated[
        bool, typer.Option("--if-exists", help="An absent view is no error.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Delete views, with what groups have committed in them. Their topics keep all records.

    Examples: raftmq view delete refunds
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        _delete_each(admin, names, "view", if_exists=if_exists, as_json=as_json)


def _view_of(admin: Admin, name: str) -> ViewInfo:
    """The view of a name.

    Raises:
        BrokerError: there is none of that name, or it is a topic.
    """
    entries = admin.describe_configs(ResourceType.TOPIC, name)
    known = {entry.name: entry.value for entry in entries}
    topic = known.get(VIEW_OF)
    if not topic:
        raise BrokerError(
            ErrorCode.INVALID_REQUEST, "that is no view with a condition", about=f"view {name!r}"
        )
    return ViewInfo(name, topic, known.get(VIEW_WHERE) or "")


def _view_rows(admin: Admin, view: ViewInfo, timeout_s: float) -> list[tuple[object, ...]]:
    topic = admin.topic(view.name)
    keys = [TopicPartition(view.topic, item.partition) for item in topic.partitions]
    ends = _topic_ends(admin, view.topic, keys)
    filled = _find_fills(admin, view, timeout_s)
    rows: list[tuple[object, ...]] = []
    for row, key in zip(_partition_rows(admin, topic), keys, strict=True):
        partition, leader, *_, start, end = row
        index = filled.get((key.partition, leader), {})
        told = (index.get("examined_end"), index.get("lacks_bytes"), index.get("trouble") or None)
        rows.append((partition, leader, start, end, ends.get(key), *told))
    return rows


def _topic_ends(
    admin: Admin, topic: str, keys: Sequence[TopicPartition]
) -> Mapping[TopicPartition, int]:
    """Where a view's topic ends, as far as the caller may know it."""
    try:
        listed = len(admin.topic(topic).partitions)
        return known_offsets(admin, [key for key in keys if key.partition < listed], LATEST)
    except BrokerError:
        return {}


def _find_fills(
    admin: Admin, view: ViewInfo, timeout_s: float
) -> dict[tuple[object, object], dict[str, Any]]:
    """How far a view's index is, by partition and node; nothing where no admin port answers."""
    try:
        port = AdminPort.find(admin, timeout_s)
        told = [] if port is None else port.get_each(f"/topics?name={quote(view.topic, safe='')}")
    except CommandError:
        return {}
    rows = [row for one in told for row in one.get("views", ())]
    return {(row["partition"], row["node"]): row for row in rows if row["view"] == view.name}
