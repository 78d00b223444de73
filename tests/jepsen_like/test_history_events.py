"""The history's format: lines, pairing, files that were cut off, several writers."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jepsen_like.history_events import (
    Event,
    HistoryFile,
    MalformedHistoryError,
    Recorder,
    decode_history,
    merge_histories,
    read_history,
    write_history,
)

NAMES = st.text(max_size=5)
OFFSETS = st.integers(-1, 1 << 40)
VALUES = st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=5)
EVENTS = st.builds(
    Event,
    type=st.sampled_from(["invoke", "ok", "fail", "info"]),
    f=NAMES,
    process=st.integers(-1, 99),
    op=st.integers(0, 99),
    time=st.integers(0, 1 << 62),
    records=st.dictionaries(NAMES, st.lists(st.tuples(OFFSETS, VALUES), max_size=3), max_size=2),
    offsets=st.dictionaries(NAMES, OFFSETS, max_size=2),
    topics=st.lists(NAMES, max_size=2),
    code=st.integers(-200, 200),
    idempotent=st.booleans(),
)


def test_a_line_says_only_what_there_is_to_say() -> None:
    lines: list[bytes] = []
    recorder = Recorder(lambda event: lines.append(msgspec.json.encode(event)), lambda: 7)
    invoked = recorder.invoke(3, "append", records={"t-0": [(-1, 5)]})
    recorder.ok(invoked, records={"t-0": [(17, 5)]}, node=2)
    assert lines == [
        b'{"type":"invoke","f":"append","process":3,"op":0,"time":7,"records":{"t-0":[[-1,5]]}}',
        b'{"type":"ok","f":"append","process":3,"op":0,"time":7,"records":{"t-0":[[17,5]]},"node":2}',
    ]


def test_operations_are_numbered_by_the_line_that_invoked_them() -> None:
    events: list[Event] = []
    recorder = Recorder(events.append, lambda: 0)
    one, other = recorder.invoke(1, "poll"), recorder.invoke(2, "poll")
    assert recorder.info(other)
    note = recorder.note(1, "crash")
    assert recorder.fail(one)
    assert [event.op for event in events] == [0, 1, 1, 3, 0]
    assert (one.op, other.op, note.op) == (0, 1, 3)


def test_an_operation_ends_once() -> None:
    events: list[Event] = []
    recorder = Recorder(events.append, lambda: 0)
    invoked = recorder.invoke(1, "poll")
    assert recorder.info(invoked)
    assert not recorder.ok(invoked)
    assert [event.type for event in events] == ["invoke", "info"]


def test_notes_and_operations_are_not_confused() -> None:
    recorder = Recorder(lambda event: None, lambda: 0)
    with pytest.raises(AssertionError):
        recorder.invoke(1, "crash")
    with pytest.raises(AssertionError):
        recorder.note(1, "poll")


@given(events=st.lists(EVENTS, max_size=20))
def test_lines_keep_everything(events: list[Event]) -> None:
    assert list(decode_history(msgspec.json.encode(event) + b"\n" for event in events)) == events


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_files_keep_everything(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"history{suffix}"
    events = [Event("invoke", "poll", 1, number, number) for number in range(10_000)]
    write_history(path, events)
    assert list(read_history(path)) == events


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(path, [Event("invoke", "poll", 1, 0, 0), Event("ok", "poll", 1, 0, 0)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert [event.type for event in read_history(path)] == ["invoke"]
    path.write_bytes(whole[:20] + whole[30:])
    with pytest.raises(MalformedHistoryError, match="line 1"):
        list(read_history(path))


def test_threads_share_a_lock(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryFile(path) as file:
        recorder = Recorder(file, lambda: 0, threading.Lock())

        def work(process: int) -> None:
            for _ in range(500):
                recorder.ok(recorder.invoke(process, "poll"))

        threads = [threading.Thread(target=work, args=(process,)) for process in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = list(read_history(path))
    assert len(events) == 4000
    assert all(event.op == line for line, event in enumerate(events) if event.type == "invoke")


def test_merges_by_time_and_numbers_anew() -> None:
    one = [Event("invoke", "poll", 1, 0, 10), Event("ok", "poll", 1, 0, 30)]
    other = [
        Event("invoke", "append", 2, 0, 20),
        Event("ok", "crash", 2, 1, 25),
        Event("info", "append", 2, 0, 40),
    ]
    merged = list(merge_histories([one, other]))
    assert [(e.f, e.type, e.op) for e in merged] == [
        ("poll", "invoke", 0),
        ("append", "invoke", 1),
        ("crash", "ok", 2),
        ("poll", "ok", 0),
        ("append", "info", 1),
    ]
    with pytest.raises(MalformedHistoryError, match="never began"):
        list(merge_histories([one[1:]]))
