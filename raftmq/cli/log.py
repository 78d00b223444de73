"""`raftmq log ...`: look into a node's files by hand. Reads only; the node may run or not."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli.common import (
    AsJson,
    CommandError,
    format_time,
    printable,
    reported,
    show,
)
from raftmq.cli.console import note, out
from raftmq.cli.main import EXIT_FAILED
from raftmq.errors import CorruptBatchError
from raftmq.records import (
    HEADER_SIZE,
    LENGTH_OVERHEAD,
    BatchHeader,
    check_batch,
    parse_header,
    read_records,
)

log_app = typer.Typer(help="A node's log files.", no_args_is_help=True)

VERIFY_COLUMNS: Final = ("File", "Batches", "FirstOffset", "EndOffset", "Bytes", "State")


@log_app.command()
def dump(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A segment, NNN.log.")],
    records: Annotated[
        bool, typer.Option("-r", "--records", help="Show records, not only batches.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Print the batches of a segment, as kafka-dump-log does.

    Examples: raftmq log dump DATA/topics/orders-ID/partition-0/00000000000000000000.log -r
    """
    with reported():
        state = ""
        for position, header, batch, problem in walk(file):
            state = problem
            if problem:
                break
            if as_json:
                content = _batch_json(position, header)
                if records:
                    content["records"] = _records(batch)
                out(msgspec.json.encode(content).decode())
                continue
            out(_batch_line(position, header))
            if records:
                for record in _records(batch):
                    out(f"| offset: {record['offset']} {_record_text(record)}")
        if state:
            note(f"raftmq: {file}: {state}")
            raise typer.Exit(EXIT_FAILED)


@log_app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A partition's folder, or above.")],
    as_json: AsJson = False,
) -> None:
    """Check every batch of every segment below a folder; ends with 1 when something is wrong.

    Bytes after the last whole batch of the newest segment may be an append that a running node has
    under way, or that a crash cut off: recovery drops them.

    Examples: raftmq log verify DATA/topics/orders-ID/partition-0
    """
    with reported():
        files = sorted(folder.rglob("*.log"))
        if not files:
            raise CommandError(f"no segments (*.log) below {folder}")
        newest = {path.parent: path for path in files}
        expected: dict[Path, int] = {}
        rows = []
        is_sound = True
        for path in files:
            row, end, problem = _verify_one(path, expected.get(path.parent))
            expected[path.parent] = end
            if problem:
                is_torn = path == newest[path.parent] and problem.startswith("cut off")
                is_sound = is_sound and is_torn
                problem = f"{problem} (unfinished tail)" if is_torn else problem
            rows.append((*row, problem or "sound"))
        show(VERIFY_COLUMNS, rows, as_json=as_json)
        if not is_sound:
            raise typer.Exit(EXIT_FAILED)


def walk(file: Path) -> Iterator[tuple[int, BatchHeader, memoryview, str]]:
    """Each batch with its position; a problem ends the walk and stands in the last item."""
    with file.open("rb") as opened:
        if file.stat().st_size == 0:
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            # A copy: views of it may outlive the mapping, and a node may truncate the file.
            yield from _walk(memoryview(mapped[:]))


def _walk(data: memoryview) -> Iterator[tuple[int, BatchHeader, memoryview, str]]:
    position = 0
    nothing = memoryview(b"")
    blank = parse_header(bytes(HEADER_SIZE))
    while position < len(data):
        left = len(data) - position
        if left < HEADER_SIZE:
            yield position, blank, nothing, f"cut off at position {position}: {left} bytes"
            return
        header = parse_header(data, position)
        end = position + header.size
        if header.batch_length < HEADER_SIZE - LENGTH_OVERHEAD or end > len(data):
            if not any(data[position:]):
                yield position, blank, nothing, f"cut off at position {position}: only zeros"
                return
            what = "cut off" if end > len(data) else "bad length"
            yield position, blank, nothing, f"{what} at position {position}"
            return
        try:
            check_batch(data[position:end])
        except CorruptBatchError as error:
            message = f"damaged at position {position}, offset {header.base_offset}: {error}"
            yield position, header, nothing, message
            return
        yield position, header, data[position:end], ""
        position = end


def _verify_one(path: Path, expected: int | None) -> tuple[tuple[object, ...], int, str]:
    batches = 0
    first: int | None = None
    end = int(path.stem) if path.stem.isdigit() else 0
    problem = ""
    if expected is not None and end != expected:
        problem = f"begins at {end}, the segment before ends at {expected}"
    for _position, header, _batch, trouble in walk(path):
        if trouble:
            problem = trouble
            break
        if header.base_offset < end:
            problem = f"offset {header.base_offset} after {end}"
            break
        first = header.base_offset if first is None else first
        end = header.next_offset
        batches += 1
    return (str(path), batches, first, end, path.stat().st_size), end, problem


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


def _batch_json(position: int, header: BatchHeader) -> dict[str, Any]:
    return {
        "position": position,
        "size": header.size,
        "codec": header.codec.name.lower(),
        "next_offset": header.next_offset,
        **header._asdict(),
    }


def _records(batch: memoryview) -> list[dict[str, Any]]:
    return [
        {
            "offset": record.offset,
            "timestamp": record.timestamp,
            "key": printable(record.key),
            "value": printable(record.value),
            "headers": [[name, printable(value)] for name, value in record.headers],
        }
        for record in read_records(batch)
    ]


def _record_text(record: dict[str, Any]) -> str:
    return (
        f"CreateTime: {record['timestamp']} headerKeys: {[h[0] for h in record['headers']]} "
        f"key: {record['key']} payload: {record['value']}"
    )
