"""The search against brute force, its bounds, its speed and its explanations."""

from __future__ import annotations

import itertools
import time
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jepsen_like.checkers import Options, Validity, check_events
from jepsen_like.checkers.linear.checks import Bounds
from jepsen_like.checkers.linear.explain import explain
from jepsen_like.checkers.linear.models import Log, Register, Topic, TopicSet
from jepsen_like.checkers.linear.search import FOREVER, Call, Found, Model, Search
from tests.jepsen_like.checkers.scribe import KEY, Scribe


def by_brute_force(model: Model, calls: list[Call]) -> bool:
    """Wing and Gong without any memory, from the definition."""
    certain = [call for call in calls if call.end < FOREVER]
    unknown = [call for call in calls if call.end == FOREVER]
    for count in range(len(unknown) + 1):
        for happened in itertools.combinations(unknown, count):
            if _has_order(model, model.initial, [*certain, *happened]):
                return True
    return False


def _has_order(model: Model, state: object, calls: list[Call]) -> bool:
    if not calls:
        return True
    first_end = min(call.end for call in calls)
    for call in calls:
        if call.begin > first_end:
            continue
        after = model.step(state, call.action)  # type: ignore[arg-type]
        if after is not None and _has_order(model, after, [c for c in calls if c is not call]):
            return True
    return False


def times(draw: st.DrawFn, count: int) -> list[tuple[int, int]]:
    """Begins and ends, all different; some calls never end."""
    moments = draw(st.permutations(range(2 * count)))
    pairs = [sorted(moments[2 * i : 2 * i + 2]) for i in range(count)]
    unknown = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    odds = draw(st.sampled_from([0, 1]))
    return [
        (begin, FOREVER if is_unknown and odds else end)
        for (begin, end), is_unknown in zip(pairs, unknown, strict=True)
    ]


ACTIONS: dict[str, tuple[Model, list[tuple[object, ...]]]] = {
    "register": (
        Register(),
        [(kind, v) for kind in ("commit", "committed", "committed") for v in (-1, 1, 2)],
    ),
    "topic": (Topic(), [("create",), ("delete",), ("there",), ("absent",)]),
    "topics": (
        TopicSet(),
        [
            *((kind, bits) for kind in ("create", "delete", "there", "absent") for bits in (1, 2)),
            *(("list", bits) for bits in (0, 1, 2, 3)),
        ],
    ),
    "log": (
        Log((1,), (3,)),
        [
            ("append", 0, 1),
            ("append", 3, 4),
            ("append", 4, 6),
            ("append ?",),
            *((kind, end) for kind in ("poll", "end") for end in (0, 1, 3, 4)),
            ("contradiction", 0),
        ],
    ),
    "log with gaps": (
        Log((1,), (3,), gaps_allowed=True),
        [
            ("append", 0, 1),
            ("append", 3, 4),
            ("append ?",),
            *((kind, end) for kind in ("poll", "end") for end in (0, 1, 3, 4)),
        ],
    ),
}
READS = {"committed", "there", "absent", "list", "poll", "end", "contradiction"}


@pytest.mark.parametrize("name", ACTIONS)
def test_agrees_with_brute_force(name: str) -> None:
    model, actions = ACTIONS[name]
    verdicts: set[bool] = set()

    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def agree(data: st.DataObject) -> None:
        count = data.draw(st.integers(1, 7))
        calls = [
            Call(op, action, begin, end, is_read=action[0] in READS)
            for op, (begin, end) in enumerate(data.draw(st.composite(times)(count)))
            if (action := data.draw(st.sampled_from(actions)))[0] not in READS or end < FOREVER
        ]
        expected = by_brute_force(model, calls)
        verdicts.add(expected)
        search = Search(model, calls)
        found = search.run()
        assert found.is_linearizable is expected
        if expected:
            check_order(model, calls, found)
        else:
            assert found.failure is not None
            window = explain(model, search, found.failure)
            assert set(window.ops) <= {call.op for call in calls}
            if all(call.end < FOREVER for call in calls):
                # What the window shows is a contradiction by itself, from some state.
                assert not any(
                    _has_order(model, state, [c for c in window.calls if c.end < FOREVER])
                    for state in window.states
                    if all(call.end < FOREVER for call in window.calls)
                )

    agree()
    assert verdicts == {True, False}


