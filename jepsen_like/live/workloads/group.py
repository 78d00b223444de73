"""Consumer groups: poll with subscribe, commits with a generation, rebalances without end.

Members come and go, some of them without a word. A member that is given partitions asks where the
group committed, notes what it was given with these positions, and reads on from there; it commits
what it polled. So histories show that offsets do not go back, that no generation gives a partition
to two members, and that nobody of an older generation commits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Final, Literal

from attrs import define, field

from jepsen_like.live.workloads.base import Around, Crowd, HungError, UnansweredError
from jepsen_like.live.workloads.members import GroupConsumer, group_consumer

GROUP: Final = "subscribed"
MEMBERS: Final = 3
LIFE_S: Final = (10.0, 40.0)
COMMIT_EVERY_S: Final = (0.2, 1.5)


def committed(
    around: Around, process: int, consumer: GroupConsumer, group: str, keys: list[str]
) -> dict[str, int] | None:
    """Ask what a group committed; None when there was no answer."""
    invoked = around.recorder.invoke(process, "committed", group=group, partitions=keys)
    try:
        offsets = consumer.committed(keys)
    except UnansweredError as error:
        around.recorder.info(invoked, group=group, error=str(error))
        return None
    around.recorder.ok(invoked, group=group, offsets=offsets)
    return offsets


def commit(
    around: Around,
    process: int,
    consumer: GroupConsumer,
    group: str,
    offsets: dict[str, int],
    generation: int,
) -> bool:
    """Commit offsets; True when they certainly are. `HungError`: this client is over.

    The client's own thread asks with the generation that it is in when the request leaves, which
    may be another than the one that was read before: then nobody can say for which it was accepted.
    """
    recorder = around.recorder
    invoked = recorder.invoke(
        process, "commit", group=group, offsets=offsets, generation=generation
    )
    try:
        consumer.commit(offsets)
    except HungError as error:
        recorder.info(invoked, group=group, error=str(error), sent=consumer.sent)
        raise
    except UnansweredError as error:
        # Even a refusal may be that of a second try, after a first one that was answered into
        # the void: nobody knows.
        recorder.info(invoked, group=group, error=str(error), sent=consumer.sent)
        return False
    if generation >= 0 and (now := consumer.generation()) != generation:
        recorder.info(
            invoked,
            group=group,
            error=f"from generation {generation} to {now} meanwhile",
            sent=consumer.sent,
        )
        return False
    recorder.ok(invoked, group=group, sent=consumer.sent)
    return True


@define(eq=False)
class _Membership:
    """What one member was given, by its callbacks; they run within its polls."""

    around: Around
    process: int
    consumer: GroupConsumer
    group: str
    owned: set[str] = field(factory=set)
    positions: dict[str, int] = field(factory=dict)
    moved: set[str] = field(factory=set)
    """Partitions that came or went during this poll."""

    def given(self, keys: list[str]) -> None:
        """The coordinator handed partitions out."""
        self.owned = set(keys)
        self.moved |= self.owned
        consumer = self.consumer
        generation = consumer.generation()
        offsets = committed(self.around, self.process, consumer, self.group, keys) if keys else {}
        positions = None
        if offsets is not None:
            positions = {key: max(0, offset) for key, offset in offsets.items()}
        consumer.start(positions, keys)
        self.positions = positions or {}
        self.around.recorder.note(
            self.process,
            "assigned",
            group=self.group,
            generation=generation,
            partitions=keys,
            offsets=self.positions,
        )

    def taken(self, keys: list[str]) -> None:
        """The group takes everything back, or gave it to others already."""
        self.moved |= set(keys)
        self.owned.clear()
        self.positions = {}
        self.around.recorder.note(self.process, "revoked", group=self.group, partitions=keys)


class GroupMembers(Crowd):
    """Members of one group, each in a thread."""

    def __init__(
        self,
        around: Around,
        group: str = GROUP,
        topics: Sequence[str] = (),
        f: Literal["poll", "poll_view"] = "poll",
    ) -> None:
        """Of topics that producers write to, unless others are named; `f` names the polls."""
        super().__init__(around, f"{group}-member", MEMBERS)
        self._group = group
        self._topics = sorted(topics or around.plan.topics)
        self._f = f

    def _run(self, number: int) -> None:
        around = self._around
        rng = random.Random(around.plan.seed * 99 + number)
        # The first member stays, so that the group has somebody to take partitions from.
        while not around.stop.is_set():
            self._live(number, rng, float("inf") if number == 0 else rng.uniform(*LIFE_S))
            around.stop.wait(rng.uniform(0.1, 3))

    def _live(self, number: int, rng: random.Random, seconds: float) -> None:
        around = self._around
        process = around.process()
        group, topics = self._group, self._topics
        consumer = group_consumer(around, number, group, f"member-{process}")
        membership = _Membership(around, process, consumer, group)
        try:
            invoked = around.recorder.invoke(process, "subscribe", group=group, topics=topics)
            consumer.subscribe(topics, membership.given, membership.taken)
            around.recorder.ok(invoked, group=group, topics=topics)
            ends_at = time.monotonic() + seconds
            next_commit = time.monotonic()
            while time.monotonic() < ends_at and not around.stop.is_set():
                self._poll(process, consumer, membership)
                if time.monotonic() >= next_commit and membership.positions:
                    next_commit = time.monotonic() + rng.uniform(*COMMIT_EVERY_S)
                    self._commit(process, consumer, membership)
        except HungError:
            pass  # it is told of; another one takes its place
        finally:
            consumer.close()
        around.recorder.note(process, "crash", group=group)

    def _poll(self, process: int, consumer: GroupConsumer, membership: _Membership) -> None:
        around = self._around
        membership.moved.clear()
        invoked = around.recorder.invoke(process, self._f, group=self._group)
        found, errors = consumer.take()
        around.polled_records += sum(map(len, found.values()))
        around.recorder.ok(
            invoked,
            group=self._group,
            records=found,
            error="; ".join(sorted(errors)),
            partitions=sorted(membership.moved),
        )
        for key, records in found.items():
            # What came in the poll of a rebalance may be from before it: the position stays.
            if key in membership.owned and key not in membership.moved:
                membership.positions[key] = records[-1][0] + 1

    def _commit(self, process: int, consumer: GroupConsumer, membership: _Membership) -> None:
        generation = consumer.generation()
        if generation >= 0:
            offsets = dict(sorted(membership.positions.items()))
            commit(self._around, process, consumer, self._group, offsets, generation)
