"""`raftmq topic ...`: create, look at, change and delete topics.

Columns and settings have Kafka's names. Changes whose answer was lost end with 3, not with a second
try: creating and deleting twice is not the same as once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    known_offsets,
    open_admin,
    parse_pairs,
    raise_failures,
    reported,
    show,
    show_json,
)
from raftmq.cli.configs import nearest
from raftmq.cli.console import out
from raftmq.cli.main import EXIT_USAGE
from raftmq.errors import ErrorCode
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import EARLIEST, LATEST, ConfigEntry, ResourceType
from raftmq_client.core.metadata import TopicInfo
from raftmq_client.errors import BrokerError, ClientError, ConnectionFailedError

topic_app = typer.Typer(help="Topics.", no_args_is_help=True)

Name = Annotated[
    str, typer.Argument(metavar="TOPIC", autocompletion=completion.topics, help="The topic's name.")
]
Configs = Annotated[
    list[str] | None,
    typer.Option("-c", "--config", metavar="KEY=VALUE", help="A setting; repeatable."),
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
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        try:
            created = admin.create_topic(
                name,
                partitions,
                replication_factor,
                parse_pairs(config or (), "--config"),
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
        if as_json:
            show_json(_as_json(topic, settings, rows))
            return
        changed = [f"{s.name}={s.value}" for s in settings if s.source == "DYNAMIC_TOPIC_CONFIG"]
        out(f"Topic: {topic.name}  TopicId: {topic.topic_id or '-'}")
        out(
            f"PartitionCount: {len(topic.partitions)}  "
            f"ReplicationFactor: {_replication_factor(topic)}  Configs: {','.join(changed) or '-'}"
        )
        show(PARTITION_COLUMNS, rows, as_json=False)
        if configs:
            out("")
            show(CONFIG_COLUMNS, [_config_row(item) for item in settings], as_json=False)


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
        deleted: list[str] = []
        failures: dict[str, ClientError] = {}
        for name in dict.fromkeys(names):
            try:
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
                out(f"topic {name} deleted")
        if as_json:
            show_json({"Deleted": deleted})
        raise_failures(failures, len(names), "topics were not deleted")


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
