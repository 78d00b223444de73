"""Conditions: what they mean, what is refused and where, against a naive evaluator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import ErrorCode
from raftmq.views import conditions
from raftmq.views.conditions import (
    DEPTH_MAX,
    TERMS_MAX,
    TEXT_BYTES_MAX,
    All,
    Any,
    BadConditionError,
    Headers,
    Node,
    Not,
    Term,
    Test,
    parse_condition,
    terms,
)

EU, US = (b"region", b"eu"), (b"region", b"us")


def matches(text: str, headers: Headers = (), key: bytes | None = None) -> bool:
    return parse_condition(text).matches(key, headers)


@pytest.mark.parametrize(
    ("text", "missing", "eu", "us", "both", "without_value"),
    [
        ("region = 'eu'", False, True, False, True, False),
        ("not region = 'eu'", True, False, True, False, True),
        ("region <> 'eu'", False, False, True, True, False),
        ("not region <> 'eu'", True, True, False, False, True),
        ("region in ('eu', 'de')", False, True, False, True, False),
        ("region not in ('eu', 'de')", False, False, True, True, False),
        ("not region in ('eu', 'de')", True, False, True, False, True),
        ("region like 'e%'", False, True, False, True, False),
        ("region not like 'e%'", False, False, True, True, False),
        ("region like '%'", False, True, True, True, False),
        ("region not like '%'", False, False, False, False, False),
        ("region like 'eu'", False, True, False, True, False),
        ("region is null", True, False, False, False, True),
        ("region is not null", False, True, True, True, False),
        ("region = 'eu' and region = 'us'", False, False, False, True, False),
        ("region = 'eu' or region is null", True, True, False, True, True),
    ],
)
def test_what_a_header_means(
    text: str, missing: bool, eu: bool, us: bool, both: bool, without_value: bool
) -> None:
    condition = parse_condition(text)
    cases: list[Headers] = [(), (EU,), (US,), (US, EU), ((b"region", None),)]
    expected = [missing, eu, us, both, without_value]
    assert [condition.matches(None, headers) for headers in cases] == expected
    assert [condition.matches(b"eu", headers) for headers in cases] == expected


@pytest.mark.parametrize(
    ("text", "missing", "a", "b"),
    [
        ("key = 'a'", False, True, False),
        ("KEY <> 'a'", False, False, True),
        ("not key = 'a'", True, False, True),
        ("key is null", True, False, False),
        ("key like 'a%' or key = 'b'", False, True, True),
    ],
)
def test_what_the_key_means(text: str, missing: bool, a: bool, b: bool) -> None:
    assert [matches(text, (EU,), key) for key in (None, b"a", b"b")] == [missing, a, b]


@pytest.mark.parametrize(
    ("text", "headers"),
    [
        ('tag in ("refund", "checkout") and region = "eu"', (EU, (b"tag", b"refund"))),
        ("  TAG\n=\t'x' ", ((b"TAG", b"x"),)),
        ("\"key\" = 'x'", ((b"key", b"x"),)),
        ('"say ""so""" = \'it\'\'s\'', ((b'say "so"', b"it's"),)),
        ('a = "it\'s"', ((b"a", b"it's"),)),
        ("content-type LIKE 'text/%'", ((b"content-type", b"text/plain"),)),
        ("a like 'x~_y~%~~%' escape '~'", ((b"a", b"x_y%~z"),)),
        ("a = ''", ((b"a", b""),)),
        ("größe = 'x'".replace("größe", '"größe"'), (("größe".encode(), b"x"),)),
        ("a = 'ü'", ((b"a", "ü".encode()),)),
        ("order = 'x' AND android = 'y'", ((b"order", b"x"), (b"android", b"y"))),
        ("not.so = 'x'", ((b"not.so", b"x"),)),
        ("$a_1 = 'x'", ((b"$a_1", b"x"),)),
        ("a = 'x' or b = 'y' and b = 'z'", ((b"a", b"x"),)),
        ("not a = 'x' and b = 'y'", ((b"b", b"y"),)),
        ("a not in ('x') and not (b = 'y' or c = 'z')", ((b"a", b"y"),)),
    ],
)
def test_how_it_is_written(text: str, headers: Headers) -> None:
    assert matches(text, headers)
    assert parse_condition(text).text == text.strip()


def test_names_and_values_have_their_case() -> None:
    assert not matches("region = 'EU'", (EU,))
    assert not matches("Region = 'eu'", (EU,))


