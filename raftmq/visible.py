"""Text that a stranger chose, made safe to show: names of groups, clients and topics, refusals.

A newline in a group's name would forge a line of the log, an escape code in it would reach the
terminal of an operator. Whatever writes lines for people (the renderer of the log, tables and
messages of the command line) passes text through here; what machines read is encoded as JSON.
"""

from __future__ import annotations

__all__ = ["ascii_json", "visible"]


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
