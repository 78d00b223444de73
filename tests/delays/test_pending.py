"""What is pending, against a list that holds everything."""

from __future__ import annotations

import random
import tracemalloc

from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.delays.headers import Kind, key_digest
from raftmq.delays.pending import ENTRY_BYTES, FIRST, NEAR_MAX, RUN_MAX, Pending, Row
from raftmq.delays.runs import DIGEST_BYTES, Place

A, B, C = (letter * DIGEST_BYTES for letter in (b"a", b"b", b"c"))
KEYS = (None, A, B, C)


def row(offset: int, due_ms: int, kind: Kind = Kind.ADD, key: bytes | None = None) -> Row:
    return Row(offset, due_ms, kind, key)


def fed(rows: list[Row], cursor: Place = FIRST, entries_max: int = 100) -> Pending:
    pending = Pending(cursor, entries_max=entries_max)
    for one in rows:
        pending.read(one)
    return pending


def test_what_is_due_comes_in_order_and_stays_until_it_is_settled() -> None:
    pending = fed([row(0, 50), row(1, 30), row(2, 30), row(3, 90)])
    due = [Place(30, 1), Place(30, 2), Place(50, 0)]
    assert pending.due(60, 10) == due
    assert pending.due(60, 10) == due
    assert pending.due(60, 2) == due[:2]
    assert pending.due(29, 10) == []
    assert (pending.next_due_ms, pending.first_offset) == (30, 0)
    pending.settle(Place(30, 2))
    assert pending.due(60, 10) == [Place(50, 0)]
    pending.settle(Place(50, 0))
    assert (pending.next_due_ms, pending.first_offset, len(pending)) == (90, 3, 1)


def test_a_cancellation_takes_all_of_its_key_that_came_before() -> None:
    pending = fed(
        [
            row(0, 50, key=A),
            row(1, 60, key=A),
            row(2, 70, key=B),
            row(3, 0, Kind.CANCEL, A),
            row(4, 80, key=A),
        ]
    )
    assert pending.due(100, 10) == [Place(70, 2), Place(80, 4)]


def test_what_replaces_is_pending_alone() -> None:
    pending = fed([row(0, 50, key=A), row(1, 90, Kind.REPLACE, A)])
    assert pending.due(100, 10) == [Place(90, 1)]


def test_nothing_up_to_the_cursor_comes_again() -> None:
    rows = [row(0, 50), row(1, 30), row(2, 50), row(3, 40)]
    assert fed(rows, Place(50, 0)).due(100, 10) == [Place(50, 2)]


def test_what_is_due_late_is_found_by_reading_anew() -> None:
    rows = [row(n, 1_000 - n) for n in range(20)]
    pending = fed(rows, entries_max=4)
    assert len(pending) <= 4
    assert pending.beyond_count == 20 - len(pending)
    assert pending.count == 20
    assert pending.first_offset == 0, "the first record is due last, and must not go"
    last = pending.due(10_000, 10)[-1]
    pending.settle(last)
    assert pending.is_exhausted
    assert pending.next_due_ms is None
    again = fed(rows, last, entries_max=4)
    assert again.due(10_000, 1) == [Place(last.due_ms + 1, last.offset - 1)]


@define
class Model:
    """Everything, in a list."""

    rows: list[Row] = field(factory=list)
    done: list[Place] = field(factory=list)

    @property
    def live(self) -> list[Place]:
        """What is pending, by brute force."""
        kept: list[Row] = []
        for one in self.rows:
            if one.kind is not Kind.ADD:
                gone = {other.offset for other in kept if other.key == one.key}
                # What was delivered before it came is delivered.
                kept = [other for other in kept if other.offset not in gone]
            if one.kind is not Kind.CANCEL:
                kept.append(one)
        places = sorted(Place(one.due_ms, one.offset) for one in kept)
        return [place for place in places if place not in self.done]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 40),  # delay
            st.sampled_from(list(Kind)),
            st.sampled_from(KEYS),
            st.integers(0, 10),  # time passes
            st.integers(0, 3),  # so many are delivered
            st.booleans(),  # by another leader
            st.integers(1, 80),  # other lanes leave so much room
        ),
        max_size=60,
    ),
    st.integers(1, 80),
)
def test_the_order_of_deliveries_is_that_of_a_list(
    steps: list[tuple[int, Kind, bytes | None, int, int, bool, int]], entries_max: int
) -> None:
    """Appends, deliveries and changes of the leader in any order: what is due is what the list
    says, and the log is needed from no later than the first that is pending."""
    model, pending, now = Model(), Pending(entries_max=entries_max), 0
    cursors = [pending.cursor, pending.cursor]
    for delay, kind, key, passes, count, is_new, room in steps:
        offset, key = len(model.rows), key if kind is Kind.ADD else key or A
        one = Row(offset, now + (delay if kind is not Kind.CANCEL else 0), kind, key)
        model.rows.append(one)
        pending.read(one)
        now += passes
        if is_new or pending.is_exhausted:
            pending = fed(model.rows, pending.cursor, entries_max)
        elif pending.is_low:
            ahead = fed(model.rows, cursors[-2], entries_max)  # it began a delivery ago
            ahead.settle(pending.cursor)
            pending = ahead
        entries_max = min(entries_max, room)
        pending.allow(entries_max)
        live = model.live
        first = pending.first_offset
        assert not live or (first is not None and first <= min(o for _, o in live))
        assert len(pending) <= entries_max
        held = pending.due(now, count)
        due = [place for place in live if place.due_ms <= now]
        assert held == due[: len(held)]
        assert len(held) == min(count, len(due)) or pending.beyond_count
        if held:
            model.done += held
            pending.settle(held[-1])
            cursors.append(held[-1])


def test_many_entries_take_little_memory_and_come_in_order() -> None:
    """Some are cancelled on the way, by keys of their own, and the log is never needed again."""
    chance, count = random.Random(1), 24_000
    tracemalloc.start()
    pending = Pending(entries_max=count)
    due = [chance.randrange(300_000) for _ in range(count)]
    for offset, due_ms in enumerate(due):
        pending.read(row(offset, due_ms, key=key_digest(b"%d" % offset)))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    packed = count - 2 * NEAR_MAX
    assert held < packed * ENTRY_BYTES * 1.1 + 2 * NEAR_MAX * 900
    assert len(pending._runs) <= 2 * count // RUN_MAX + 2
    for offset in range(0, count, 3):
        pending.read(row(count + offset, 0, Kind.CANCEL, key_digest(b"%d" % offset)))
    left = sorted(Place(due_ms, offset) for offset, due_ms in enumerate(due) if offset % 3)
    assert pending.count == len(left)
    found: list[Place] = []
    while places := pending.due(1 << 60, 100):
        assert [pending.position_of(place.offset) for place in places] == [-1] * len(places)
        assert pending.first_offset == min(place.offset for place in left[len(found) :])
        found += places
        pending.settle(places[-1])
    assert found == left
    assert (pending.count, pending.next_due_ms, pending.first_offset) == (0, None, None)