def test_bytes_that_are_no_text_are_compared_as_bytes() -> None:
    assert not matches("a = 'x'", ((b"a", b"\xff"),))
    assert matches("a <> 'x'", ((b"a", b"\xff"),))
    assert not matches("a = 'x'", ((b"\xff", b"x"),))


DEEP = DEPTH_MAX + 1


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, "an empty text"),
        ("  \n", 0, "an empty text"),
        ("tag", 3, "=, <>, in, like, is or not is expected"),
        ("tag = refund", 6, "a value in quotes is expected"),
        ("tag = key", 6, "a value in quotes is expected"),
        ("tag in (5)", 8, "a character that is none of the language (values stand in quotes)"),
        ("  tag = 'x", 8, "a quote that is not closed"),
        ("tag != 'x'", 4, "<> is expected for !="),
        ("tag = 'x' region = 'eu'", 10, "and, or, or the end is expected"),
        ("(tag = 'x'", 10, "and, or, or a parenthesis is expected"),
        ("tag = 'x')", 9, "and, or, or the end is expected"),
        ("tag in 'x'", 7, "a list in parentheses is expected"),
        ("tag in ()", 8, "a value in quotes is expected"),
        ("tag in ('x' 'y')", 12, "a comma or a parenthesis is expected"),
        ("tag not 'x'", 8, "in or like is expected"),
        ("tag is 'x'", 7, "null or not null is expected"),
        ("'tag' = 'x'", 0, "the name of a header, or key is expected"),
        ("in = 'x'", 0, "the name of a header, or key is expected"),
        ("tag = 'x' and", 13, "the name of a header, or key is expected"),
        ("tag = 'x' and \"\" = 'y'", 14, "the name of a header is expected"),
        ("tag like '%x'", 9, "% stands at the end of a pattern alone"),
        (
            "tag like 'x_'",
            9,
            "_ stands for any character, which there is not: write ~_ ... escape '~'",
        ),
        ("tag like 'x%' escape 'ab'", 21, "one character is expected"),
        ("tag like '~x' escape '~'", 9, "what is escaped is %, _ or the escape itself"),
        ("tag like 'x~' escape '~'", 9, "what is escaped is %, _ or the escape itself"),
        ("a = '\ud800'", 5, "no character of Unicode"),
        ("(" * DEEP + "a = 'x'" + ")" * DEEP, DEPTH_MAX, f"more than {DEPTH_MAX} levels"),
        ("not " * DEEP + "a = 'x'", 4 * DEPTH_MAX, f"more than {DEPTH_MAX} levels"),
        (
            " or ".join(["a='x'"] * (TERMS_MAX + 1)),
            9 * TERMS_MAX,
            f"more than {TERMS_MAX} comparisons",
        ),
    ],
)
def test_what_is_refused_and_where(text: str, position: int, reason: str) -> None:
    with pytest.raises(BadConditionError) as caught:
        parse_condition(text)
    assert (caught.value.reason, caught.value.position) == (reason, position)
    assert caught.value.code is ErrorCode.INVALID_CONFIG
    assert reason in str(caught.value)
    assert f"at position {position} " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_largest_ones_are_taken() -> None:
    inner = " or ".join(["a='x'"] * TERMS_MAX)
    deep = "(" * DEPTH_MAX + inner + ")" * DEPTH_MAX
    assert matches(deep, ((b"a", b"x"),))
    longest = "a = '" + "x" * (TEXT_BYTES_MAX - 6) + "'"
    assert not matches(longest)
    with pytest.raises(BadConditionError, match="at most 4096"):
        parse_condition(longest + " ")


@given(st.text(max_size=60) | st.text(alphabet="()'\"ab =,<>%~not in", max_size=60))
def test_any_text_is_taken_or_refused(text: str) -> None:
    position = 0
    try:
        parse_condition(text).matches(None, ())
    except BadConditionError as error:
        position = error.position
    assert 0 <= position <= len(text)


