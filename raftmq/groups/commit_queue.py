"""Offset commits on their way to the metadata group: one command under way, the next one gathering.

While commands are not yet answered, or one left only a moment ago, all commits that come wait, and
the next command carries them together; a commit after a while without any leaves at once. Owns who
waits for what; a commit is judged when it is applied, each by itself. Never decides whether one is
allowed.

Invariants: what one member commits again before the last was sent replaces it there, and both are
answered together; commits of one member keep their order; groups take turns, so that a storm of one
group costs the others a share of a command and no more; what waits is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.metadata.commands import (
    CommitMany,
    CommitOffsets,
    CommitsDone,
    CommittedOffset,
    GroupCommand,
)
from raftmq.ports import Clock
from raftmq.promise import Promise

OFFSETS_PER_COMMAND_MAX: Final = 2_000
OFFSETS_WAITING_MAX: Final = 200_000

Settle = Callable[[ErrorCode], None]
Key = tuple[int, int, str, str | None]


@define(slots=True, eq=False)
class _Waiting:
    """What one member, or one consumer outside of group management, wants saved."""

    command: CommitOffsets
    offsets: dict[tuple[str, int], CommittedOffset]
    settles: list[Settle] = field(factory=list)


class CommitQueue:
    """The commits of one coordinator."""

    def __init__(
        self,
        propose: Callable[[GroupCommand], Promise[Any]],
        error_of: Callable[[Promise[Any]], ErrorCode],
        *,
        clock: Clock,
        later: Callable[[float, Callable[[], None]], object] | None = None,
        linger_ms: float = 0.0,
        in_flight_max: int = 1,
        offsets_per_command_max: int = OFFSETS_PER_COMMAND_MAX,
        offsets_waiting_max: int = OFFSETS_WAITING_MAX,
    ) -> None:
        """`error_of` tells what became of a proposed command; `later(delay_ms, callback)` is a
        timer, without which nothing lingers."""
        self._clock = clock
        self._later = later
        self._linger_ms = linger_ms
        self._in_flight_max = in_flight_max
        self._sent_ms = float("-inf")
        self._is_lingering = False
        self._propose = propose
        self._error_of = error_of
        self._per_command_max = offsets_per_command_max
        self._waiting_max = offsets_waiting_max
        self._groups: dict[str, dict[Key, _Waiting]] = {}  # the first one is served next
        self._in_flight = 0
        self.offsets_waiting = 0
        self.commits_count = 0
        self.commands_count = 0

    def __len__(self) -> int:
        return self.offsets_waiting

    def add(self, command: CommitOffsets, settle: Settle) -> None:
        """Save these positions; `settle` is called once, with what became of them."""
        if self.offsets_waiting + len(command.offsets) > self._waiting_max:
            settle(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)  # which every client tries again
            return
        self.commits_count += 1
        key = (
            command.coordinator_epoch,
            command.generation,
            command.member_id,
            command.instance_id,
        )
        of_group = self._groups.setdefault(command.group, {})
        waiting = of_group.get(key)
        if waiting is None:
            waiting = of_group[key] = _Waiting(command, {})
        self.offsets_waiting -= len(waiting.offsets)
        for entry in command.offsets:
            waiting.offsets[entry.topic, entry.partition] = entry
        self.offsets_waiting += len(waiting.offsets)
        waiting.settles.append(settle)
        self._send_if_due()

    def flush(self, group: str) -> None:
        """Send what a group still waits with ahead of whatever is proposed for it next."""
        of_group = self._groups.pop(group, None)
        if of_group:
            self._send(self._taken(list(of_group.values())))

    def flush_all(self) -> None:
        """Send everything now."""
        while self._groups:
            self._send(self._take())

    def _send_if_due(self) -> None:
        if self._in_flight >= self._in_flight_max or self._is_lingering or not self._groups:
            return
        left_ms = self._sent_ms + self._linger_ms - self._clock.monotonic_ms()
        if left_ms <= 0 or self._later is None:
            self._send(self._take())
            return
        self._is_lingering = True
        self._later(left_ms, self._lingered)

    def _lingered(self) -> None:
        self._is_lingering = False
        if self._in_flight < self._in_flight_max and self._groups:
            self._send(self._take())

    def _take(self) -> list[_Waiting]:
        """The next command's commits: one of each group in turn until it is full."""
        taken: list[_Waiting] = []
        room = self._per_command_max
        while self._groups and room > 0:
            name = next(iter(self._groups))
            of_group = self._groups.pop(name)
            waiting = of_group.pop(next(iter(of_group)))
            if of_group:
                self._groups[name] = of_group  # now the last
            taken.append(waiting)
            room -= len(waiting.offsets)
        return self._taken(taken)

    def _taken(self, taken: list[_Waiting]) -> list[_Waiting]:
        self.offsets_waiting -= sum(len(waiting.offsets) for waiting in taken)
        return taken

    def _send(self, taken: list[_Waiting]) -> None:
        if not taken:
            return
        self._in_flight += 1
        self._sent_ms = self._clock.monotonic_ms()
        self.commands_count += 1
        commits = tuple(_merged(waiting) for waiting in taken)
        command = commits[0] if len(commits) == 1 else CommitMany(commits=commits)

        def done(promise: Promise[Any]) -> None:
            self._in_flight -= 1
            error = self._error_of(promise)
            codes = [error] * len(taken)
            if error is ErrorCode.NONE and isinstance(promise.result(), CommitsDone):
                codes = [ErrorCode(code) for code in promise.result().codes]
            for waiting, code in zip(taken, codes, strict=True):
                for settle in waiting.settles:
                    settle(code)
            self._send_if_due()

        self._propose(command).when_done(done)


def _merged(waiting: _Waiting) -> CommitOffsets:
    if len(waiting.settles) == 1:
        return waiting.command
    return msgspec.structs.replace(waiting.command, offsets=tuple(waiting.offsets.values()))
