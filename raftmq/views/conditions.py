"""What records a view shows: a condition over their headers and their key.

The language is a subset of JMS message selectors: the same text means the same there, but for two
things that Kafka's headers have and properties of JMS do not: a name may come twice, and `not` of a
comparison with nothing is true.

| condition | matches a record |
|---|---|
| `region = 'eu'`, `region in ('eu', 'us')` | with a header of that name that has such a value |
| `region <> 'eu'`, `region not in (...)` | with one that has another value |
| `region like 'eu-%'`, `region not like 'eu-%'` | the same with values that begin so |
| `region is not null`, `region is null` | with, or without such a header that has a value |
| `key = 'order-7'` and so on | the same of the record's key |
| `not ...`, `... and ...`, `... or ...`, `(...)` | as usual; `not` binds closest, `or` least |

Values are compared as UTF-8 bytes. A header without a value counts as one that is missing. A name
that is no plain word, or is a word of the language (as `key`), stands in double quotes; values
stand in single or double ones, in which a quote of the same kind is written twice. Words of the
language may be in capitals.

Each comparison looks at every value of its name once, so all comparisons of a name are one entry of
a table, and what a value says of them is the bits of a number: `=` and `in`, however long, are one
look-up. The number decides; what it decides is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Final, TypeAlias

from attrs import define, field, frozen

from raftmq.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    from lark import Lark, Token, Tree
    from lark.exceptions import UnexpectedInput

TEXT_BYTES_MAX: Final = 4096
TERMS_MAX: Final = 256
"""Most comparisons of a condition."""
DEPTH_MAX: Final = 32
"""How deep parentheses and `not` may lie in each other."""
_DECIDED_MAX: Final = 4096
_NEEDLES_MAX: Final = 8  # more take longer to look for than records to walk
_EXCERPT: Final = 20

Headers: TypeAlias = Sequence[tuple[bytes, bytes | None]]

# The lexer knows all words everywhere, so that none of them is a header's name by chance.
_GRAMMAR: Final = r"""
?start: any
?any: all (_OR all)*
?all: negation (_AND negation)*
?negation: _NOT negation -> negation
    | "(" any ")" -> group
    | subject "=" value -> equal
    | subject "<>" value -> differs
    | subject _IN _list -> is_in
    | subject _NOT _IN _list -> is_not_in
    | subject _LIKE value _escape? -> like
    | subject _NOT _LIKE value _escape? -> not_like
    | subject _IS _NULL -> is_null
    | subject _IS _NOT _NULL -> is_not_null
