"""Hypothesis makes executions of a correct queue, whose histories are valid, and breaks them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepsen_like.checkers import Options, Validity, check_events
from jepsen_like.history_events import Event, read_history, write_history
from tests.jepsen_like.checkers import histories_of_transactions, histories_of_views
from tests.jepsen_like.checkers.execution import Execution
from tests.jepsen_like.checkers.histories import REJECTED
from tests.jepsen_like.checkers.mutations import MUTATIONS, copy_of

SEEDS = st.integers(0, 1 << 32)


@given(seed=SEEDS, steps=st.integers(0, 600))
@settings(max_examples=150, deadline=None)
def test_accepts_what_a_correct_queue_does(seed: int, steps: int) -> None:
    report = check_events(Execution(seed, steps).events)
    assert report.validity is Validity.VALID, report.to_text()


@given(seed=SEEDS, steps=st.integers(0, 400), share=st.floats(0, 1))
@settings(max_examples=50, deadline=None)
def test_accepts_a_history_that_was_cut_off(seed: int, steps: int, share: float) -> None:
    """What was under way is unknown, and what nobody came to read is excused."""
    events = Execution(seed, steps).events
    report = check_events(events[: int(share * len(events))], Options(must_see_all=False))
    assert report.validity is Validity.VALID, report.to_text()


@pytest.mark.parametrize("name", MUTATIONS)
def test_rejects_what_a_broken_queue_does(name: str) -> None:
    mutate, names = MUTATIONS[name]
    broken: list[list[Event]] = []

    @given(seed=SEEDS, steps=st.integers(200, 600))
    @settings(max_examples=60, deadline=None)
    def reject(seed: int, steps: int) -> None:
        mutated = mutate(copy_of(Execution(seed, steps).events), Random(seed))
        if mutated is None:
            return
        broken.append(mutated)
        report = check_events(mutated)
        assert names & set(report.named(Validity.INVALID)), report.to_text()

    reject()
    assert len(broken) > 3, "histories have hardly anything of this kind in them"


def test_the_mutations_break_every_rule() -> None:
    """But those of transactions, views and delays, of which these histories have none: see
    `test_by_hand.py`."""
    elsewhere = {histories_of_transactions.__name__, histories_of_views.__name__}
    others = {name for name, written in REJECTED if written.__module__ in elsewhere}
    names = {verdict.name for verdict in check_events([]).verdicts} - others
    assert names == frozenset().union(*(names for _, names in MUTATIONS.values()))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_verdicts_of_a_file_are_those_of_its_events(tmp_path: Path, suffix: str) -> None:
    events = Execution(7, 500).events
    path = tmp_path / f"history{suffix}"
    write_history(path, events)
    assert list(read_history(path)) == events
    assert check_events(read_history(path)) == check_events(events)
