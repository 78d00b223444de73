"""Security settings in a file of Kafka's client properties, as Kafka's own tools read it.

    security.protocol=SASL_SSL
    sasl.mechanism=SCRAM-SHA-512
    sasl.jaas.config=...ScramLoginModule required username="u" password="p";
    ssl.truststore.type=PEM
    ssl.truststore.location=/etc/kafka/ca.pem

A file, so that no password stands in a command line. Of other properties nothing is taken, nor are
they passed over in silence. Owns the form of the file; what the words mean says `security.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from raftmq_spark.errors import OptionError

_ALLOWED: Final = ("security.", "sasl.", "ssl.")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}


def read_security_file(path: Path) -> dict[str, str]:
    """The `kafka.*` options that a file of properties stands for.

    Raises:
        OptionError: a line is no property, stands twice or has nothing to do with security.
        OSError: the file cannot be read.
    """
    found: dict[str, str] = {}
    for number, line in _logical_lines(path.read_text()):
        where = f"{path}, line {number}"
        match = re.fullmatch(r"((?:\\.|[^\\=:\s])+)\s*[=:]?\s*(.*)", line, re.DOTALL)
        if match is None:
            raise OptionError(f"{where}: not of the form name=value")
        name, value = _unescape(match[1]), _unescape(match[2]).rstrip()
        if not name.startswith(_ALLOWED):
            raise OptionError(f"{where}: {name!r} is none of security.*, sasl.*, ssl.*")
        if f"kafka.{name}" in found:
            raise OptionError(f"{where}: {name!r} is said twice")
        found[f"kafka.{name}"] = value
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash continues, without comments; and where each begins."""
    begun, parts = 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        line = line.lstrip()
        if not parts:
            if not line or line[0] in "#!":
                continue
            begun = number
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            parts.append(line[:-1])
            continue
        yield begun, "".join([*parts, line])
        parts = []


def _unescape(text: str) -> str:
    def one(match: re.Match[str]) -> str:
        if match[1] is not None:
            return chr(int(match[1], 16))
        return _ESCAPES.get(match[2], match[2])

    return re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", one, text, flags=re.DOTALL)
