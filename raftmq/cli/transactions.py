"""`raftmq txn ...`: transactions that run, what they hold back, and the end of those that hang.

An open transaction holds the last stable offset of its partitions: consumers of committed records
wait there. One that a producer left behind is aborted by itself after its timeout. `txn abort ID`
does it now, as Kafka's fenceProducers: its producer is shut out. What a partition's log has open
and no transactional id owns is an *orphan* (`txn hanging` names it), which nothing ends but
`txn abort -t TOPIC:PARTITION`: an abort marker, as by kafka-transactions.sh.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

import typer
from attrs import frozen

from raftmq.cli import completion
from raftmq.cli.admin_port import find_addresses
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    format_time,
    known_offsets,
    open_admin,
    reported,
    show,
    show_json,
    text_of,
)
from raftmq.cli.console import EXIT_USAGE, out
from raftmq.cli.groups import parse_scope
from raftmq.cli.picture import ask_node
from raftmq.types import TopicPartition
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import LATEST, READ_COMMITTED
from raftmq_client.core.transaction_requests import (
    STATES,
    ProducerState,
    TransactionDescription,
    TransactionListing,
)

txn_app = typer.Typer(help="Transactions.", no_args_is_help=True)

LIST_COLUMNS: Final = ("TRANSACTIONAL-ID", "STATE", "RUNNING-S", "PRODUCER-ID", "COORDINATOR")
HELD_COLUMNS: Final = (
    "TOPIC",
    "PARTITION",
    "OPEN-AT",
    "LAST-STABLE",
    "BEHIND",
    "HELD-BY",
    "HELD-S",
)
HANGING_COLUMNS: Final = (
    "TOPIC",
    "PARTITION",
    "OPEN-AT",
    "BEHIND",
    "PRODUCER-ID",
    "HELD-BY",
    "HELD-S",
)
ORPHAN: Final = "(orphan)"
HANGING_S: Final = 900.0
"""`transaction.max.timeout.ms`, as it is by default: what runs for longer should have ended."""

ADMIN_TIMEOUT_S: Final = 3.0
"""How long an admin port may take to tell of groups."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


@frozen
class _Open:
    """An open transaction in a partition's log; `owner` None: an orphan."""

    key: TopicPartition
    producer: ProducerState
    owner: TransactionDescription | None

    @property
    def held_by(self) -> str:
        return ORPHAN if self.owner is None else self.owner.transactional_id

    @property
    def since_ms(self) -> int:
        """When it began; of an orphan only its last records are known."""
        return self.producer.last_timestamp_ms if self.owner is None else self.owner.started_at_ms


# ---- list ----


