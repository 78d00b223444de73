"""Options of `spark.read.format("raftmq")`: text in, checked values out.

Names are those of Spark's own Kafka source, in any case, plus `group`, `maxRecordsPerPartition`
and `columns`. What is unknown, makes no sense or contradicts another option is an `OptionError`
that names it; nothing is silently ignored. Opens nothing and resolves no offset: `plan.py` does.

    options = read_options({"kafka.bootstrap.servers": "h:9092", "subscribe": "t", "group": "g"})

`SourceOptions` is plain data that travels to executors; secrets are kept out of its repr.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeVar

from attrs import field, frozen

from raftmq.types import TopicPartition
from raftmq_client.core.admin import EARLIEST, LATEST
from raftmq_client.errors import UsageError
from raftmq_client.options import parse_bootstrap
from raftmq_spark.errors import OptionError
from raftmq_spark.security import ClientSettings, read_client_settings

T = TypeVar("T")

COLUMNS: Final = (
    "key",
    "value",
    "topic",
    "partition",
    "offset",
    "timestamp",
    "timestampType",
    "headers",
)
"""All columns, in the order of Spark's Kafka source."""

_KNOWN: Final = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "skipUnreadable",
    "minPartitions",
    "maxRecordsPerPartition",
    "includeHeaders",
    "columns",
    "group",
    "pushFilters",
)
_STREAMS_ONLY: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")


class BoundKind(Enum):
    """How one side of every range is found."""

    EARLIEST = "earliest"
    LATEST = "latest"
    COMMITTED = "committed"
    """Where the group's committed offset stands; where it has none, the log start."""
    OFFSETS = "offsets"
    TIMESTAMPS = "timestamps"


@frozen
class Bound:
    """One side of every range."""

    kind: BoundKind
    offsets: Mapping[TopicPartition, int] = field(factory=dict)
    """OFFSETS: by partition; EARLIEST (-2) and LATEST (-1) stand for themselves."""
    timestamp: int | None = None
    """TIMESTAMPS: one for all partitions (ms), else by partition in `offsets`."""
    falls_to_latest: bool = False
    """TIMESTAMPS: where no record is that late, the end is meant; else it is an error."""


@frozen
class SourceOptions:
    """Everything a read needs to know."""

    client: ClientSettings
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: tuple[TopicPartition, ...] = ()
    starts: Bound = Bound(BoundKind.EARLIEST)
    ends: Bound = Bound(BoundKind.LATEST)
    group: str | None = None
    fails_on_data_loss: bool = True
    skips_unreadable: bool = False
    """Pass by batches whose records cannot be read."""
    partitions_min: int | None = None
    records_max: int | None = None
    """Most offsets of one part of a range: `maxRecordsPerPartition`."""
    columns: tuple[str, ...] = COLUMNS[:-1]
    pushes_filters: bool = False


def read_options(given: Mapping[str, str]) -> SourceOptions:
    """Check options and give them a shape.

    Raises:
        OptionError: one is unknown, missing, malformed or contradicts another.
    """
    texts = {name.lower(): str(value) for name, value in given.items()}
    _refuse_unknown(texts)
    topics, pattern, assigned = _read_selection(texts)
    starts, ends = _read_bounds(texts)
    for name, bound in (("startingOffsets", starts), ("endingOffsets", ends)):
        _check_named(name, bound, topics, assigned)
    return SourceOptions(
        client=read_client_settings(texts, _read_bootstrap(texts)),
        topics=topics,
        pattern=pattern,
        assigned=assigned,
        starts=starts,
        ends=ends,
        group=texts.get("group"),
        fails_on_data_loss=_read(texts, "failOnDataLoss", read_bool, True),
        skips_unreadable=_read(texts, "skipUnreadable", read_bool, False),
        partitions_min=_read(texts, "minPartitions", read_positive, None),
        records_max=_read(texts, "maxRecordsPerPartition", read_positive, None),
        columns=_read_columns(texts),
        pushes_filters=_read(texts, "pushFilters", read_bool, False),
    )


def _refuse_unknown(texts: Mapping[str, str]) -> None:
    known = {name.lower() for name in _KNOWN}
    for name in texts:
        if name.startswith("kafka.") or name in known:
            continue
        if name == "path":
            raise OptionError("load() takes no path: say what to read with subscribe or assign")
        if name in (stream.lower() for stream in _STREAMS_ONLY):
            raise OptionError(f"option {name!r} is for streams; this is a batch read")
        raise OptionError(f"unknown option {name!r}; known are {', '.join(_KNOWN)} and kafka.*")