@pytest.mark.parametrize("character", ["(", "not ", "'", "a = ", "((a='x') and "])
def test_long_nonsense_is_refused(character: str) -> None:
    with pytest.raises(BadConditionError):
        parse_condition(character * (TEXT_BYTES_MAX // len(character)))


# ---- against a naive evaluator ----

NAMES = (b"a", b"region", b"key", b"not", b'say "so"', b"x-y.z")
VALUES = (b"", b"a", b"ab", b"abc", b"it's", b"50%", b"a_b", "ü".encode())
PLAIN = (b"a", b"region", b"x-y.z")

values = st.sampled_from(VALUES)
names = st.none() | st.sampled_from(NAMES)
some = st.lists(values, min_size=1, max_size=4, unique=True).map(tuple)
leaves = st.one_of(
    st.builds(Term, names, st.just(Test.EQUAL), some, st.booleans()),
    st.builds(Term, names, st.just(Test.PREFIX), st.tuples(values), st.booleans()),
    st.builds(Term, names, st.just(Test.PRESENT)),
)


def joined(children: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(children, min_size=2, max_size=3).map(tuple)
    return st.one_of(st.builds(Not, children), st.builds(All, several), st.builds(Any, several))


nodes: st.SearchStrategy[Node] = st.recursive(leaves, joined, max_leaves=8)
headers_of = st.lists(st.tuples(st.sampled_from(NAMES), st.none() | values), max_size=4)


def quoted(value: bytes, quote: str) -> str:
    return quote + value.decode().replace(quote, quote * 2) + quote


def printed(node: Node, draw: st.DataObject) -> str:
    """A text that says so, one of many."""
    if isinstance(node, Not):
        if isinstance(node.of, Term) and node.of.test is Test.PRESENT:
            return f"{name_of(node.of)} is null"
        return f"not ({printed(node.of, draw)})"
    if isinstance(node, All | Any):
        word = draw.draw(st.sampled_from(["and", "AND"] if isinstance(node, All) else ["or", "Or"]))
        return f" {word} ".join(f"({printed(each, draw)})" for each in node.of)
    if node.test is Test.PRESENT:
        return f"{name_of(node)} IS  not null"
    quote = draw.draw(st.sampled_from("'\""))
    no = "not " if node.is_negated else ""
    if node.test is Test.PREFIX:
        pattern = node.values[0].replace(b"!", b"!!").replace(b"%", b"!%").replace(b"_", b"!_")
        return f"{name_of(node)} {no}like {quoted(pattern + b'%', quote)} escape '!'"
    if len(node.values) == 1 and draw.draw(st.booleans()):
        return f"{name_of(node)}{'<>' if node.is_negated else '='}{quoted(node.values[0], quote)}"
    return f"{name_of(node)} {no}in ({', '.join(quoted(v, quote) for v in node.values)})"


def name_of(term: Term) -> str:
    if term.name is None:
        return "key"
    return term.name.decode() if term.name in PLAIN else quoted(term.name, '"')


def holds(node: Node, key: bytes | None, headers: Headers) -> bool:
    if isinstance(node, Not):
        return not holds(node.of, key, headers)
    if isinstance(node, All):
        return all(holds(each, key, headers) for each in node.of)
    if isinstance(node, Any):
        return any(holds(each, key, headers) for each in node.of)
    found = [key] if node.name is None else [v for n, v in headers if n == node.name]
    return any(value is not None and says(node, value) for value in found)


def says(term: Term, value: bytes) -> bool:
    if term.test is Test.PRESENT:
        return True
    is_so = (
        value in term.values
        if term.test is Test.EQUAL
        else any(value[: len(start)] == start for start in term.values)
    )
    return is_so != term.is_negated


@given(nodes, st.data())
def test_what_is_printed_is_parsed(node: Node, data: st.DataObject) -> None:
    found = parse_condition(printed(node, data)).node
    assert found == node
    assert list(terms(found)) == list(terms(node))


@given(nodes, st.data(), st.lists(st.tuples(st.none() | values, headers_of), max_size=5))
def test_it_matches_as_a_naive_evaluator(
    node: Node, data: st.DataObject, records: list[tuple[bytes | None, Headers]]
) -> None:
    condition = parse_condition(printed(node, data))
    for key, headers in records:
        expected = holds(node, key, headers)
        assert condition.matches(key, headers) == expected
        bytes_of = b"|".join([key or b"", *(n + b"|" + (v or b"") for n, v in headers)])
        if expected:
            assert all(any(each in bytes_of for each in group) for group in condition.needles)
        assert condition.reads_key == any(term.name is None for term in terms(node))
        assert condition.reads_headers == any(term.name is not None for term in terms(node))


def test_a_parser_that_is_prepared_is_the_one_that_is_used() -> None:
    conditions._parser.cache_clear()
    conditions.prepare_parser()
    parse_condition("tag = 'a'")
    info = conditions._parser.cache_info()
    assert (info.misses, info.hits) == (1, 1)