_list: "(" value ("," value)* ")"
_escape: _ESCAPE value
subject: WORD | DOUBLE | KEY
value: SINGLE | DOUBLE
_OR.2: /or(?![\w$.-])/i
_AND.2: /and(?![\w$.-])/i
_NOT.2: /not(?![\w$.-])/i
_IN.2: /in(?![\w$.-])/i
_IS.2: /is(?![\w$.-])/i
_LIKE.2: /like(?![\w$.-])/i
_NULL.2: /null(?![\w$.-])/i
_ESCAPE.2: /escape(?![\w$.-])/i
KEY.2: /key(?![\w$.-])/i
WORD: /[A-Za-z_$][A-Za-z0-9_$.-]*/
SINGLE: /'(?:[^']|'')*'/
DOUBLE: /"(?:[^"]|"")*"/
%ignore /[ \t\r\n]+/
"""

# What stands where a token was expected; the first that was is told.
_EXPECTED: Final = (
    ("SINGLE", "a value in quotes"),
    ("KEY", "the name of a header, or key"),
    ("EQUAL", "=, <>, in, like, is or not"),
    ("_LIKE", "in or like"),
    ("_NULL", "null or not null"),
    ("COMMA", "a comma or a parenthesis"),
    ("LPAR", "a list in parentheses"),
    ("RPAR", "and, or, or a parenthesis"),
    ("_AND", "and, or, or the end"),
    ("$END", "and, or, or the end"),
)


class BadConditionError(KafkaError):
    """A text that is no condition (INVALID_CONFIG).

    Attributes:
        reason: what is wrong.
        position: where, in characters of the text from 0 on.
    """

    code = ErrorCode.INVALID_CONFIG

    def __init__(self, reason: str, position: int, text: str = "") -> None:
        rest = text[position : position + _EXCERPT]
        where = f" (before {rest!r})" if rest else ""
        super().__init__(f"{reason}, at position {position} of the condition{where}")
        self.reason = reason
        self.position = position


class Test(Enum):
    """What a comparison asks of one value."""

    __test__ = False  # nothing for pytest

    EQUAL = "="
    PREFIX = "like"
    PRESENT = "is not null"


@frozen(slots=True)
class Term:
    """One comparison.

    Attributes:
        name: of the header, None for the record's key.
        values: of which one has to be equal, or to be how it begins; none for PRESENT.
        is_negated: a value must not be so, but there has to be one.
    """

    name: bytes | None
    test: Test
    values: tuple[bytes, ...] = ()
    is_negated: bool = False


@frozen(slots=True)
class Not:
    of: Node


@frozen(slots=True)
class All:
    of: tuple[Node, ...]


@frozen(slots=True)
class Any:
    of: tuple[Node, ...]


Node: TypeAlias = Term | Not | All | Any


@define(slots=True, eq=False)
class _Bits:
    """What the values of one name say, each as the bits of the terms that are then true."""

    present: int = 0
    exact: dict[bytes, int] = field(factory=dict)
    others: list[tuple[int, Callable[[bytes], bool]]] = field(factory=list)

    def add(self, bit: int, term: Term) -> None:
        if term.test is Test.PRESENT:
            self.present |= bit
        elif term.test is Test.EQUAL and not term.is_negated:
            for value in term.values:
                self.exact[value] = self.exact.get(value, 0) | bit
        else:
            self.others.append((bit, _test_of(term)))

    def of(self, value: bytes) -> int:
        """The terms that this value makes true."""
        found = self.present | self.exact.get(value, 0)
        for bit, test in self.others:
            if test(value):
                found |= bit
        return found


def _test_of(term: Term) -> Callable[[bytes], bool]:
    values = term.values
    if term.test is Test.EQUAL:
        others = frozenset(values)
        return lambda value: value not in others
    if term.is_negated:
        return lambda value: not value.startswith(values)
    return lambda value: value.startswith(values)


class Condition:
    """A parsed condition. Any thread may use it.

    Attributes:
        text: as it was given, without white space around it.
        node: what it says.
        reads_key: it looks at keys.
        reads_headers: it looks at headers.
        needles: of each of these groups at least one byte string is in every record that matches.
        verdicts: what was found of keys and headers as they stand in batches; kept small by
            `batches.py`.
    """

    __slots__ = (
        "_decided",
        "_headers",
        "_key",
        "_terms",
        "needles",
        "node",
        "reads_headers",
        "reads_key",
        "text",
        "verdicts",
    )

    def __init__(self, text: str, node: Node) -> None:
        self.text = text
        self.node = node
        self._terms = {term: 1 << number for number, term in enumerate(dict.fromkeys(terms(node)))}
        self._headers: dict[bytes, _Bits] = {}
        self._key: _Bits | None = None
        for term, bit in self._terms.items():
            if term.name is None:
                self._key = self._key or _Bits()
                self._key.add(bit, term)
            else:
                self._headers.setdefault(term.name, _Bits()).add(bit, term)
        self._decided: dict[int, bool] = {}
        self.reads_key = self._key is not None
        self.reads_headers = bool(self._headers)
        self.needles = tuple(each for each in _needles(node) if len(each) <= _NEEDLES_MAX)
        self.verdicts: dict[tuple[bytes | None, bytes], bool] = {}

    def __repr__(self) -> str:
        return f"Condition({self.text!r})"

    def matches(self, key: bytes | None, headers: Headers) -> bool:
        """True for records that have such a key and such headers (names and values)."""
        true = 0
        tables = self._headers
        for name, value in headers:
            bits = tables.get(name)
            if bits is not None and value is not None:
                true |= bits.of(value)
        if key is not None and self._key is not None:
            true |= self._key.of(key)
        verdict = self._decided.get(true)
        if verdict is None:
            verdict = self._decide(true)
        return verdict

    def _decide(self, true: int) -> bool:
        if len(self._decided) >= _DECIDED_MAX:
            self._decided.clear()
        verdict = self._decided[true] = self._holds(self.node, true)
        return verdict

    def _holds(self, node: Node, true: int) -> bool:
        if isinstance(node, Term):
            return bool(true & self._terms[node])
        if isinstance(node, Not):
            return not self._holds(node.of, true)
        holds = (self._holds(each, true) for each in node.of)
        return all(holds) if isinstance(node, All) else any(holds)


def terms(node: Node) -> Iterator[Term]:
    """All comparisons of a condition, from left to right."""
    if isinstance(node, Term):
        yield node
    else:
        for each in (node.of,) if isinstance(node, Not) else node.of:
            yield from terms(each)


def _needles(node: Node) -> tuple[tuple[bytes, ...], ...]:
    """Groups of which each has a needle in every record that matches, the best ones first."""
    if isinstance(node, Term):
        is_told = not node.is_negated and node.values and all(node.values)
        return ((node.values,) if is_told else ()) + (((node.name,),) if node.name else ())
    if isinstance(node, Not):
        return ()
    parts = [_needles(each) for each in node.of]
    if isinstance(node, All):
        return tuple(dict.fromkeys(group for part in parts for group in part))
    if not all(parts):
        return ()
    return (tuple(dict.fromkeys(needle for part in parts for needle in part[0])),)


# ---- parsing ----


def parse_condition(text: str) -> Condition:
    """What a text says.

    Raises:
        BadConditionError: it is no condition, or a larger one than is allowed.
    """
    from lark.exceptions import UnexpectedInput

    _check_text(text)
    try:
        tree = _parser().parse(text)
    except UnexpectedInput as error:
        raise _bad(error, text) from error
    builder = _Builder(text)
    node = builder.build(tree, 0)
    return Condition(text.strip(), node)


def prepare_parser() -> None:
    """Do what the first condition of a process would wait for: 70 ms, in which a thread leaves the
    loop its turns."""
    _parser()


def _check_text(text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadConditionError("no character of Unicode", error.start) from error
    if size > TEXT_BYTES_MAX:
        raise BadConditionError(f"a text of {size} bytes, at most {TEXT_BYTES_MAX}", 0)
    if not text.strip():
        raise BadConditionError("an empty text", 0)


@cache
def _parser() -> Lark:
    """Made when the first condition is parsed: most nodes have none, and Lark takes 100 ms."""
    from lark import Lark

    return Lark(_GRAMMAR, parser="lalr", lexer="basic", propagate_positions=True)


def _bad(error: UnexpectedInput, text: str) -> BadConditionError:
    from lark.exceptions import UnexpectedToken

    if not isinstance(error, UnexpectedToken):
        position = error.pos_in_stream or 0
        if text[position] in "'\"":
            return BadConditionError("a quote that is not closed", position, text)
        if text.startswith("!=", position):
            return BadConditionError("<> is expected for !=", position, text)
        reason = "a character that is none of the language (values stand in quotes)"
        return BadConditionError(reason, position, text)
    token = error.token
    at_end = token.type == "$END"
    position = len(text) if at_end or token.start_pos is None else token.start_pos
    accepted = error.accepts or error.expected
    expected = next((what for name, what in _EXPECTED if name in accepted), "something else")
    return BadConditionError(f"{expected} is expected", position, text)


class _Builder:
    """Makes nodes of a tree. It goes down no deeper than `DEPTH_MAX`, whatever the tree."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._terms = 0

    def _error(self, reason: str, of: Tree[Token]) -> BadConditionError:
        return BadConditionError(reason, of.meta.start_pos, self._text)

    def build(self, tree: Tree[Token], depth: int) -> Node:
        """The node of a tree that lies so deep.

        Raises:
            BadConditionError: too deep, too many comparisons, a pattern that is no prefix.
        """
        parts = [part for part in tree.children if not isinstance(part, str)]
        if tree.data in ("any", "all"):
            nodes = tuple(self.build(part, depth) for part in parts)
            return Any(nodes) if tree.data == "any" else All(nodes)
        if tree.data in ("negation", "group"):
            if depth == DEPTH_MAX:
                raise self._error(f"more than {DEPTH_MAX} levels", tree)
            node = self.build(parts[0], depth + 1)
            return node if tree.data == "group" else Not(node)
        self._terms += 1
        if self._terms > TERMS_MAX:
            raise self._error(f"more than {TERMS_MAX} comparisons", tree)
        return self._term(tree.data, self._name(parts[0]), parts[1:])

    def _name(self, subject: Tree[Token]) -> bytes | None:
        (token,) = subject.scan_values(lambda _: True)
        if token.type == "KEY":
            return None
        name = _unquoted(token) if token.type == "DOUBLE" else str(token)
        if not name:
            raise self._error("the name of a header is expected", subject)
        return name.encode()

    def _term(self, kind: str, name: bytes | None, operands: list[Tree[Token]]) -> Node:
        if kind == "is_not_null":
            return Term(name, Test.PRESENT)
        if kind == "is_null":
            return Not(Term(name, Test.PRESENT))
        is_negated = kind in ("differs", "is_not_in", "not_like")
        if kind in ("like", "not_like"):
            test, value = self._pattern(operands)
            return Term(name, test, (value,), is_negated)
        values = (_value(operand).encode() for operand in operands)
        return Term(name, Test.EQUAL, tuple(dict.fromkeys(values)), is_negated)

    def _pattern(self, operands: list[Tree[Token]]) -> tuple[Test, bytes]:
        """What values are to be, or how they begin."""
        pattern, escape = _value(operands[0]), None
        if len(operands) > 1:
            escape = _value(operands[1])
            if len(escape) != 1:
                raise self._error("one character is expected", operands[1])
        plain: list[str] = []
        characters = iter(pattern)
        for character in characters:
            if character == escape:
                following = next(characters, "")
                if following not in (escape, "%", "_") or not following:
                    raise self._error("what is escaped is %, _ or the escape itself", operands[0])
                plain.append(following)
            elif character == "_":
                reason = "_ stands for any character, which there is not: write ~_ ... escape '~'"
                raise self._error(reason, operands[0])
            elif character == "%":
                if next(characters, None) is not None:
                    raise self._error("% stands at the end of a pattern alone", operands[0])
                return Test.PREFIX, "".join(plain).encode()
            else:
                plain.append(character)
        return Test.EQUAL, "".join(plain).encode()


def _value(operand: Tree[Token]) -> str:
    (token,) = operand.scan_values(lambda _: True)
    return _unquoted(token)


def _unquoted(token: str) -> str:
    quote = token[0]
    return token[1:-1].replace(quote * 2, quote)