def check_order(model: Model, calls: list[Call], found: Found) -> None:
    """The order that was found explains everything and respects time."""
    state = model.initial
    for call in found.order:
        after = model.step(state, call.action)
        assert after is not None
        state = after
    assert {call.op for call in calls if call.end < FOREVER} <= {c.op for c in found.order}
    for position, call in enumerate(found.order):
        assert all(later.end > call.begin for later in found.order[position:])


# ---- speed and bounds ----


def register_history(operations: int, processes: int, seed: int, unknown: float) -> Scribe:
    """Clients of one register; commits take effect somewhere between their two ends."""
    rng, scribe = Random(seed), Scribe()
    value, free, under_way = -1, list(range(processes)), []
    for number in range(operations):
        process = free.pop(rng.randrange(len(free)))
        if rng.random() < 0.5:
            invoked = scribe.invoke(process, "commit", group="g", offsets={KEY: number})
        else:
            invoked = scribe.invoke(process, "committed", group="g", partitions=[KEY])
        under_way.append((invoked, rng.random() < unknown))
        while not free or (under_way and rng.random() < 0.5):
            invoked, is_unknown = under_way.pop(rng.randrange(len(under_way)))
            free.append(invoked.process)
            if invoked.f == "commit":
                value = invoked.offsets[KEY] if not is_unknown or rng.random() < 0.5 else value
                (scribe.info if is_unknown else scribe.ok)(invoked)
            else:
                scribe.ok(invoked, offsets={KEY: value})
    return scribe


@pytest.mark.slow
@pytest.mark.parametrize("unknown", [0.0, 0.05])
def test_five_thousand_operations_on_one_register(unknown: float) -> None:
    scribe = register_history(5000, 10, 1, unknown)
    began = time.process_time()
    report = scribe.report()
    assert report["linear-committed"].validity is Validity.VALID
    assert time.process_time() - began < 30


