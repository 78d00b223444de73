"""`raftmq retry ...` and `raftmq dead ...`: retries with a back-off for a group, and what is dead.

Three topics make the retries of a group of a topic: what it cannot process now it sends to
`TOPIC.GROUP.retry`, it reads `TOPIC.GROUP` beside `TOPIC`, and what was tried too often comes to
`TOPIC.GROUP.dead`. The cluster knows only a delay topic with `raftmq.dead.to`; the names are ours.
Other delay topics with such a topic send there what they could not deliver.
A replay sends dead records to where the delay topics that they come from deliver, at least once: it
commits, in a group of its own, how far it came, after they are acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import typer
from attrs import frozen

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    client_security,
    format_time,
    known_offsets,
    open_admin,
    partitions_of,
    printable,
    progress_bar,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_USAGE, out
from raftmq.delays.headers import ATTEMPT, GIVEN_UP, OWN_PREFIX, SOURCE, read_span
from raftmq.errors import ErrorCode
from raftmq.metadata.config_keys import (
    DEAD_TO,
    DELIVERS_TO,
    RETRY_ATTEMPTS,
    RETRY_FACTOR,
    RETRY_MAX,
    RETRY_MIN,
    retries_nothing,
)
from raftmq.records import InvalidRecordError
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.blocking.consumer import Consumer
from raftmq_client.blocking.producer import Producer
from raftmq_client.core.admin import EARLIEST, LATEST, ResourceType
from raftmq_client.core.messages import ConsumerRecord
from raftmq_client.errors import BrokerError
from raftmq_client.later import ERRORS

retry_app = typer.Typer(help="Retries with a back-off for a group.", no_args_is_help=True)
dead_app = typer.Typer(
    help="Records that were tried too often, or not delivered.", no_args_is_help=True
)

LIST_COLUMNS: Final = ("Retry", "DeliversTo", "Dead", "Attempts", "Min", "Max", "Factor")
TOPIC_COLUMNS: Final = ("Topic", "Role", "Partition", "StartOffset", "EndOffset", "GroupLag")
DEAD_COLUMNS: Final = ("Topic", "Of", "Records", "NotReplayed")
RECORD_COLUMNS: Final = ("Partition", "Offset", "Time", "Key", "Attempts", "From", "Reason")
REPLAY_COLUMNS: Final = ("Partition", "FromOffset", "EndOffset", "To")
HEADERS_BYTES: Final = 64 << 10
"""So much more than a record of the topic may one of these be: for the headers on its way."""
SIZE_MAX: Final = "max.message.bytes"
MESSAGE_BYTES_MAX: Final = 1_048_588
REPLAY_BATCH: Final = 500
_POLL_S: Final = 0.5
_SUFFIX: Final = ".retry"
_DEAD_SUFFIX: Final = ".dead"
_POLICY: Final = (RETRY_ATTEMPTS, RETRY_MIN, RETRY_MAX, RETRY_FACTOR)

Group = Annotated[
    str, typer.Argument(metavar="GROUP", autocompletion=completion.groups, help="The group's name.")
]
Of = Annotated[
    str,
    typer.Option(
        "--of", metavar="TOPIC", autocompletion=completion.topics, help="The topic that it reads."
    ),
]
DeadTopic = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC", autocompletion=completion.topics, help="A topic of dead records."
    ),
]


@frozen
class Names:
    """The topics of one group's retries."""

    target: str
    retry: str
    dead: str

    @classmethod
    def of(cls, group: str, topic: str) -> Names:
        """Those of the usual names."""
        target = f"{topic}.{group}"
        return cls(target, f"{target}{_SUFFIX}", f"{target}{_DEAD_SUFFIX}")


