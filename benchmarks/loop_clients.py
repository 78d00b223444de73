"""Light clients on one `Loop`: each a connection that follows its leader, one request in flight.

A leadership that moves is followed as a client library would follow it, and counted.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from typing import Final

from attrs import define

from benchmarks.wire import (
    AnswerError,
    Line,
    Loop,
    check_fetched,
    check_produced,
    leader_addresses,
    settled_leaders,
)
from raftmq.errors import ErrorCode

_RETRY_S: Final = 0.1


@define
class Tally:
    """What all clients of a loop saw together."""

    answered: int = 0
    moved: int = 0
    """How often one was told that it asks the wrong node."""


class TopicLeaders:
    """Where a topic's partitions are led, asked again when somebody was sent away."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.addresses = settled_leaders(bootstrap, topic)
        self._bootstrap = bootstrap
        self._topic = topic
        self._asked_at = 0.0

    def look_again(self) -> None:
        """Ask where the leaders are now, unless that was just asked."""
        now = time.perf_counter()
        if now - self._asked_at >= _RETRY_S:
            self._asked_at = now
            with contextlib.suppress(AnswerError):  # an election goes on: asked again soon
                self.addresses = leader_addresses(self._bootstrap, self._topic)


class LoopClient(ABC):
    """One connection. A subclass calls `send` when its time has come."""

    def __init__(
        self, loop: Loop, tally: Tally, leaders: TopicLeaders, part: int, frame: bytes
    ) -> None:
        self.loop = loop
        self._tally = tally
        self._leaders = leaders
        self._part = part
        self._frame = frame
        self._address = leaders.addresses[part]
        self._line = loop.connect(self._address, self._heard)

    def send(self) -> None:
        """Send the request to whom leads the partition, as far as is known."""
        address = self._leaders.addresses[self._part]
        if address != self._address:
            self.loop.disconnect(self._line)
            self._address = address
            self._line = self.loop.connect(address, self._heard)
        self._line.send(self._frame)

    def _heard(self, _line: Line, answer: bytes) -> None:
        try:
            self.check(answer)
        except AnswerError as error:
            if error.code != ErrorCode.NOT_LEADER_OR_FOLLOWER:
                raise
            self._tally.moved += 1
            self._leaders.look_again()
            self.loop.at(time.perf_counter() + _RETRY_S, self.send)
            return
        self._tally.answered += 1
        self.answered()

    @abstractmethod
    def check(self, answer: bytes) -> None:
        """Raise AnswerError where the request was refused."""

    @abstractmethod
    def answered(self) -> None:
        """Go on after an answer."""


class Poller(LoopClient):
    """Fetches, and again as soon as it is answered."""

    def check(self, answer: bytes) -> None:
        """Nothing comes: the topic is quiet."""
        check_fetched(answer)

    def answered(self) -> None:
        """Poll on."""
        self.send()


class Punctual(LoopClient):
    """Produces whenever it is due, timed from then: a stall counts for all that it held up."""

    def __init__(
        self,
        loop: Loop,
        tally: Tally,
        leaders: TopicLeaders,
        part: int,
        frame: bytes,
        *,
        due: float,
        interval_s: float,
    ) -> None:
        super().__init__(loop, tally, leaders, part, frame)
        self.due = due
        """Of the next record; times are of the performance counter."""
        self._interval_s = interval_s
        self.loop.at(due, self.send)

    def check(self, answer: bytes) -> None:
        """Refused or not."""
        check_produced(answer)

    def answered(self) -> None:
        """Tell how long it took, and wait until the next one is due."""
        now = time.perf_counter()
        taken_s = now - self.due
        self.due += self._interval_s
        self.acknowledged(now, taken_s)
        self.loop.at(self.due, self.send)

    @abstractmethod
    def acknowledged(self, now: float, taken_s: float) -> None:
        """Note it; `due` may be put off."""