@txn_app.command("list")
def list_(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only in this state; repeatable. " + ", ".join(STATES) + ".",
        ),
    ] = None,
    producer_id: Annotated[
        list[int] | None,
        typer.Option("--producer-id", metavar="N", help="Only of this producer id; repeatable."),
    ] = None,
    longer_than: Annotated[
        float | None,
        typer.Option(
            "--longer-than", metavar="SECONDS", help="Only those that run for longer.", min=0
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="RE", help="Only ids that match it as a whole (RE2)."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List transactional ids, and for how long their transactions run.

    Examples: raftmq txn list --state Ongoing --longer-than 60; raftmq txn list --pattern 'bill.*'
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        listed = admin.list_transactions(
            states=state or (),
            producer_ids=producer_id or (),
            running_for_ms=-1 if longer_than is None else int(longer_than * 1000),
            pattern=pattern,
        )
        running = admin.describe_listed([one for one in listed if one.is_open])
        show(LIST_COLUMNS, [_listed(one, running) for one in listed], as_json=as_json)


def _listed(
    one: TransactionListing, running: Mapping[str, TransactionDescription]
) -> tuple[object, ...]:
    found = running.get(one.transactional_id)
    since_ms = -1 if found is None else found.started_at_ms
    return one.transactional_id, one.state, _age_s(since_ms), one.producer_id, one.coordinator


def _age_s(since_ms: int) -> int | None:
    """Seconds since then, by this host's clock; None where that is not known."""
    return None if since_ms < 0 else max(0, int(time.time() - since_ms / 1000))


# ---- describe ----


@txn_app.command()
def describe(
    transactional_id: Annotated[
        str,
        typer.Argument(
            metavar="ID", autocompletion=completion.transactional_ids, help="The transactional id."
        ),
    ],
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show a transactional id, and its partitions: where it is open, and what holds the last stable
    offset of each, this transaction or another one.

    Groups whose offsets are part of it are told by admin ports, of the oldest open transactions.

    Examples: raftmq txn describe billing-1
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        found = admin.describe_transaction(transactional_id)
        rows = _held_rows(admin, found)
        coordinator = admin.transaction_coordinator(transactional_id)
        groups = _groups_of(admin, found, timeout)
        if as_json:
            show_json(
                {
                    "TRANSACTIONAL-ID": found.transactional_id,
                    "STATE": found.state,
                    "PRODUCER-ID": found.producer_id,
                    "PRODUCER-EPOCH": found.producer_epoch,
                    "TIMEOUT-MS": found.timeout_ms,
                    "SINCE-MS": found.started_at_ms if found.started_at_ms >= 0 else None,
                    "COORDINATOR": coordinator,
                    "GROUPS": groups,
                    "PARTITIONS": [dict(zip(HELD_COLUMNS, row, strict=True)) for row in rows],
                }
            )
            return
        out(f"{found.transactional_id}: {found.state}  COORDINATOR: {coordinator}")
        out(
            f"PRODUCER-ID: {found.producer_id}  EPOCH: {found.producer_epoch}  "
            f"TIMEOUT: {found.timeout_ms} ms"
        )
        if found.started_at_ms >= 0:
            since = format_time(found.started_at_ms)
            out(f"SINCE: {since} ({_age_s(found.started_at_ms)} s)")
        if groups:
            out(f"GROUPS: {text_of(groups)}")
        if rows:
            show(HELD_COLUMNS, rows, as_json=False)


def _groups_of(admin: Admin, found: TransactionDescription, timeout_s: float) -> list[str] | None:
    """Groups of its running transaction, by the first admin port that answers; None: not told."""
    if not found.is_open:
        return []
    for address in find_addresses(admin):
        status = ask_node(address, min(timeout_s, ADMIN_TIMEOUT_S)).status
        if status is not None:
            oldest = status.get("transactions", {}).get("oldest_open", ())
            told = (one for one in oldest if one["transactional_id"] == found.transactional_id)
            return next((list(one["groups"]) for one in told), None)
    return None


def _held_rows(admin: Admin, found: TransactionDescription) -> list[tuple[object, ...]]:
    if not found.partitions:
        return []
    ends = known_offsets(admin, found.partitions, LATEST)
    stable = known_offsets(admin, found.partitions, LATEST, isolation=READ_COMMITTED)
    opened = _open_in(admin, found.partitions)
    rows: list[tuple[object, ...]] = []
    for key in found.partitions:
        there = opened.get(key, ())
        own = next((one for one in there if one.held_by == found.transactional_id), None)
        first = there[0] if there else None
        low, high = stable.get(key), ends.get(key)
        behind = None if low is None or high is None else max(0, high - low)
        rows.append(
            (
                *key,
                None if own is None else own.producer.open_since,
                low,
                behind,
                None if first is None else first.held_by,
                None if first is None else _age_s(first.since_ms),
            )
        )
    return rows


def _open_in(
    admin: Admin, partitions: Iterable[TopicPartition]
) -> dict[TopicPartition, list[_Open]]:
    """What the partitions' logs have open, the first one first; with those to whom it belongs."""
    producers = {
        key: sorted((one for one in told if one.open_since >= 0), key=lambda one: one.open_since)
        for key, told in admin.describe_producers(partitions).items()
    }
    ids = sorted({one.producer_id for told in producers.values() for one in told})
    owners: dict[tuple[int, TopicPartition], TransactionDescription] = {}
    if ids:
        listed = admin.list_transactions(producer_ids=ids)
        for found in admin.describe_listed(listed).values():
            if found.is_open:
                owners.update({(found.producer_id, key): found for key in found.partitions})
    return {
        key: [_Open(key, one, owners.get((one.producer_id, key))) for one in told]
        for key, told in producers.items()
    }


# ---- hanging ----

Topics = Annotated[
    list[str] | None,
    typer.Option(
        "-t",
        "--topic",
        metavar="TOPIC[:PARTITION,...]",
        autocompletion=completion.topics,
        help="Only there; repeatable.",
    ),
]


@txn_app.command()
def hanging(
    topic: Topics = None,
    longer_than: Annotated[
        float,
        typer.Option("--longer-than", metavar="SECONDS", help="Open for longer than that.", min=0),
    ] = HANGING_S,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show what partitions' logs have open for too long, and whose it is; an orphan is nobody's.

    Examples: raftmq txn hanging; raftmq txn hanging -t orders --longer-than 60
    """
    with reported():
        scopes = [parse_scope(word) for word in topic or ()]
        with open_admin(bootstrap, timeout) as admin:
            keys = _partitions(admin, scopes)
            ends = known_offsets(admin, keys, LATEST)
            stable = known_offsets(admin, keys, LATEST, isolation=READ_COMMITTED)
            held = [key for key in keys if key in stable and stable[key] < ends.get(key, 0)]
            opened = _open_in(admin, held) if held else {}
        rows = [
            (
                *key,
                one.producer.open_since,
                ends[key] - stable[key],
                one.producer.producer_id,
                one.held_by,
                _age_s(one.since_ms),
            )
            for key in held
            for one in opened[key]
            if (_age_s(one.since_ms) or 0) >= longer_than
        ]
        show(HANGING_COLUMNS, rows, as_json=as_json)


def _partitions(
    admin: Admin, scopes: Sequence[tuple[str, list[int] | None]]
) -> list[TopicPartition]:
    """Partitions of these topics, or of all."""
    wanted = dict(scopes)
    info = admin.cluster([name for name, _ in scopes] or None)
    keys = []
    for item in info.topics:
        if item.error_code:
            admin.topic(item.name)  # raises what is wrong with it
        numbers = wanted.get(item.name)
        every = [one.partition for one in item.partitions]
        keys += [TopicPartition(item.name, number) for number in numbers or every]
    return sorted(keys)


# ---- abort ----


@txn_app.command()
def abort(
    transactional_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            autocompletion=completion.transactional_ids,
            help="The transactional id whose transaction is to end.",
        ),
    ] = None,
    topic: Annotated[
        str | None,
        typer.Option(
            "-t",
            "--topic",
            metavar="TOPIC:PARTITION",
            autocompletion=completion.topics,
            help="Where an orphan is open, instead of an id.",
        ),
    ] = None,
    producer_id: Annotated[
        int | None,
        typer.Option("--producer-id", metavar="N", help="Which one, where several are open."),
    ] = None,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Abort a transaction that hangs. Its producer, should it live, is shut out (fenced).

    Of an id whatever runs at that moment is aborted. With -t an orphan, which no id owns: an abort
    marker is written to that partition.

    Examples: raftmq txn abort billing-1 --dry-run; raftmq txn abort -t orders:3
    """
    with reported():
        if (transactional_id is None) == (topic is None):
            raise CommandError("which one? give an ID, or -t TOPIC:PARTITION", EXIT_USAGE)
        if producer_id is not None and topic is None:
            raise CommandError("--producer-id goes with -t TOPIC:PARTITION", EXIT_USAGE)
        place = None if topic is None else _place(topic)
        with open_admin(bootstrap, timeout) as admin:
            if place is None:
                assert transactional_id is not None
                told = _abort_id(admin, transactional_id, dry_run=dry_run)
            else:
                told = _abort_orphan(admin, place, producer_id, dry_run=dry_run)
        if as_json:
            show_json(told)
        else:
            what = "would be aborted" if dry_run else "aborted"
            out(f"{what}: " + "  ".join(f"{name}: {value}" for name, value in told.items()))


def _abort_id(admin: Admin, name: str, *, dry_run: bool) -> dict[str, object]:
    found = admin.describe_transaction(name)
    if found.state != "Ongoing":
        hint = "`raftmq txn describe` shows which partitions owe their markers."
        raise CommandError(
            f"nothing runs under {name!r} that could be aborted: it is {found.state}",
            hint=hint if found.is_open else "",
        )
    if not dry_run:
        admin.fence_producer(name, found.timeout_ms)
    return {
        "TRANSACTIONAL-ID": name,
        "PRODUCER-ID": found.producer_id,
        "RUNNING-S": _age_s(found.started_at_ms),
        "PARTITIONS": len(found.partitions),
    }


def _place(word: str) -> TopicPartition:
    name, numbers = parse_scope(word)
    if numbers is None or len(numbers) != 1:
        raise CommandError(f"-t {word!r} is not TOPIC:PARTITION", EXIT_USAGE)
    return TopicPartition(name, numbers[0])


def _abort_orphan(
    admin: Admin, key: TopicPartition, producer_id: int | None, *, dry_run: bool
) -> dict[str, object]:
    there = [
        one
        for one in _open_in(admin, [key])[key]
        if producer_id is None or one.producer.producer_id == producer_id
    ]
    orphans = [one for one in there if one.owner is None]
    if not orphans and there:
        ids = ", ".join(repr(one.held_by) for one in there)
        raise CommandError(
            f"what is open in {key} is no orphan: it belongs to {ids}",
            hint="`raftmq txn abort ID` aborts it.",
        )
    if not orphans:
        raise CommandError(f"nothing is open in {key}" + (_of(producer_id)))
    if len(orphans) > 1:
        ids = ", ".join(str(one.producer.producer_id) for one in orphans)
        raise CommandError(f"{len(orphans)} are open in {key}: --producer-id {ids}?", EXIT_USAGE)
    (orphan,) = orphans
    if not dry_run:
        admin.abort_orphan(key, orphan.producer)
    return {
        "PARTITION": str(key),
        "PRODUCER-ID": orphan.producer.producer_id,
        "EPOCH": orphan.producer.producer_epoch,
        "OPEN-AT": orphan.producer.open_since,
        "HELD-S": _age_s(orphan.since_ms),
    }


def _of(producer_id: int | None) -> str:
    return "" if producer_id is None else f" of producer id {producer_id}"
