"""`raftmq log ...`: look into a node's files by hand. Reads only; the node may run or not.

All reading is `raftmq.tools.inspect`'s; this module picks by file name and prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli.common import (
    AsJson,
    CommandError,
    format_time,
    parse_addresses,
    printable,
    reported,
    show,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_USAGE, note, out, out_json
from raftmq.metadata.credentials import masked
from raftmq.records import BatchHeader, read_records

log_app = typer.Typer(help="A node's log files.", no_args_is_help=True)

NODE_COLUMNS: Final = ("Node", "Topic", "Partition", "State", "Finding")
ASK_TIMEOUT_S: Final = 10.0
VERIFY_COLUMNS: Final = ("File", "Position", "State", "Finding")
KINDS: Final = {1: "election", 2: "membership", 3: "log start", 4: "seal"}
"""Kinds of bare entries, as the Raft core numbers them."""


@log_app.command()
def dump(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="NNN.log, .index, .timeindex or .txnindex, bare.entries or log-start.",
        ),
    ],
    records: Annotated[
        bool, typer.Option("-r", "--records", help="Show records, not only batches.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print a log file: the batches of a segment as kafka-dump-log does, or what else it holds.

    Examples: raftmq log dump DATA/topics/orders-ID/partition-0/00000000000000000000.log -r
    """
    with reported():
        file.stat()  # tells of an absent file by name
        if file.suffix == ".log":
            _dump_segment(file, records, as_json)
        elif file.suffix in (".index", ".timeindex"):
            _dump_index(file, as_json)
        elif file.suffix == ".txnindex":
            _dump_aborted(file, as_json)
        elif file.name == "bare.entries":
            _dump_bare(file, as_json)
        elif file.name == "log-start":
            _dump_start(file, as_json)
        else:
            raise CommandError(f"{file}: not a file of a log; `raftmq log dump --help`")


