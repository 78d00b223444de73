"""Names of clients out of their certificates: Kafka's `ssl.principal.mapping.rules` (KIP-371).

A list of rules with commas between, tried in order on the subject as Java writes it (RFC 2253):
`DEFAULT` takes it as it is; `RULE:pattern/replacement/` applies where the pattern matches all of
it, and gives the replacement, with `$1` for the first group and so on; `/L` and `/U` at the end
make small or capital letters of it. In both parts a slash is written with a backslash before it.

Patterns are RE2's, so no subject takes long; unlike Java's they have no lookahead, lookbehind or
backreferences. A replacement is inserted once, where Java inserts it again if the pattern also
matches the empty text. A text that cannot be read is refused, with the place of its fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NoReturn

from attrs import frozen

from raftmq.errors import RaftmqError

DEFAULT_RULES: Final = "DEFAULT"
_PART: Final = r"(?:\\.|[^\\/])*"
_RULE: Final = re.compile(rf"RULE:(?P<pattern>{_PART})/(?P<replacement>{_PART})/(?P<case>[LU]?)")
_SPACE: Final = re.compile(r"\s*")
_PIECE: Final = re.compile(r"\\(?P<plain>.)|\$(?P<group>\d+)|\$\{(?P<name>\w+)\}|(?P<odd>[\\$])")
_CASES: Final[dict[str, Callable[[str], str]]] = {"": str, "L": str.lower, "U": str.upper}


class MappingRuleError(RaftmqError):
    """Rules that cannot be read; the message says where, counted from 1, and why."""


@frozen(slots=True)
class _Rule:
    """One rule; without a pattern it is DEFAULT."""

    pattern: Any = None
    pieces: tuple[str | int, ...] = ()
    case: str = ""

    def apply(self, subject: str) -> str | None:
        if self.pattern is None:
            return subject
        found = self.pattern.fullmatch(subject)
        if found is None:
            return None
        # A group that takes no part in the match is nothing, as in Java.
        words = [one if isinstance(one, str) else found.group(one) or "" for one in self.pieces]
        return _CASES[self.case]("".join(words))


@frozen(slots=True)
class PrincipalMapper:
    """The rules of one listener."""

    rules: tuple[_Rule, ...]

    def name_of(self, subject: str) -> str | None:
        """The name that the first rule which applies gives; None where none does or it is empty."""
        for rule in self.rules:
            name = rule.apply(subject)
            if name is not None:
                return name or None
        return None


def read_mapping_rules(text: str) -> PrincipalMapper:
    """Read rules.

    Raises:
        MappingRuleError: they cannot be.
    """
    rules: list[_Rule] = []
    at = _past_space(text, 0)
    while at < len(text):
        if text[at] == ",":  # an empty one is passed over, as in Kafka
            at = _past_space(text, at + 1)
            continue
        if text.startswith(DEFAULT_RULES, at):
            rules.append(_Rule())
            at += len(DEFAULT_RULES)
        else:
            found = _RULE.match(text, at)
            if found is None:
                _refuse(at, "neither DEFAULT nor RULE:pattern/replacement/, /L or /U")
            rules.append(_read_rule(found))
            at = found.end()
        at = _past_space(text, at)
        if at < len(text) and text[at] != ",":
            _refuse(at, "a comma or the end is wanted")
    if not rules:
        raise MappingRuleError("no rules")
    return PrincipalMapper(tuple(rules))


def _read_rule(found: re.Match[str]) -> _Rule:
    import re2  # not in the processes that only look at a configuration without rules

    options = re2.Options()
    options.log_errors = False
    try:
        pattern = re2.compile(found["pattern"], options)
    except re2.error as error:
        why = error.args[0]
        why = why.decode("utf-8", "replace") if isinstance(why, bytes) else str(why)
        _refuse(found.start("pattern"), f"no pattern of RE2: {why}")
    pieces: list[str | int] = []
    text, past = found["replacement"], 0
    for piece in _PIECE.finditer(text):
        pieces.append(text[past : piece.start()])
        past = piece.end()
        at = found.start("replacement") + piece.start()
        if piece["plain"] is not None:
            pieces.append(piece["plain"])
        elif piece["group"] is not None:
            pieces += _numbered(piece["group"], pattern.groups, at)
        elif piece["name"] is not None:
            if piece["name"] not in pattern.groupindex:
                _refuse(at, f"the pattern has no group {piece['name']!r}")
            pieces.append(pattern.groupindex[piece["name"]])
        else:
            _refuse(at, f"{piece['odd']} without what belongs to it")
    pieces.append(text[past:])
    return _Rule(pattern, tuple(one for one in pieces if one != ""), found["case"])


def _numbered(digits: str, groups: int, at: int) -> list[str | int]:
    """`$12` is the group 12, or 1 and the text 2 where there are fewer than 12."""
    if not groups and digits[0] != "0":
        _refuse(at, "the pattern has no groups")
    for size in range(len(digits), 0, -1):
        if int(digits[:size]) <= groups:
            return [int(digits[:size]), digits[size:]]
    return [f"${digits}"]  # as Kafka does: no such group is text


def _past_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "nothing is space, too"
    return found.end()


def _refuse(at: int, why: str) -> NoReturn:
    raise MappingRuleError(f"at character {at + 1}: {why}")
