"""What time it is, from the clocks of many nodes: no single node's clock may delete data.

`RetentionClock` is one leader's: the least clock that a majority of its voters reports (its own
among them), so a minority that is days ahead deletes nothing; and it advances no faster than
monotonic time, so a majority that jumps together deletes nothing early either.

`AgreedTime` is a node's, for expiry: two bounds, the earliest time (by which age is judged) and the
latest (with which what begins to age is stamped). Both are sound while fewer clocks are wrong than
half of the metadata group's voters, or of the clocks heard: of more clocks than may be wrong, one
is right. They go on by monotonic time where no clocks are heard, and the earliest never runs ahead
of monotonic time. Nothing is known until this node has led a group with enough voters.

For delayed records it has two more, which follow clocks that are set right: a time that has come,
by which they are delivered, and one that has not passed yet, from which a delay counts. Clocks are
as old as the messages they came by, so the two are apart, by seconds after a pause.

Nothing here decides about safety, and a node's own clock alone decides nothing, except where it is
the only one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from math import ceil
from typing import Final, NamedTuple

from raftmq.ports import Clock
from raftmq.raft.core import RaftCore
from raftmq.types import NodeId, ReplicaId

HEAR_EVERY_MS: Final = 1_000.0
HEAR_SOON_MS: Final = 100.0
"""While more is wanted."""
HEAR_FIRST_MS: Final = 10.0
"""While no time is known by which records could be delivered."""
HEARD_WITHIN_MS: Final = 60_000.0
"""So long does a hearing count for what was reached: monotonic clocks drift by some ten
milliseconds, and clocks that are set right are followed."""
HEAR_AGAIN_MS: Final = 30_000.0
"""After so long a hearing is wanted, before the last one does not count any more."""
REMEMBERED: Final = 8
"""Hearings, a second apart."""
AGREED_WITHIN_MS: Final = 10_000
"""Clocks that may differ by more agree on nothing, be it by their age."""
RIGHT_WITHIN_MS: Final = 1_000
_GROUPS_HEARD: Final = 64
"""So many groups that this node leads have the clocks of most other nodes."""


class RetentionClock:
    """What time it is for one replica's retention; kept across leaderships."""

    __slots__ = ("_at_ms", "_now_ms")

    def __init__(self) -> None:
        self._now_ms: float | None = None
        self._at_ms = 0.0

    def now_ms(self, core: RaftCore, clock: Clock) -> int | None:
        """Now, on a leader that can commit; None while it knows too few clocks of its voters."""
        voters = core.configuration.voters
        clocks = [clock.wall_ms()]
        clocks += [
            progress.clock_ms
            for peer, progress in core.progress.items()
            if peer in voters and progress.clock_ms
        ]
        return self.read(clocks, len(voters) // 2 + 1, clock.monotonic_ms())

    def read(self, clocks_ms: Sequence[int], quorum: int, monotonic_ms: float) -> int | None:
        """Now, from the clocks that voters reported; None without a majority of them."""
        if len(clocks_ms) < quorum:
            return None
        agreed: float = sorted(clocks_ms, reverse=True)[quorum - 1]
        if self._now_ms is not None:
            agreed = min(agreed, self._now_ms + monotonic_ms - self._at_ms)
        self._now_ms = agreed if self._now_ms is None else max(agreed, self._now_ms)
        self._at_ms = monotonic_ms
        return int(self._now_ms)


def heard_clocks(core: RaftCore) -> Iterator[tuple[ReplicaId, int]]:
    """The clocks of the other voters that this leader heard lately."""
    voters = core.configuration.voters
    for peer, progress in core.progress.items():
        is_heard = core.now - progress.last_heard_tick <= 2 * core.config.election_ticks
        if peer in voters and progress.clock_ms and is_heard:
            yield peer, progress.clock_ms


class Hearing(NamedTuple):
    """Between which two times it was when clocks were heard, while no more of them are wrong than
    can be told apart; both as distances from monotonic time."""

    at_ms: float
    since: float
    until: float


class TimeBounds:
    """The two bounds, kept as distances from monotonic time."""

    __slots__ = ("_ceiling", "_earliest", "_hearings", "_latest")

    def __init__(self) -> None:
        self._ceiling: float | None = None
        self._earliest = self._latest = 0.0
        self._hearings: deque[Hearing] = deque(maxlen=REMEMBERED)

    def hear(self, clocks: Collection[tuple[int, float]], voters: int, monotonic_ms: float) -> None:
        """Move the bounds by clocks of different nodes; too few of them change nothing.

        Args:
            clocks: what each showed, and a time before which it did not.
            monotonic_ms: when all of them had been read.
        """
        # A clock that was slow to come is further behind at least, and no further ahead at most.
        least = sorted(clock_ms - monotonic_ms for clock_ms, _ in clocks)
        most = sorted(clock_ms - since_ms for clock_ms, since_ms in clocks)
        few = max(min(voters, 3), len(clocks)) // 2
        if len(clocks) > few:
            self._hearings.append(Hearing(monotonic_ms, least[-1 - few], most[few]))
        wrong_max = max(voters - 1, len(clocks) - 1) // 2
        if len(clocks) <= wrong_max:
            return
        self._latest = most[wrong_max]
        if self._ceiling is None:
            self._ceiling = self._latest
        self._earliest = min(least[-1 - wrong_max], self._ceiling)

    def earliest_ms(self, monotonic_ms: float) -> int | None:
        """The earliest time: no right clock shows less; None: unknown."""
        return None if self._ceiling is None else int(monotonic_ms + self._earliest)

    def latest_ms(self, monotonic_ms: float) -> int | None:
        """The latest time: no right clock shows more; None: unknown."""
        return None if self._ceiling is None else int(monotonic_ms + self._latest)

    def reached_ms(self, monotonic_ms: float) -> int | None:
        """A time that has come, while fewer than half of the clocks heard are wrong, or one of two:
        some right clock showed it within the last hearings. (Of five voters two may be wrong; who
        hears three of them could go by the slowest only.) Clocks that were heard are as old as the
        message they came by, so the greatest of those is nearest; and it follows clocks that are
        set right, where the earliest time keeps its ceiling. Hearings that are long ago do not
        count: what they told may have been set right since, and monotonic time drifts."""
        known = self._known(monotonic_ms)
        return None if known is None else int(monotonic_ms + known)

    def coming_ms(self, monotonic_ms: float) -> int | None:
        """A time that has not passed yet, under the same conditions: ahead of `reached_ms` by as
        much as clocks may have gone on since they were asked. A hearing that was slow leaves more
        open than one before it did, so the narrowest counts of those that the last one does not
        contradict."""
        known = self._known(monotonic_ms)
        return None if known is None else ceil(monotonic_ms + max(known, self._until(monotonic_ms)))

    def doubt_ms(self, monotonic_ms: float) -> float:
        """So far may `reached_ms` be behind; below 0 where most clocks were set back; 0 where it
        is unknown."""
        known = self._known(monotonic_ms)
        return 0.0 if known is None else self._until(monotonic_ms) - known

    def heard_ago_ms(self, monotonic_ms: float) -> float | None:
        """How long ago the last hearing was; None: there was none."""
        return monotonic_ms - self._hearings[-1].at_ms if self._hearings else None

    def _known(self, monotonic_ms: float) -> float | None:
        return max((heard.since for heard in self._lately(monotonic_ms)), default=None)

    def _until(self, monotonic_ms: float) -> float:
        last = self._hearings[-1]
        untils = [heard.until for heard in self._lately(monotonic_ms)]
        return min(until for until in untils if until >= last.since)

    def _lately(self, monotonic_ms: float) -> Iterator[Hearing]:
        since_ms = monotonic_ms - HEARD_WITHIN_MS
        return (heard for heard in self._hearings if heard.at_ms >= since_ms)


class AgreedTime:
    """The bounds as one node knows them."""

    def __init__(
        self,
        node_id: NodeId,
        clock: Clock,
        leaders: Callable[[], Iterable[RaftCore]],
        voters: Callable[[], int],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Take clocks from the groups that this node leads.

        Args:
            leaders: the cores of those groups, but for quiescent ones, whose clocks are old.
            voters: how many voters the metadata group has; 0 while that is not known.
            wake: ends the quiescence of the metadata group, if this node leads it.
        """
        self._wake = wake
        self._node_id = node_id
        self._clock = clock
        self._leaders = leaders
        self._voters = voters
        self._bounds = TimeBounds()
        self._next_ms = 0.0

    def tick(self) -> None:
        """Let time pass; call it at each tick. Until anything is known, the metadata group is kept
        awake where it is led: a quiescent leader hears no clocks, and nothing else may wake it."""
        if self._bounds.latest_ms(self._heard()) is None:
            self._wake()

    def earliest_ms(self) -> int | None:
        """What time it is at the earliest; None: unknown."""
        return self._bounds.earliest_ms(self._heard())

    def latest_ms(self) -> int | None:
        """What time it is at the latest; None: unknown."""
        return self._bounds.latest_ms(self._heard())

    def reached_ms(self) -> int | None:
        """A time that has come, by which delayed records are delivered; None: unknown."""
        return self._bounds.reached_ms(self._heard())

    def seek(self) -> None:
        """Hear clocks soon: a group that this node leads was touched for it."""
        self._next_ms = min(self._next_ms, self._heard() + HEAR_SOON_MS)

    @property
    def is_sure(self) -> bool:
        """True while the clocks that were heard agree, or so many were heard that it is known
        which are wrong; and that was not long ago."""
        now_ms = self._heard()
        ago_ms = self._bounds.heard_ago_ms(now_ms)
        is_new = ago_ms is not None and ago_ms <= HEAR_AGAIN_MS
        return is_new and self._bounds.doubt_ms(now_ms) <= RIGHT_WITHIN_MS

    def stamp_ms(self) -> int | None:
        """What a leader stamps a delayed record with that is appended now: a time that is still to
        come or has just come, so that no delay that counts from it ends early. None: unknown, also
        while so few clocks are heard that one may be wrong, and nobody knows which."""
        now_ms = self._heard()
        if self._bounds.doubt_ms(now_ms) > AGREED_WITHIN_MS:
            return None
        return self._bounds.coming_ms(now_ms)

    def _heard(self) -> float:
        now_ms = self._clock.monotonic_ms()
        voters = self._voters()
        if now_ms >= self._next_ms and voters:
            clocks = self._clocks(now_ms)
            # A thread may be held up between two readings: what was read before the monotonic
            # clock is not ahead of time for it, and nothing is delivered early.
            self._bounds.hear(clocks.values(), voters, self._clock.monotonic_ms())
            self._next_ms = now_ms + self._pause_ms(now_ms)
        return now_ms

    def _pause_ms(self, now_ms: float) -> float:
        if self._bounds.reached_ms(now_ms) is None:
            return HEAR_FIRST_MS
        return HEAR_SOON_MS if self._bounds.latest_ms(now_ms) is None else HEAR_EVERY_MS

    def _clocks(self, now_ms: float) -> dict[NodeId, tuple[int, float]]:
        """Of each node the newest clock, and when it was asked for.

        How old a clock is tells the heartbeat that it answers, whatever stood still meanwhile:
        what a process finds in its sockets after a pause is as old as the pause, and what a group
        had heard before it was quiescent as old as that.
        """
        clocks: dict[NodeId, tuple[int, float]] = {}
        for core in islice(self._leaders(), _GROUPS_HEARD):
            for peer in core.configuration.voters:
                told = core.progress[peer].told_clock if peer in core.progress else None
                if told is None or now_ms - told[1] > AGREED_WITHIN_MS:
                    continue
                clocks[peer.node_id] = max(told, clocks.get(peer.node_id, told))
        clocks[self._node_id] = self._clock.wall_ms(), now_ms
        return clocks