@log_app.command()
def verify(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="A partition's folder, or above.")
    ] = None,
    admin_ports: Annotated[
        str,
        typer.Option(
            "--admin",
            metavar="HOST:PORT,...",
            help="Ask running nodes what they found, here and on the nodes that these know of.",
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Check every byte of every partition below a folder; ends with 1 when there is damage.

    What a node mends by itself (an index, a torn tail) is listed, but is no damage. Beside a
    running node its unfinished appends may look torn; with --admin it tells itself what its
    background check and its reads found, what was repaired, and what still is damaged.

    Examples: raftmq log verify DATA; raftmq log verify --admin 127.0.0.1:9292
    """
    with reported():
        if (folder is None) == (not admin_ports):
            raise CommandError("name a folder, or admin ports with --admin", EXIT_USAGE)
        if folder is not None:
            _verify_folder(folder, as_json)
        else:
            _verify_nodes(parse_addresses(admin_ports, "--admin"), as_json)


def _verify_nodes(addresses: list[str], as_json: bool) -> None:
    from raftmq.cli.picture import take_picture

    rows: list[tuple[object, ...]] = []
    is_bad = False
    for report in take_picture(None, addresses, ASK_TIMEOUT_S).reports:
        status = report.status
        if status is None:
            rows.append((report.address, None, None, "unknown", report.failure))
            is_bad = True
            continue
        checks = status["checks"]
        rows.append(
            (
                status["node_id"],
                None,
                None,
                "checked",
                f"{checks['scrubbed_batches']} batches, {checks['scrubbed_bytes']} bytes; damaged "
                f"ranges found {checks['damages_found']}, repaired {checks['damages_repaired']}",
            )
        )
        for row in status["partitions"]:
            for start, end in row["damaged"]:
                is_bad = True
                rows.append(
                    (
                        status["node_id"],
                        row["topic"],
                        row["partition"],
                        "damaged",
                        f"offsets {start} to {end - 1}, not repaired yet",
                    )
                )
    show(NODE_COLUMNS, rows, as_json=as_json)
    if is_bad:
        raise typer.Exit(EXIT_FAILED)


def _verify_folder(folder: Path, as_json: bool) -> None:
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import verify_folder

    folders = sorted({path.parent for path in folder.rglob("log-start")})
    if not folders:
        raise CommandError(f"no partition (a folder with a log-start) below {folder}")
    rows: list[tuple[object, ...]] = []
    has_damage = False
    for partition in folders:
        findings = verify_folder(RealDisk(is_read_only=True), str(partition))
        has_damage = has_damage or any(item.is_damage for item in findings)
        rows.extend(
            (
                item.path,
                item.position if item.position >= 0 else None,
                "damaged" if item.is_damage else "will be mended",
                item.text,
            )
            for item in findings
        )
        if not findings:
            rows.append((str(partition), None, "sound", ""))
    show(VERIFY_COLUMNS, rows, as_json=as_json)
    if has_damage:
        raise typer.Exit(EXIT_FAILED)


def _dump_segment(path: Path, records: bool, as_json: bool) -> None:
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import ZEROS, base_offset_of, read_segment

    try:
        base = base_offset_of(str(path))
    except ValueError as error:
        raise CommandError(str(error)) from error
    problems = 0
    file = RealDisk(is_read_only=True).open(str(path))
    try:
        for item in read_segment(file, base):
            if item.header is None or not item.is_sound:
                problems += item.note != ZEROS  # reserved room, or what the next start cuts off
                note(f"raftmq: {path}: {item.size} bytes at position {item.position}: {item.note}")
                continue
            batch = file.pread(item.size, item.position) if records else b""
            _print_batch(item.position, item.header, batch, as_json)
    finally:
        file.close()
    if problems:
        raise typer.Exit(EXIT_FAILED)


def _print_batch(position: int, header: BatchHeader, batch: bytes, as_json: bool) -> None:
    if as_json:
        content = {
            "position": position,
            "size": header.size,
            "codec": header.codec.name.lower(),
            "next_offset": header.next_offset,
            **header._asdict(),
        }
        if batch:
            content["records"] = [*_records(batch)]
        _print_json(content)
        return
    out(_batch_line(position, header))
    for record in _records(batch) if batch else ():
        out(f"| offset: {record['offset']} {_record_text(record)}")


def _dump_index(path: Path, as_json: bool) -> None:
    from raftmq.log.indexes import DamagedIndexError
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import read_index

    try:
        _summary, pairs = read_index(RealDisk(is_read_only=True), str(path))
    except (DamagedIndexError, ValueError) as error:
        raise CommandError(f"{path}: {error}; the node rebuilds it") from error
    columns = ("Offset", "Position") if path.suffix == ".index" else ("Timestamp", "Offset")
    show(columns, pairs, as_json=as_json)


def _dump_aborted(path: Path, as_json: bool) -> None:
    from raftmq.log.indexes import DamagedIndexError
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import read_aborted

    try:
        covered, rows = read_aborted(RealDisk(is_read_only=True), str(path))
    except (DamagedIndexError, ValueError) as error:
        raise CommandError(f"{path}: {error}; the node rebuilds it") from error
    show(("ProducerId", "FirstOffset", "MarkerOffset"), rows, as_json=as_json)
    note(f"all aborted transactions with markers below offset {covered}")


def _dump_bare(path: Path, as_json: bool) -> None:
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import read_bare_entries

    rows = [
        (
            entry.index,
            entry.leader_epoch,
            entry.base_offset,
            KINDS.get(entry.kind, entry.kind),
            len(entry.payload),
            "whole" if is_whole else "one copy damaged",
        )
        for entry, is_whole in read_bare_entries(RealDisk(is_read_only=True), str(path))
    ]
    columns = ("Index", "LeaderEpoch", "BaseOffset", "Kind", "PayloadBytes", "State")
    show(columns, rows, as_json=as_json)


def _dump_start(path: Path, as_json: bool) -> None:
    from raftmq.runtime.disk import RealDisk
    from raftmq.tools.inspect import read_log_start

    local = read_log_start(RealDisk(is_read_only=True), str(path))
    if local is None:
        raise CommandError(f"{path}: both copies are damaged")
    start = local.log_start
    rows = [
        ("Offset", start.offset),
        ("BaseOffset", start.base_offset),
        ("Index", start.index),
        ("PreviousEpoch", start.previous_epoch),
        ("ConfigurationBytes", len(start.configuration)),
        ("StateBytes", len(start.state)),
        ("TruncatedEnd", local.truncated_end),
        ("Pending", local.pending.name.lower()),
    ]
    show(("Field", "Value"), rows, as_json=as_json)


def _batch_line(position: int, header: BatchHeader) -> str:
    last = header.next_offset - 1
    return (
        f"baseOffset: {header.base_offset} lastOffset: {last} count: {header.record_count} "
        f"baseSequence: {header.base_sequence} lastSequence: {header.last_sequence} "
        f"producerId: {header.producer_id} producerEpoch: {header.producer_epoch} "
        f"partitionLeaderEpoch: {header.leader_epoch} "
        f"isTransactional: {str(header.is_transactional).lower()} "
        f"isControl: {str(header.is_control).lower()} position: {position} "
        f"CreateTime: {header.max_timestamp} ({format_time(header.max_timestamp)}) "
        f"size: {header.size} magic: {header.magic} "
        f"compresscodec: {header.codec.name.lower()} crc: {header.crc} isvalid: true"
    )


def _records(batch: bytes) -> Iterator[dict[str, Any]]:
    for record in read_records(batch):
        yield {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": printable(record.key),
            "value": printable(None if record.value is None else masked(record.value)),
            "headers": [[name, printable(value)] for name, value in record.headers],
        }


def _record_text(record: dict[str, Any]) -> str:
    return (
        f"CreateTime: {record['timestamp']} headerKeys: {[h[0] for h in record['headers']]} "
        f"key: {record['key']} payload: {record['value']}"
    )


def _print_json(content: object) -> None:
    out_json(msgspec.json.encode(content))
