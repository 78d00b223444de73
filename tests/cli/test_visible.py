"""Names that strangers choose: on the log, in tables and in errors they cannot pass for ours."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator

import pytest
import structlog
import typer
from hypothesis import given
from hypothesis import strategies as st

from raftmq.cli.common import CommandError, column_widths, reported, show
from raftmq.cli.console import note, out
from raftmq.foreign import ascii_json, visible
from raftmq.logs import configure_logs
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker

FORGED = (
    "g\n2026-01-01T00:00:00Z error   disk failed \x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2028\x7f"
)
hostile = st.text(max_size=40) | st.just(FORGED)


def is_safe(line: str) -> bool:
    return line.isprintable()


@pytest.fixture
def structlog_restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


def logged(log_format: str, event: str, fields: dict[str, object], error: str = "") -> str:
    stream = io.StringIO()
    configure_logs(log_format=log_format, level="info", cluster_id="c", node_id=1, stream=stream)
    log = structlog.get_logger()
    if error:
        try:
            raise ValueError(error)
        except ValueError:
            log.exception(event, **fields)
    else:
        log.info(event, **fields)
    return stream.getvalue()


@given(text=hostile)
def test_visible_text_prints_on_one_line(text: str) -> None:
    assert is_safe(visible(text))
    if text.isprintable():
        assert visible(text) == text


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_json_says_the_same_in_characters_that_print(text: str) -> None:
    told = ascii_json(json.dumps({text: [text]}, ensure_ascii=False).encode())
    assert is_safe(told)
    assert json.loads(told) == {text: [text]}


@pytest.mark.usefixtures("structlog_restored")
@given(event=hostile, name=hostile, value=hostile | st.lists(hostile, max_size=2), error=hostile)
def test_every_field_of_an_event_stays_on_the_events_line(
    event: str, name: str, value: object, error: str
) -> None:
    fields = {f"x{name}": value}
    line, end = logged("console", event, fields).split("\n", 1)
    assert end == ""
    assert is_safe(line)
    first, *trace = logged("console", event, fields, error).removesuffix("\n").split("\n")
    assert is_safe(first)
    assert all(is_safe(part) for part in trace)
    if error:
        assert trace
    assert all(part.startswith("    ") for part in trace)
    told = logged("json", event, fields)
    assert told.count("\n") == 1
    assert is_safe(told.removesuffix("\n"))
    json.loads(told)


@given(cell=hostile)
def test_tables_results_and_notes_are_safe(cell: str) -> None:
    lines = io.StringIO()
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = lines
    try:
        show(["A", "B"], [[cell, [cell, 1]]], as_json=False)
        show(["A"], [[cell.encode("utf-8", "replace").decode()]], as_json=True)
        out(f"topic {cell} created")
        with pytest.raises(typer.Exit), reported():
            raise CommandError(f"no topic {cell}")
        note(visible(cell))
    finally:
        sys.stdout, sys.stderr = before
    written = lines.getvalue().split("\n")
    assert all(map(is_safe, written))
    assert len(written) == 2 + 5 + 1 + 1 + 1 + 1, "a cell made a line of its own"


def test_a_group_of_a_forged_name_is_one_row(call: Call, broker: FakeBroker) -> None:
    """From the wire to the terminal."""
    broker.groups[FORGED] = {}
    told = call("group", "list").output
    assert "\x1b" not in told
    assert sum("disk failed" in line for line in told.splitlines()) == 1
    (group,) = json.loads(call("group", "list", "--json").output)
    assert FORGED in group.values()


def test_a_table_too_wide_for_the_terminal_breaks_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    why = "no quorum: one of three voters is there, and node 2 was never heard of since the start"
    columns = ("Topic", "Partition", "Leader", "LeaderEpoch", "Why", "Remarks")
    show(columns, [("measurements-by-device", 11, None, 4, why, why)], as_json=False)
    shown = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, shown.splitlines())) <= 80
    assert {*columns, *why.split(), "measurements-by-device"} <= set(shown.split())


def test_columns_give_way_widest_first_and_words_last() -> None:
    assert column_widths([["a", "bb cc"]], 80) == [1, 5]
    assert column_widths([["aaa bbb ccc", "x" * 6]], 17) == [9, 6]
    assert sum(column_widths([["x" * 30, "y" * 9]], 20)) == 18