@retry_app.command()
def create(
    group: Group,
    of: Of,
    shortest: Annotated[
        str, typer.Option("--min", metavar="TIME", help="The first wait: 500ms, 1s, 2m.")
    ] = "1s",
    longest: Annotated[
        str, typer.Option("--max", metavar="TIME", help="No wait grows beyond this.")
    ] = "10m",
    factor: Annotated[
        float, typer.Option("--factor", help="Each wait is so many times the last one.", min=1)
    ] = 2.0,
    attempts: Annotated[
        int, typer.Option("--attempts", help="Tries in all, the first one included.", min=1)
    ] = 8,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Topics that are there are no error.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Make the topics by which a group retries records of a topic.

    Examples: raftmq retry create billing --of orders --min 1s --max 10m --factor 2 --attempts 8
    """
    with reported():
        policy = {
            RETRY_ATTEMPTS: str(attempts),
            RETRY_MIN: str(_span("--min", shortest)),
            RETRY_MAX: str(_span("--max", longest)),
            RETRY_FACTOR: f"{factor:g}",
        }
        names = Names.of(group, of)
        with open_admin(bootstrap, timeout) as admin:
            topic = admin.topic(of)
            partitions = len(topic.partitions)
            copies = max(len(item.replicas) for item in topic.partitions)
            # The leader of a retry topic hears from its followers what time it is.
            timed = max(copies, min(2, len(admin.brokers())))
            room = int(_configs(admin, of).get(SIZE_MAX) or MESSAGE_BYTES_MAX) + HEADERS_BYTES
            size = {SIZE_MAX: str(min(room, (1 << 31) - 1))}
            ends = {DELIVERS_TO: names.target, DEAD_TO: names.dead}
            for name, replicas, configs in (
                (names.target, copies, size),
                (names.dead, copies, {**size, "retention.ms": "-1"}),
                (names.retry, timed, {**size, **ends, **policy}),
            ):
                _create(admin, name, partitions, replicas, configs, if_not_exists)
        if as_json:
            show_json({"Retry": names.retry, "DeliversTo": names.target, "Dead": names.dead})
            return
        out(f"{group} reads {of} and {names.target}; what fails it sends to {names.retry},")
        out(f"and what failed {attempts} times comes to {names.dead}, which keeps it for ever")


def _create(
    admin: Admin,
    name: str,
    partitions: int,
    copies: int,
    configs: dict[str, str],
    if_not_exists: bool,
) -> None:
    try:
        admin.create_topic(name, partitions, copies, configs)
    except BrokerError as error:
        if not if_not_exists or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
            raise


@retry_app.command("list")
def list_retries(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, timeout: Timeout = 15.0, as_json: AsJson = False
) -> None:
    """List the retry topics whose names end with .retry.

    Examples: raftmq retry list --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        rows = [
            (name, configs[DELIVERS_TO], configs[DEAD_TO], *(configs[key] for key in _POLICY))
            for name, configs in _with_dead_topics(admin).items()
            if name.endswith(_SUFFIX) and not retries_nothing(configs.get(RETRY_ATTEMPTS))
        ]
        show(LIST_COLUMNS, rows, as_json=as_json)


@retry_app.command()
def describe(
    group: Group,
    of: Of,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show a group's retries: how often and when it tries again, and what its topics hold.

    Examples: raftmq retry describe billing --of orders
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        names = Names.of(group, of)
        configs = _retry_configs(admin, names.retry)
        read = admin.group_offsets(group)
        rows: list[tuple[object, ...]] = []
        for name, role in (
            (of, "topic"),
            (names.target, "again"),
            (names.retry, "waits"),
            (names.dead, "dead"),
        ):
            keys = partitions_of(admin, name)
            starts, ends = known_offsets(admin, keys, EARLIEST), known_offsets(admin, keys, LATEST)
            for key in keys:
                lag = None
                if key in read and key in ends:
                    lag = max(0, ends[key] - read[key].offset)
                rows.append((name, role, key.partition, starts.get(key), ends.get(key), lag))
        if as_json:
            policy = {key: configs[key] for key in _POLICY}
            named = [dict(zip(TOPIC_COLUMNS, row, strict=True)) for row in rows]
            show_json({"Group": group, "Configs": policy, "Partitions": named})
            return
        out(
            f"Group: {group}  Attempts: {configs[RETRY_ATTEMPTS]}  Wait: {configs[RETRY_MIN]} to "
            f"{configs[RETRY_MAX]} ms, each {configs[RETRY_FACTOR]} times the one before"
        )
        show(TOPIC_COLUMNS, rows, as_json=False)


@retry_app.command()
def delete(
    group: Group,
    of: Of,
    with_dead: Annotated[
        bool, typer.Option("--with-dead", help="The dead records too; else their topic stays.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Delete the topics of a group's retries, with all that waits in them.

    Examples: raftmq retry delete billing --of orders
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        names = Names.of(group, of)
        deleted = []
        _retry_configs(admin, names.retry)
        for name in (names.retry, names.target, *([names.dead] if with_dead else [])):
            admin.delete_topic(name)
            deleted.append(name)
            if not as_json:
                out(f"topic {name} deleted")
        if as_json:
            show_json({"Deleted": deleted})


@dead_app.command("list")
def list_dead(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP, timeout: Timeout = 15.0, as_json: AsJson = False
) -> None:
    """List topics of dead records, with how many of them were not replayed.

    Examples: raftmq dead list
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        rows = []
        senders: dict[str, list[str]] = {}
        for name, configs in _with_dead_topics(admin).items():
            senders.setdefault(configs[DEAD_TO] or "", []).append(name)
        for dead, names in senders.items():
            try:
                ranges = _ranges(admin, dead)
            except BrokerError as error:
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                continue  # somebody deleted it
            kept = sum(end - start for start, _, end in ranges.values())
            left = sum(end - at for _, at, end in ranges.values())
            rows.append((dead, ",".join(names), kept, left))
        show(DEAD_COLUMNS, rows, as_json=as_json)


@dead_app.command("show")
def show_dead(
    topic: DeadTopic,
    count: Annotated[
        int, typer.Option("-c", "--count", help="So many at most of each partition.", min=1)
    ] = 20,
    every: Annotated[bool, typer.Option("--all", help="Also those that were replayed.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show dead records: where they come from, how often they were tried, why they are dead.

    Examples: raftmq dead show orders.billing.dead --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        ranges = {}
        for key, (start, at, end) in _ranges(admin, topic).items():
            first = start if every else at
            ranges[key] = first, min(end, first + count)
        rows: list[tuple[Any, ...]] = []
        with Consumer(bootstrap, security=client_security()) as consumer:
            for batch in _read(consumer, ranges):
                rows += [_row(record) for record in batch]
        rows.sort(key=lambda row: row[:2])
        show(RECORD_COLUMNS, rows, as_json=as_json)


def _row(record: ConsumerRecord) -> tuple[Any, ...]:
    told = {name: _text(content) for name, content in record.headers}
    origin = told.get(SOURCE)
    if f"{ERRORS}topic" in told:
        origin = "/".join(
            told.get(f"{ERRORS}{word}", "?") for word in ("topic", "partition", "offset")
        )
    return (
        record.partition,
        record.offset,
        format_time(record.timestamp),
        printable(record.key),
        told.get(ATTEMPT),
        origin,
        told.get(GIVEN_UP) or told.get(f"{ERRORS}message"),
    )


def _text(content: bytes | None) -> str:
    return (content or b"").decode(errors="replace")


@dead_app.command()
def replay(
    topic: DeadTopic,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="TOPIC",
            autocompletion=completion.topics,
            help="Where to; by default where they were to come.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option("-c", "--count", help="So many at most.", min=1)
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be sent.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Send dead records to be tried again, from where the last replay ended; attempts count anew.
    One that is interrupted may send up to 500 records again.

    Examples: raftmq dead replay orders.billing.dead --dry-run
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        route = Route.to(admin, to) if to else Route.back(admin, topic)
        ranges = {key: (at, end) for key, (_, at, end) in _ranges(admin, topic).items()}
        if dry_run:
            rows = [
                (key.partition, at, end, route.told(key.partition))
                for key, (at, end) in ranges.items()
            ]
            show(REPLAY_COLUMNS, rows, as_json=as_json)
            return
        sent = _replay(bootstrap, topic, route, ranges, count, as_json=as_json)
        if as_json:
            show_json({"Topic": topic, "To": ",".join(route.widths), "Records": sent})
        else:
            out(f"{sent} records sent to {', '.join(route.widths)}")


@frozen
class Route:
    """Where a replay sends dead records.

    Attributes:
        widths: how many partitions each target has.
        sources: the delay topics that the records may come from: where each delivers, and whether
            it counts attempts; none where all go to one target that somebody named.
    """

    widths: dict[str, int]
    sources: dict[str, tuple[str, bool]]

    @classmethod
    def to(cls, admin: Admin, target: str) -> Route:
        """All to one topic."""
        return cls({target: len(admin.topic(target).partitions)}, {})

    @classmethod
    def back(cls, admin: Admin, dead: str) -> Route:
        """Each to where the delay topic delivers that gave it up."""
        sources = {
            name: (configs[DELIVERS_TO] or "", not retries_nothing(configs.get(RETRY_ATTEMPTS)))
            for name, configs in _with_dead_topics(admin).items()
            if configs[DEAD_TO] == dead
        }
        if not sources:
            raise CommandError(f"no delay topic sends to {dead}; --to says where to", EXIT_USAGE)
        targets = sorted({target for target, _ in sources.values()})
        known = {item.name: len(item.partitions) for item in admin.cluster(targets).topics}
        widths = {name: known[name] for name in targets if known.get(name)}
        if not widths:
            gone = ", ".join(targets)
            raise CommandError(f"there is no topic {gone}; --to says where to", EXIT_FAILED)
        return cls(widths, sources)

    def of(self, record: ConsumerRecord) -> tuple[str, int, bool]:
        """The topic and partition for a record, and whether it is told a first attempt."""
        target, counts = self._target(record)
        if target not in self.widths:
            raise CommandError(
                f"{_name(record)} was to come to {target}, which is not there; --to says where to",
                EXIT_FAILED,
            )
        return target, record.partition % self.widths[target], counts

    def _target(self, record: ConsumerRecord) -> tuple[str, bool]:
        if not self.sources:
            return next(iter(self.widths)), True
        told = {name: _text(content) for name, content in record.headers}
        source = told.get(SOURCE, "").rsplit("/", 2)[0]
        if source in self.sources:
            return self.sources[source]
        known = set(self.sources.values())
        if len(known) == 1:  # our client buried it, or its delay topic was another one
            return known.pop()
        sender = f"{source}, which sends here no more" if source else "a client"
        raise CommandError(f"{_name(record)} comes from {sender}; --to says where to", EXIT_FAILED)

    def told(self, partition: int) -> str:
        """Where records of a partition may go, for people."""
        return ",".join(f"{name}/{partition % width}" for name, width in self.widths.items())


def _name(record: ConsumerRecord) -> str:
    return f"{record.topic}/{record.partition}/{record.offset}"


def _replay(
    bootstrap: str,
    topic: str,
    route: Route,
    ranges: dict[TopicPartition, tuple[int, int]],
    count: int | None,
    *,
    as_json: bool,
) -> int:
    whole = sum(end - at for at, end in ranges.values())
    whole = whole if count is None else min(whole, count)
    sent = 0
    with (
        progress_bar("replay", as_json) as bar,
        Producer(bootstrap, security=client_security()) as producer,
        Consumer(
            bootstrap, security=client_security(), group=replay_group(topic), auto_commit_ms=None
        ) as consumer,
    ):
        for batch in _read(consumer, ranges):
            chosen = batch if count is None else batch[: count - sent]
            routes = [route.of(record) for record in chosen]  # all of them, or none is sent
            receipts = [
                producer.send(target, record.value, record.key, _headers(record, counts), partition)
                for record, (target, partition, counts) in zip(chosen, routes, strict=True)
            ]
            for receipt in receipts:
                receipt.result()
            done = {TopicPartition(topic, r.partition): r.offset + 1 for r in chosen}
            consumer.commit(done)
            sent += len(chosen)
            bar.update(sent, whole, f"{sent} of {whole}")
            if sent == count:
                break
    return sent


def _headers(record: ConsumerRecord, counts: bool) -> list[tuple[str, bytes | None]]:
    """Those of a record that comes for the first time, which is told where attempts count."""
    kept = [pair for pair in record.headers if not pair[0].startswith(OWN_PREFIX)]
    return [*kept, (ATTEMPT, b"1")] if counts else kept


def replay_group(topic: str) -> str:
    """The group that keeps how far a topic of dead records was replayed."""
    return f"{topic}.replay"


def _read(
    consumer: Consumer, ranges: dict[TopicPartition, tuple[int, int]]
) -> Iterable[Sequence[ConsumerRecord]]:
    """The records of these ranges of offsets, in batches."""
    left = {key: end for key, (at, end) in ranges.items() if at < end}
    if not left:
        return
    consumer.assign({key: ranges[key][0] for key in left})
    while left:
        records = consumer.poll(_POLL_S, REPLAY_BATCH)
        wanted = [r for r in records if r.offset < ranges[TopicPartition(r.topic, r.partition)][1]]
        if wanted:
            yield wanted
        for key, end in [*left.items()]:
            if (consumer.position(key) or 0) >= end:
                del left[key]
                consumer.pause(key)


def _ranges(admin: Admin, topic: str) -> dict[TopicPartition, tuple[int, int, int]]:
    """Of each partition: where it starts, up to where it was replayed, where it ends."""
    keys = partitions_of(admin, topic)
    starts, ends = known_offsets(admin, keys, EARLIEST), known_offsets(admin, keys, LATEST)
    silent = [key.partition for key in keys if key not in starts or key not in ends]
    if silent:
        raise CommandError(f"no leader of {topic} answers for partitions {silent}", EXIT_FAILED)
    read = admin.group_offsets(replay_group(topic))
    found = {}
    for key in keys:
        at = read[key].offset if key in read else 0
        found[key] = starts[key], min(max(starts[key], at), ends[key]), ends[key]
    return found


def _with_dead_topics(admin: Admin) -> dict[str, dict[str, str | None]]:
    """Delay topics that have a topic for what is dead, by name, with their configs."""
    told = admin.topic_configs([DELIVERS_TO, DEAD_TO, *_POLICY])
    return {name: configs for name, configs in told.items() if configs.get(DEAD_TO)}


def _retry_configs(admin: Admin, name: str) -> dict[str, str | None]:
    configs = _configs(admin, name)
    if not configs.get(DEAD_TO) or retries_nothing(configs.get(RETRY_ATTEMPTS)):
        raise CommandError(f"{name} is no retry topic", EXIT_FAILED)
    return configs


def _configs(admin: Admin, name: str) -> dict[str, str | None]:
    return {entry.name: entry.value for entry in admin.describe_configs(ResourceType.TOPIC, name)}


def _span(option: str, text: str) -> int:
    try:
        return read_span(text)
    except InvalidRecordError:
        raise CommandError(
            f"{option} {text!r} is no time such as 500ms, 1s, 2m", EXIT_USAGE
        ) from None