@pytest.mark.slow
def test_five_thousand_operations_with_one_stale_read() -> None:
    scribe = register_history(5000, 10, 2, 0.01)
    reads = [e for e in scribe.events if e.f == "committed" and e.type == "ok"]
    reads[-1].offsets = {KEY: reads[len(reads) // 2].offsets[KEY]}
    began = time.process_time()
    verdict = scribe.report()["linear-committed"]
    assert verdict.validity is Validity.INVALID
    assert reads[-1].op == verdict.examples[0].ops[0]
    assert time.process_time() - began < 30


@pytest.mark.slow
def test_five_thousand_appends_and_reads_of_one_log() -> None:
    rng, scribe = Random(3), Scribe()
    log: list[int] = []
    under_way = []
    for number in range(5000):
        if rng.random() < 0.6:
            under_way.append(scribe.begin_append(number, number))
        else:
            under_way.append(scribe.invoke(number, "read", offsets={KEY: len(log)}))
        while len(under_way) > rng.randrange(12):
            invoked = under_way.pop(rng.randrange(len(under_way)))
            if invoked.f == "append":
                if rng.random() < 0.95:
                    log.append(invoked.op)
                    scribe.events[invoked.op].records = {KEY: [(-1, invoked.op)]}
                    scribe.end_append(invoked, {len(log) - 1: invoked.op})
                else:
                    scribe.info(invoked)
            else:
                start = invoked.offsets[KEY]
                rows = [(offset, log[offset]) for offset in range(start, len(log))]
                scribe.ok(invoked, records={KEY: rows})  # type: ignore[dict-item]
    began = time.process_time()
    report = scribe.report()
    assert report["linear-log"].validity is Validity.VALID, report.to_text()
    assert time.process_time() - began < 30
    last = len(log) - 1
    scribe.append(1, {last + 1: -1})
    scribe.poll(2, {last: log[-1]}, f="read", start=last)
    assert scribe.report()["linear-log"].validity is Validity.INVALID


@pytest.mark.slow
def test_five_thousand_operations_on_topics() -> None:
    rng, scribe = Random(4), Scribe()
    names = [f"topic-{i}" for i in range(20)]
    present: set[str] = set()
    under_way = []
    for number in range(5000):
        f = rng.choice(["create_topic", "delete_topic", "list_topics"])
        topics = [] if f == "list_topics" else [rng.choice(names)]
        under_way.append(scribe.invoke(number, f, topics=topics))
        while len(under_way) > rng.randrange(8):
            invoked = under_way.pop(rng.randrange(len(under_way)))
            if invoked.f == "list_topics":
                scribe.ok(invoked, topics=sorted(present))
                continue
            (name,) = invoked.topics
            is_creation = invoked.f == "create_topic"
            if is_creation == (name in present):
                scribe.fail(invoked, code=36 if is_creation else 3)
            else:
                present ^= {name}
                scribe.ok(invoked)
    began = time.process_time()
    report = scribe.report()
    assert report.validity is Validity.VALID, report.to_text()
    assert time.process_time() - began < 30


def hard_history() -> Scribe:
    """Many commits of unknown fate that all were read once, in an order that time forbids."""
    scribe = Scribe()
    for value in range(14):
        scribe.info(scribe.invoke(value, "commit", group="g", offsets={KEY: value}))
    for value in (*range(14), 3):
        scribe.committed(99, value)
    return scribe


def test_gives_up_at_the_bound_and_says_unknown() -> None:
    events = hard_history().events
    full = check_events(events)["linear-committed"]
    assert full.validity is Validity.INVALID
    bounded = check_events(events, Options(bounds=Bounds(steps_max=20)))
    assert bounded["linear-committed"].validity is Validity.UNKNOWN
    assert "given up on 1: g t-0" in bounded["linear-committed"].note
    assert bounded.validity is Validity.UNKNOWN
    assert bounded.exit_code == 2


def test_gives_up_when_time_is_over() -> None:
    scribe = Scribe()
    for number in range(3000):
        under_way = scribe.invoke(1, "commit", group="g", offsets={KEY: 2 * number})
        scribe.commit(2, 2 * number + 1)
        scribe.ok(under_way)
    report = check_events(scribe.events, Options(bounds=Bounds(is_over=lambda: True)))
    assert report["linear-committed"].validity is Validity.UNKNOWN
    assert check_events(scribe.events)["linear-committed"].validity is Validity.VALID


def test_searches_the_beginning_of_long_histories() -> None:
    scribe = Scribe()
    for value in range(100):
        scribe.commit(1, value)
        scribe.committed(2, value)
    late = check_events([*scribe.events], Options(bounds=Bounds(calls_max=50)))
    assert late["linear-committed"].validity is Validity.VALID
    assert "the first 50 of each" in late["linear-committed"].note
    early = [e for e in scribe.events if e.f == "committed" and e.type == "ok"][10]
    early.offsets = {KEY: 3}
    cut = check_events(scribe.events, Options(bounds=Bounds(calls_max=50)))
    assert cut["linear-committed"].validity is Validity.INVALID


def test_a_cut_takes_what_was_under_way_for_unknown() -> None:
    scribe = Scribe()
    under_way = scribe.begin_append(1, 0)
    for offset in range(1, 20):
        scribe.append(2, {offset: offset})
        scribe.poll(3, {offset: offset}, f="read", start=offset)
    scribe.end_append(under_way, {0: 0})
    report = check_events(scribe.events, Options(must_see_all=False, bounds=Bounds(calls_max=10)))
    assert report["linear-log"].validity is Validity.VALID


# ---- explanations ----


def test_explains_with_the_few_operations_that_matter() -> None:
    scribe = Scribe()
    for value in range(50):
        scribe.commit(1, value)
        scribe.committed(2, value)
    under_way = scribe.invoke(1, "commit", group="g", offsets={KEY: 77})
    needless = scribe.invoke(4, "committed", group="g", partitions=[KEY])
    new = scribe.committed(2, 77)
    scribe.ok(needless, offsets={KEY: 77})
    old = scribe.committed(3, 49)
    scribe.ok(under_way)
    for value in range(100, 120):
        scribe.commit(1, value)
    verdict = scribe.report()["linear-committed"]
    (example,) = verdict.examples
    assert example.ops[0] == old.op
    assert set(example.ops) - {needless.op} == {old.op, new.op, under_way.op}
    assert len(example.ops) == 3 or needless.op not in example.ops
    assert "state before: 49" in example.told
    assert "(commit 77, unknown)" in example.told


def test_topics_are_explained_one_by_one_where_one_is_wrong() -> None:
    scribe = Scribe()
    scribe.topic("create_topic", "a")
    scribe.topic("create_topic", "b")
    scribe.topics("a")
    (example,) = scribe.report()["linear-topics"].examples
    assert example.where == "b"