def _read_bootstrap(texts: Mapping[str, str]) -> str:
    servers = texts.get("kafka.bootstrap.servers")
    if servers is None:
        raise OptionError("option 'kafka.bootstrap.servers' is missing: host:port[,host:port...]")
    try:
        parse_bootstrap(servers)
    except UsageError as error:
        raise OptionError(f"option 'kafka.bootstrap.servers': {error}") from error
    return servers


# What to read.


def _read_selection(
    texts: Mapping[str, str],
) -> tuple[tuple[str, ...], str | None, tuple[TopicPartition, ...]]:
    ways = ("subscribe", "subscribePattern", "assign")
    given = [name for name in ways if name.lower() in texts]
    if len(given) != 1:
        said = " and ".join(given) or "none of them"
        raise OptionError(f"exactly one of {', '.join(ways)} says what to read; given: {said}")
    text = texts[given[0].lower()]
    if given[0] == "subscribe":
        topics = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        if not topics:
            raise OptionError("option 'subscribe' names no topic")
        return topics, None, ()
    if given[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"option 'subscribePattern' is no pattern: {error}") from error
        return (), text, ()
    return (), None, _read_assign(text)


def _read_assign(text: str) -> tuple[TopicPartition, ...]:
    found: dict[TopicPartition, None] = {}
    for topic, partitions in _read_object("assign", text).items():
        if not isinstance(partitions, list):
            raise OptionError(f"option 'assign': topic {topic!r} wants a list of partitions")
        for partition in partitions:
            found[TopicPartition(topic, _read_number("assign", topic, partition))] = None
    if not found:
        raise OptionError("option 'assign' names no partition")
    return tuple(found)


# From where to where.


def _read_bounds(texts: Mapping[str, str]) -> tuple[Bound, Bound]:
    starts = _read_bound(texts, "starting")
    ends = _read_bound(texts, "ending")
    strategy = texts.get("startingoffsetsbytimestampstrategy")
    if strategy is not None:
        if starts is None or starts.kind is not BoundKind.TIMESTAMPS:
            raise OptionError(
                "option 'startingOffsetsByTimestampStrategy' needs startingTimestamp"
                " or startingOffsetsByTimestamp"
            )
        if strategy.lower() not in ("error", "latest"):
            raise OptionError(
                f"option 'startingOffsetsByTimestampStrategy' is error or latest, not {strategy!r}"
            )
        starts = Bound(starts.kind, starts.offsets, starts.timestamp, strategy.lower() == "latest")
    has_group = "group" in texts
    ends = ends or Bound(BoundKind.LATEST)
    if starts is None:
        from_group = has_group and ends.kind is not BoundKind.COMMITTED
        starts = Bound(BoundKind.COMMITTED if from_group else BoundKind.EARLIEST)
    uses_group = BoundKind.COMMITTED in (starts.kind, ends.kind)
    if has_group and not texts["group"]:
        raise OptionError("option 'group' is empty")
    if uses_group and not has_group:
        raise OptionError("offsets 'committed' need the option 'group'")
    if has_group and not uses_group:
        raise OptionError(
            "option 'group' contradicts the starting offsets given: nothing would be read"
            " from its committed offsets"
        )
    return starts, ends


