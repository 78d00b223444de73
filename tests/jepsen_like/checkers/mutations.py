"""Ways to break a valid history: each changes what clients were told, as a broken queue would.

A mutation returns the broken history, or None where there is nothing in it to break so. Its name in
MUTATIONS goes with the verdicts of which one must be invalid then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import msgspec

from jepsen_like.history_events import Event, Value
from tests.jepsen_like.checkers.execution import PARTITIONS

Mutation = Callable[[list[Event], Random], list[Event] | None]
MUTATIONS: dict[str, tuple[Mutation, frozenset[str]]] = {}


def breaks(*names: str) -> Callable[[Mutation], Mutation]:
    """Register a mutation that these verdicts catch."""

    def add(mutation: Mutation) -> Mutation:
        MUTATIONS[mutation.__name__] = (mutation, frozenset(names))
        return mutation

    return add


def copy_of(events: list[Event]) -> list[Event]:
    """A history that may be changed."""
    return msgspec.json.decode(msgspec.json.encode(events), type=list[Event])


def done(events: list[Event], f: str) -> Iterator[tuple[int, Event, Event]]:
    """Position, completion and invocation of the ok operations of a kind."""
    invoked = {event.op: event for event in events if event.type == "invoke"}
    for position, event in enumerate(events):
        if event.f == f and event.type == "ok":
            yield position, event, invoked.get(event.op, event)


def acked(events: list[Event], name: str) -> list[tuple[int, Value]]:
    """Acknowledged records of a partition by offset."""
    return sorted(
        row for _, event, _ in done(events, "append") for row in event.records.get(name, ())
    )


def reads(events: list[Event], name: str) -> list[Event]:
    """Everything that returned records of a partition."""
    return [
        event
        for f in ("poll", "read")
        for _, event, _ in done(events, f)
        if event.records.get(name)
    ]


def forget(events: list[Event], name: str, is_gone: Callable[[int], bool]) -> None:
    """Take offsets out of all that was polled."""
    for event in reads(events, name):
        event.records[name] = [row for row in event.records[name] if not is_gone(row[0])]


def final_poll(events: list[Event]) -> Event:
    """The last one, which returned everything."""
    return [event for _, event, _ in done(events, "poll")][-1]


@breaks("lost-write")
def lose(events: list[Event], rng: Random) -> list[Event] | None:
    name = rng.choice(PARTITIONS)
    rows = acked(events, name)
    if len(rows) < 2:
        return None
    lost = rng.choice(rows[:-1])[0]
    forget(events, name, lambda offset: offset == lost)
    return events


@breaks("unseen")
def lose_the_end(events: list[Event], rng: Random) -> list[Event] | None:
    name = rng.choice(PARTITIONS)
    rows = acked(events, name)
    if not rows:
        return None
    first = rng.choice(rows[-3:])[0]
    forget(events, name, lambda offset: offset >= first)
    return events


@breaks("duplicate")
def write_twice(events: list[Event], rng: Random) -> list[Event] | None:
    records = final_poll(events).records
    name = rng.choice(PARTITIONS)
    if name not in records:
        return None
    records[name].append((len(records[name]), rng.choice(records[name])[1]))
    return events


@breaks("inconsistent-offsets", "divergence")
def acknowledge_elsewhere(events: list[Event], rng: Random) -> list[Event] | None:
    appends = [event for _, event, _ in done(events, "append")]
    rng.shuffle(appends)
    for event in appends:
        ((name, rows),) = event.records.items()
        taken = {offset for offset, _ in acked(events, name)} - {offset for offset, _ in rows}
        if taken:
            rows[0] = (rng.choice(sorted(taken)), rows[0][1])
            return events
    return None


@breaks("divergence", "inconsistent-offsets")
def read_otherwise(events: list[Event], rng: Random) -> list[Event] | None:
    name = rng.choice(PARTITIONS)
    last = final_poll(events)
    found = [event for event in reads(events, name) if event is not last]
    known = last.records.get(name, [])
    if not found or len(known) < 2:
        return None
    rows = rng.choice(found).records[name]
    index = rng.randrange(len(rows))
    offset, value = rows[index]
    rows[index] = (offset, rng.choice([other for _, other in known if other != value]))
    return events


@breaks("aborted-read")
def fail_what_was_written(events: list[Event], rng: Random) -> list[Event] | None:
    appends = [event for _, event, _ in done(events, "append")]
    if not appends:
        return None
    event = rng.choice(appends)
    event.type, event.records = "fail", {}
    return events


@breaks("phantom")
def invent(events: list[Event], rng: Random) -> list[Event] | None:
    records = final_poll(events).records
    name = rng.choice(PARTITIONS)
    records.setdefault(name, []).append((len(records.get(name, [])), "invented"))
    return events


@breaks("int-nonmonotonic-poll")
def disorder_a_poll(events: list[Event], rng: Random) -> list[Event] | None:
    polls = [(event, n) for n in PARTITIONS for event in reads(events, n) if event.f == "poll"]
    polls = [(event, name) for event, name in polls if len(event.records[name]) > 1]
    if not polls:
        return None
    event, name = rng.choice(polls)
    rows = event.records[name]
    index = rng.randrange(len(rows) - 1)
    rows[index], rows[index + 1] = rows[index + 1], rows[index]
    return events


@breaks("int-poll-skip")
def leave_out_within_a_poll(events: list[Event], rng: Random) -> list[Event] | None:
    last = final_poll(events)
    polls = [(event, n) for n in PARTITIONS for event in reads(events, n) if event.f == "poll"]
    polls = [(e, name) for e, name in polls if e is not last and len(e.records[name]) > 2]
    if not polls:
        return None
    event, name = rng.choice(polls)
    del event.records[name][rng.randrange(1, len(event.records[name]) - 1)]
    return events


def following_polls(events: list[Event]) -> list[tuple[Event, Event, str]]:
    """Pairs of polls of one process and partition with nothing in between that moves it."""
    last: dict[tuple[int, str], Event] = {}
    found = []
    starts = {event.op for event in events if event.type == "invoke" and event.offsets}
    for event in events:
        if event.type != "ok":
            continue
        if event.f in ("assign", "subscribe", "assigned", "revoked", "crash"):
            for key in [key for key in last if key[0] == event.process]:
                del last[key]
        elif event.f == "poll" and event.op not in starts:
            for name in event.records:
                if (event.process, name) in last:
                    found.append((last[event.process, name], event, name))
                last[event.process, name] = event
    return found


@breaks("nonmonotonic-poll")
def poll_again(events: list[Event], rng: Random) -> list[Event] | None:
    pairs = following_polls(events)
    if not pairs:
        return None
    before, after, name = rng.choice(pairs)
    after.records[name] = [*before.records[name][-1:], *after.records[name]]
    return events


@breaks("poll-skip")
def leave_out_between_polls(events: list[Event], rng: Random) -> list[Event] | None:
    pairs = [(after, n) for _, after, n in following_polls(events) if len(after.records[n]) > 1]
    if not pairs:
        return None
    event, name = rng.choice(pairs)
    del event.records[name][0]
    return events


def swap_appends(events: list[Event], one: Event, other: Event, name: str) -> None:
    """Exchange the places of two appended records, in all that was told."""
    (offset, value), (offset_other, value_other) = one.records[name][0], other.records[name][0]
    one.records[name][0] = (offset_other, value)
    other.records[name][0] = (offset, value_other)
    placed = {offset: value_other, offset_other: value}
    for event in reads(events, name):
        rows = event.records[name]
        event.records[name] = [(offset, placed.get(offset, was)) for offset, was in rows]


def single_appends(events: list[Event]) -> list[tuple[int, Event, Event, str]]:
    """Appends of one record: position of the end, completion, invocation, partition."""
    return [
        (position, event, invoked, name)
        for position, event, invoked in done(events, "append")
        for name, rows in event.records.items()
        if len(rows) == 1
    ]


@breaks("nonmonotonic-send")
def swap_own_appends(events: list[Event], rng: Random) -> list[Event] | None:
    singles = single_appends(events)
    pairs = [
        (one[1], other[1], one[3])
        for one in singles
        for other in singles
        if one[3] == other[3] and one[1].op < other[1].op and one[1].process == other[1].process
    ]
    if not pairs:
        return None
    swap_appends(events, *rng.choice(pairs))
    return events


@breaks("realtime-send")
def swap_appends_against_time(events: list[Event], rng: Random) -> list[Event] | None:
    singles = single_appends(events)
    pairs = [
        (one[1], other[1], one[3])
        for one in singles
        for other in singles
        if one[3] == other[3] and one[0] < other[2].op and one[1].process != other[1].process
    ]
    if not pairs:
        return None
    swap_appends(events, *rng.choice(pairs))
    return events


@breaks("int-nonmonotonic-send")
def disorder_an_append(events: list[Event], rng: Random) -> list[Event] | None:
    appends = [(e, n) for _, e, _ in done(events, "append") for n in e.records]
    appends = [(event, name) for event, name in appends if len(event.records[name]) > 1]
    if not appends:
        return None
    event, name = rng.choice(appends)
    (one, value), (other, value_other), *rest = event.records[name]
    event.records[name] = [(other, value), (one, value_other), *rest]
    return events


@breaks("offset-gap")
def shift_offsets(events: list[Event], rng: Random) -> list[Event] | None:
    name = rng.choice(PARTITIONS)
    end = len(final_poll(events).records.get(name, ()))
    if end < 2:
        return None
    first = rng.randrange(1, end)
    for event in events:
        if event.type == "ok" and name in event.records:
            rows = event.records[name]
            event.records[name] = [(o + (o >= first), value) for o, value in rows]
    return events


@breaks("linear-log", "out-of-range")
def shorten_a_fresh_read(events: list[Event], rng: Random) -> list[Event] | None:
    ends = [(p, e, i) for p, e, i in done(events, "end_offset") if max(e.offsets.values()) > 0]
    for _, event, invoked in ends:
        ((name, _),) = event.offsets.items()
        certain = [
            offset + 1
            for position, append, _ in done(events, "append")
            for offset, _ in append.records.get(name, ())
            if position < invoked.op
        ]
        if certain:
            event.offsets[name] = rng.randrange(max(certain))
            return events
    return None


@breaks("out-of-range")
def refuse_what_is_there(events: list[Event], rng: Random) -> list[Event] | None:
    name = rng.choice(PARTITIONS)
    end = len(final_poll(events).records.get(name, ()))
    op = len(events)
    process = events[-1].process
    position = rng.randrange(end + 1)
    events.append(Event("invoke", "poll", process, op, 0, offsets={name: position}))
    events.append(Event("fail", "poll", process, op, 0, code=1))
    return events


@breaks("phantom-commit")
def tell_of_no_commit(events: list[Event], rng: Random) -> list[Event] | None:
    asked = [event for _, event, _ in done(events, "committed")]
    if not asked:
        return None
    event = rng.choice(asked)
    event.offsets = dict.fromkeys(event.offsets, 1_000_000)
    return events


@breaks("lost-commit")
def forget_commits(events: list[Event], rng: Random) -> list[Event] | None:
    certain: set[tuple[str, str]] = set()
    began: dict[int, bool] = {}
    for event in events:
        if event.type == "invoke" and event.f == "committed":
            began[event.op] = (event.group, event.partitions[0]) in certain
        elif event.type == "ok" and event.f == "commit":
            invoked = next(e for e in events if e.op == event.op)
            certain.update((invoked.group, name) for name in invoked.offsets)
        elif event.type == "ok" and event.f == "committed" and began[event.op]:
            event.offsets = dict.fromkeys(event.offsets, -1)
            return events
    return None


@breaks("lost-commit", "linear-committed")
def tell_of_an_older_commit(events: list[Event], rng: Random) -> list[Event] | None:
    """Told of one, then of another, then of the first again, one after the other."""
    told: dict[str, list[tuple[int, int, int]]] = {}
    for position, event, invoked in done(events, "committed"):
        ((name, offset),) = event.offsets.items()
        if invoked.group != "r":
            continue
        for value, _, end in told.get(name, []):
            is_over = any(
                other != value and end < began and other_end < invoked.op
                for other, began, other_end in told[name]
            )
            if is_over and value not in (-1, offset):
                event.offsets = {name: value}
                return events
        told.setdefault(name, []).append((offset, invoked.op, position))
    return None


def group_commits(events: list[Event]) -> list[tuple[int, Event, Event]]:
    """Accepted commits of generations."""
    return [row for row in done(events, "commit") if row[2].generation >= 0]


@breaks("zombie-commit")
def accept_an_older_generation(events: list[Event], rng: Random) -> list[Event] | None:
    for _, _, invoked in group_commits(events):
        if invoked.generation > 1:
            invoked.generation -= 1
            return events
    return None


@breaks("commit-regression")
def go_back(events: list[Event], rng: Random) -> list[Event] | None:
    highest: dict[str, tuple[int, int]] = {}
    for position, _, invoked in group_commits(events):
        for name, offset in invoked.offsets.items():
            known, end = highest.get(name, (0, -1))
            if known > 0 and end < invoked.op:
                invoked.offsets[name] = rng.randrange(known)
                return events
            if offset > known:
                highest[name] = (offset, position)
    return None


@breaks("double-assignment")
def give_to_two(events: list[Event], rng: Random) -> list[Event] | None:
    notes = [event for _, event, _ in done(events, "assigned") if event.partitions]
    if len(notes) < 2:
        return None
    event = rng.choice(notes)
    event.partitions = list(PARTITIONS)
    return events


@breaks("generation-back")
def forget_the_generation(events: list[Event], rng: Random) -> list[Event] | None:
    seen: set[int] = set()
    for _, event, _ in done(events, "assigned"):
        if event.process in seen:
            event.generation = 0
            return events
        seen.add(event.process)
    return None


@breaks("consume-skip")
def commit_past_the_polled(events: list[Event], rng: Random) -> list[Event] | None:
    members = {event.process for _, event, _ in done(events, "subscribe")}
    for _, _, invoked in reversed(group_commits(events)):
        for name, offset in invoked.offsets.items():
            if offset < len(final_poll(events).records.get(name, ())):
                polled = [
                    row
                    for _, event, _ in done(events, "poll")
                    if event.process in members
                    for row in event.records.get(name, ())
                ]
                end = max((row[0] for row in polled), default=-1)
                if polled and end + 1 < len(final_poll(events).records[name]):
                    invoked.offsets[name] = 10_000
                    return events
    return None


def perhaps_created(events: list[Event]) -> set[str]:
    """Topics that may come and have come at any time."""
    unknown = [event for event in events if event.type == "info" and event.f == "create_topic"]
    return {name for event in unknown for name in events[event.op].topics}


@breaks("lost-topic", "linear-topics")
def lose_a_topic(events: list[Event], rng: Random) -> list[Event] | None:
    *_, (_, event, _) = done(events, "list_topics")
    certain = [name for name in event.topics if name not in perhaps_created(events)]
    if not certain:
        return None
    event.topics.remove(rng.choice(certain))
    return events


@breaks("resurrected-topic", "linear-topics")
def bring_back_a_topic(events: list[Event], rng: Random) -> list[Event] | None:
    *_, (_, event, _) = done(events, "list_topics")
    unknown = perhaps_created(events)
    gone = {
        name
        for _, deleted, invoked in done(events, "delete_topic")
        for name in invoked.topics
        if name not in event.topics and name not in unknown
    }
    if not gone:
        return None
    event.topics.append(rng.choice(sorted(gone)))
    return events


@breaks("phantom-topic")
def invent_a_topic(events: list[Event], rng: Random) -> list[Event] | None:
    lists = [event for _, event, _ in done(events, "list_topics")]
    rng.choice(lists).topics.append("invented")
    return events


@breaks("linear-topics")
def create_twice(events: list[Event], rng: Random) -> list[Event] | None:
    op, process = len(events), events[-1].process
    *_, (_, last, _) = done(events, "list_topics")
    if not last.topics:
        return None
    events.append(Event("invoke", "create_topic", process, op, 0, topics=last.topics[:1]))
    events.append(Event("ok", "create_topic", process, op, 0))
    return events
