"""Bugs planted in delay topics: what is noted, sent, taken once, and kept until it is due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from attrs import evolve

from jepsen_like.bug import Bug, nothing, patching
from jepsen_like.cluster import stress
from raftmq.delays.deliveries import Delivery, Ended, GivenUp, Settled, Undecided, give_up
from raftmq.delays.pending import Pending
from raftmq.delays.runs import Place, Run
from raftmq.node import delays
from raftmq.node.delay_readings import Followers, LaneItem, LogReader, Reading
from raftmq.node.delays import Delays, Led
from raftmq.partition.partition import Partition
from raftmq.partition.producer_state import ACCEPT
from raftmq.partition.producers import PartitionProducers
from raftmq.partition.settings import PartitionSettings
from raftmq.records import BatchHeader
from raftmq.replication.clocks import TimeBounds
from raftmq.types import Offset

EARLY_MS: Final = 400

_find_note = Delays._find_note
_take = Followers.take
_has_given_up = Delays._has_given_up
_take_in = LogReader._take_in
_reached_ms = TimeBounds.reached_ms


async def _not_waited_for(self: Delays, led: Led, delivery: Delivery, now_ms: int) -> bool:
    """The batch leaves before its note is committed."""
    result = led.partition.append_own(delays._note_of(led, delivery, now_ms), 2_000)
    led.before, led.is_owed = delivery, bool(delivery.offsets)
    led.note_offset = led.partition.replica.log_end_offset - 1
    led.number += 1
    del self, result
    return True


async def _believed(self: Delays, led: Led) -> float:
    """A new leader takes the last delivery for sent."""
    pause_ms = await _find_note(self, led)
    led.is_owed = False
    return pause_ms


def _taken_again(_self: PartitionProducers, _header: BatchHeader) -> Any:
    return ACCEPT


def _early(self: TimeBounds, monotonic_ms: float) -> int | None:
    reached = _reached_ms(self, monotonic_ms)
    return None if reached is None else reached + EARLY_MS


def _all_may_go(_self: Delays, partition: Partition) -> Offset:
    return partition.stable_end


def _stamped_by_itself(self: Partition, settings: PartitionSettings) -> int:
    """Appends are stamped by whatever clock the leader has."""
    del settings
    return self._clock.wall_ms()


def _not_counted(before: Delivery) -> Delivery:
    """What is delivered next has the sequence of what was."""
    return evolve(before, offsets=())


def _none_cancelled(_self: Run, _key: bytes) -> int:
    return 0


def _all_was_read(self: Followers, led: LaneItem, cursor: Place) -> Reading | None:
    """A new leader takes what it read as a follower for all there is."""
    reading = _take(self, led, cursor)
    if reading is not None:
        reading.end = led.partition.replica.high_watermark
    return reading


async def _committed_anyway(
    self: LogReader, item: LaneItem, reading: Reading, found: Undecided | Ended | GivenUp | Settled
) -> None:
    """The marker of an abort counts as one of a commit."""
    if isinstance(found, Ended):
        found = evolve(found, is_commit=True)
    await _take_in(self, item, reading, found)


def _gone_at_once(self: Delays, led: Led, place: Place, now_ms: int) -> bool:
    """A target that is gone is waited for by nobody."""
    _has_given_up(self, led, place, now_ms)
    return led.gone_ms is not None and led.lane.has_dead and not led.lane.is_dead


def _given_up_for_nobody(before: Delivery | None, places: Sequence[Place], at_ms: int) -> Delivery:
    """The note settles what is given up, and does not name it."""
    return evolve(give_up(before, places, at_ms), given_up=())


def _with_what_is_owed(before: Delivery, places: Sequence[Place]) -> Delivery:
    """What a target may have taken is given up as well."""
    owed = [Place(before.cursor.due_ms, offset) for offset in before.offsets]
    return give_up(before, [*owed, *places], before.at_ms)


def _bug(
    *targets: tuple[object, str, object], caught_by: tuple[str, ...], begins_at: int = 1
) -> Bug:
    return Bug(patching(*targets), stress.delays, 12, (14,), caught_by, begins_at)


DELAY_BUGS: Final[dict[str, Bug]] = {
    "sent-before-its-note": _bug(
        (Delays, "_append_note", _not_waited_for),
        caught_by=("DeliveredOnce", "NothingPendingIsDropped", "CancelledStaysAway"),
    ),
    "sent-is-believed": _bug(
        (Delays, "_find_note", _believed), caught_by=("NothingPendingIsDropped",)
    ),
    "deliveries-are-taken-twice": _bug(
        (PartitionProducers, "judge_own", _taken_again), caught_by=("DeliveredOnce",)
    ),
    "delivered-by-a-fast-clock": _bug(
        (TimeBounds, "reached_ms", _early), caught_by=("NeverEarly", "CancelledStaysAway")
    ),
    "stamped-by-what-has-come": _bug(
        (TimeBounds, "coming_ms", TimeBounds.reached_ms), caught_by=("NeverEarly",)
    ),
    "cancellations-are-ignored": _bug(
        (Pending, "_cancel", nothing), caught_by=("CancelledStaysAway",)
    ),
    "far-cancellations-are-ignored": _bug(
        (Run, "cancel", _none_cancelled), caught_by=("CancelledStaysAway",)
    ),
    "what-is-beyond-is-forgotten": _bug(
        (Pending, "_leave", nothing), caught_by=("NothingPendingIsDropped",)
    ),
    "followers-have-read-all": _bug(
        (Followers, "take", _all_was_read), caught_by=("NothingPendingIsDropped",)
    ),
    "retention-takes-the-pending": _bug(
        (Delays, "kept_from", _all_may_go), caught_by=("NothingPendingIsDropped",)
    ),
    "cursor-passes-the-unread": _bug(
        (Delays, "_first_unread_ms", nothing),
        caught_by=("NothingPendingIsDropped",),
        begins_at=15,
    ),
    "the-dead-come-back": _bug(
        (Led, "target", property(lambda led: led.partition.settings.delivers_to)),
        caught_by=("AttemptsAreCounted", "NothingPendingIsDropped"),
    ),
    "aborted-are-delivered": _bug(
        (LogReader, "_take_in", _committed_anyway), caught_by=("DeliveredOnce",)
    ),
    "gives-up-at-once": _bug(
        (Delays, "_has_given_up", _gone_at_once), caught_by=("GivesUpInTime",)
    ),
    "given-up-are-forgotten": _bug(
        (delays, "give_up", _given_up_for_nobody), caught_by=("NothingPendingIsDropped",)
    ),
    "the-owed-are-given-up": _bug(
        (delays, "give_up_behind", _with_what_is_owed),
        caught_by=("DeliveredOnce", "NothingPendingIsDropped"),
    ),
    "settled-is-not-counted": _bug(
        (delays, "nothing_after", _not_counted), caught_by=("NothingPendingIsDropped",)
    ),
    "delays-by-the-leaders-clock": _bug(
        (Partition, "_stamp_ms", _stamped_by_itself),
        caught_by=("NeverEarly", "NothingPendingIsDropped", "CancelledStaysAway"),
        begins_at=5,
    ),
}