def _read_bound(texts: Mapping[str, str], side: str) -> Bound | None:
    """One side's bound; None where no option speaks of it."""
    ways = (f"{side}Offsets", f"{side}Timestamp", f"{side}OffsetsByTimestamp")
    given = [name for name in ways if name.lower() in texts]
    if len(given) > 1:
        raise OptionError(f"options {' and '.join(given)} contradict each other")
    if not given:
        return None
    (name,) = given
    text = texts[name.lower()].strip()
    is_end = side == "ending"
    if name == ways[1]:
        return Bound(
            BoundKind.TIMESTAMPS, timestamp=_read_timestamp(name, text), falls_to_latest=is_end
        )
    if name == ways[2]:
        times = _read_table(name, text, lowest=0)
        return Bound(BoundKind.TIMESTAMPS, offsets=times, falls_to_latest=is_end)
    word = text.lower()
    if word in ("earliest", "latest", "committed"):
        kind = BoundKind(word)
        if kind is (BoundKind.EARLIEST if is_end else BoundKind.LATEST):
            raise OptionError(f"option {name!r} cannot be {word!r} in a batch read")
        return Bound(kind)
    if not text.startswith("{"):
        raise OptionError(
            f"option {name!r} is {'latest' if is_end else 'earliest'}, committed or JSON such as"
            f' {{"topic":{{"0":23}}}}, not {text!r}'
        )
    offsets = _read_table(name, text, lowest=EARLIEST)
    for key, offset in offsets.items():
        if offset == (EARLIEST if is_end else LATEST):
            said = "-2 (earliest)" if is_end else "-1 (latest)"
            raise OptionError(f"option {name!r}: {key} cannot be {said} in a batch read")
    return Bound(BoundKind.OFFSETS, offsets=offsets)


def _check_named(
    name: str, bound: Bound, topics: tuple[str, ...], assigned: tuple[TopicPartition, ...]
) -> None:
    """Offsets by partition must speak of what is read."""
    for key in bound.offsets:
        if (topics and key.topic not in topics) or (assigned and key not in assigned):
            raise OptionError(f"option {name!r} (or by timestamp) names {key}, which is not read")
    for key in assigned:
        if bound.offsets and key not in bound.offsets:
            raise OptionError(f"option {name!r} (or by timestamp) says nothing about {key}")


# Small readers.


def read_bool(name: str, text: str) -> bool:
    """true or false, in any case.

    Raises:
        OptionError: neither.
    """
    if text.lower() not in ("true", "false"):
        raise OptionError(f"option {name!r} is true or false, not {text!r}")
    return text.lower() == "true"


def read_positive(name: str, text: str) -> int:
    """A whole number above 0.

    Raises:
        OptionError: it is none.
    """
    if not text.strip().isdecimal() or int(text) < 1:
        raise OptionError(f"option {name!r} is a whole number above 0, not {text!r}")
    return int(text)


def _read(
    texts: Mapping[str, str], name: str, reader: Callable[[str, str], T], default: Any
) -> Any:
    text = texts.get(name.lower())
    return default if text is None else reader(name, text)


def _read_timestamp(name: str, text: str) -> int:
    if not text.isdecimal():
        raise OptionError(f"option {name!r} is milliseconds since 1970, not {text!r}")
    return int(text)


def _read_table(name: str, text: str, *, lowest: int) -> dict[TopicPartition, int]:
    """Read `{"topic": {"0": number}}`."""
    found: dict[TopicPartition, int] = {}
    for topic, partitions in _read_object(name, text).items():
        if not isinstance(partitions, dict):
            raise OptionError(f"option {name!r}: topic {topic!r} wants {{partition: number}}")
        for partition, number in partitions.items():
            key = TopicPartition(topic, _read_number(name, topic, partition))
            if type(number) is not int or number < lowest:
                raise OptionError(f"option {name!r}: {key} cannot be {number!r}")
            found[key] = number
    if not found:
        raise OptionError(f"option {name!r} names no partition")
    return found


def _read_object(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OptionError(f"option {name!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise OptionError(f"option {name!r} wants a JSON object by topic")
    return found


def _read_number(name: str, topic: str, partition: Any) -> int:
    if type(partition) is int and partition >= 0:
        return partition
    if isinstance(partition, str) and partition.isdecimal():
        return int(partition)
    raise OptionError(f"option {name!r}: topic {topic!r} has no partition {partition!r}")


def _read_columns(texts: Mapping[str, str]) -> tuple[str, ...]:
    with_headers = _read(texts, "includeHeaders", read_bool, None)
    text = texts.get("columns")
    if text is None:
        return COLUMNS if with_headers else COLUMNS[:-1]
    by_name = {name.lower(): name for name in COLUMNS}
    columns: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        name = by_name.get(part.lower())
        if name is None:
            raise OptionError(f"option 'columns': {part!r} is none of {', '.join(COLUMNS)}")
        if name in columns:
            raise OptionError(f"option 'columns' names {name!r} twice")
        columns.append(name)
    if with_headers is not None and with_headers != ("headers" in columns):
        raise OptionError("options 'columns' and 'includeHeaders' contradict each other")
    return tuple(columns)
