"""What others chose: judged before anything believes it, and made safe to show.

What other nodes send is decoded by one function (`decode_foreign`). Whatever goes wrong on the way,
from a bad field to nesting that ends the interpreter's stack, becomes one `RemoteProtocolError`,
which costs the stream that the bytes came on. The bounds say which numbers can be meant at all:
nothing outside them is journaled, appended or applied
(docs/decisions/0012-bounds-between-nodes.md).

Text that others chose (names of groups, clients and topics, refusals) could forge a line of the log
with a newline, or reach the terminal of an operator with an escape code. Whatever writes lines for
people (the renderer of the log, tables and messages of the command line) passes text through
`visible`; what machines read is encoded as JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from raftmq.errors import RemoteProtocolError
from raftmq.types import Buffer

T = TypeVar("T")
D = TypeVar("D", bound=Buffer)

TERM_MAX: Final = (1 << 31) - 1
"""A term is the leader epoch of Kafka's wire, an int32."""
TERM_JUMP_MAX: Final = 1 << 24
"""A replica adopts a term at most so far above its own. A node that was away for half a year, with
an election in every second of it, is not refused."""
POSITION_MAX: Final = 1 << 62
"""Of offsets, positions in a group's log, rounds of heartbeats, revisions and incarnations: sums
and differences of two still fit an int64."""
CLOCK_MS_MAX: Final = 1 << 48
NODE_ID_MAX: Final = (1 << 31) - 1
PARTITION_MAX: Final = (1 << 31) - 1
BARE_PAYLOAD_BYTES_MAX: Final = 1 << 20
"""Of an entry without records; the configuration of a group of 65,535 replicas fits."""
_REASON_LENGTH_MAX: Final = 200


def decode_foreign(what: str, decode: Callable[[D], T], data: D) -> T:
    """The value that `decode` reads from another node's bytes.

    Args:
        what: names the bytes in the error, such as "control message".
        decode: may raise anything at all.

    Raises:
        RemoteProtocolError: `decode` failed, however it did.
    """
    try:
        return decode(data)
    except RemoteProtocolError:
        raise
    except Exception as error:  # RecursionError, UnicodeDecodeError, MemoryError, or any other
        reason = f"{type(error).__name__}: {error}"[:_REASON_LENGTH_MAX]
        raise RemoteProtocolError(f"bad {what}: {reason}") from error


def check_bounds(what: str, value: int, value_max: int) -> None:
    """Refuse a number that no correct node sends.

    Raises:
        RemoteProtocolError: it lies outside [0, value_max].
    """
    if not 0 <= value <= value_max:
        raise RemoteProtocolError(f"{what} {value} is outside [0, {value_max}]")


def visible(text: str) -> str:
    r"""`text` on one line, with what does not print as an escape: `\n`, `\x1b`, `\u202e`.

    Controls of both sets, marks that change the direction of writing, separators of lines and
    paragraphs, lone surrogates and unassigned characters count as not printing.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def ascii_json(encoded: bytes) -> str:
    r"""JSON whose strings hold no character that does not print, but spelled `\uNNNN`.

    Line ends between the tokens of indented JSON stay. Within strings the encoder has escaped the
    controls below space already; those above (C1, DEL) and marks of direction it leaves raw.
    """
    text = encoded.decode()
    if text.isascii() and "\x7f" not in text:
        return text
    return "".join(c if c.isprintable() or c == "\n" else _json_escape(c) for c in text)


def _json_escape(char: str) -> str:
    pair = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{pair[i : i + 2].hex()}" for i in range(0, len(pair), 2))
