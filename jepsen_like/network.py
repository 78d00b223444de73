"""The simulated network: frames between nodes, dropped, delayed, duplicated, reordered, cut off.

Worse than TCP on purpose: frames of one stream may overtake each other and may arrive after both
ends have restarted. Raft must stand that; the product's streams only make it rarer. Owns which
links are cut. Every choice is drawn from the given random source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from jepsen_like.options import SimOptions
from raftmq.types import Buffer

Deliver = Callable[[int, int, bytes], None]


class Network:
    """Carries frames between nodes."""

    def __init__(
        self,
        random: Random,
        options: SimOptions,
        schedule: Callable[[float, Callable[[], None]], None],
        deliver: Deliver,
    ) -> None:
        self._random = random
        self._options = options
        self._schedule = schedule
        self._deliver = deliver
        self._cut: dict[tuple[int, int], int] = {}
        self.is_faulty = True
        self.is_stormy = False
        self.sent = 0
        self.dropped = 0

    def send(self, sender: int, to: int, frame: Sequence[Buffer]) -> bool:
        """Take a frame; it arrives never, once or more than once."""
        self.sent += 1
        data = b"".join(frame)
        random, options = self._random, self._options
        copies = 1
        if self.is_faulty:
            drop = 0.35 if self.is_stormy else options.drop
            if random.random() < drop:
                self.dropped += 1
                return True  # the sender's socket took it; nobody will say more
            if random.random() < options.duplicate:
                copies = 2
        for _ in range(copies):
            self._schedule(self._delay_ms(), lambda: self._arrive(sender, to, data))
        return True

    def _delay_ms(self) -> float:
        low, high = self._options.latency_ms
        random = self._random
        if self.is_faulty:
            straggler = 0.2 if self.is_stormy else self._options.straggler
            if random.random() < straggler:
                return random.uniform(high, self._options.straggler_ms)
        return random.uniform(low, high)

    def _arrive(self, sender: int, to: int, data: bytes) -> None:
        if (sender, to) in self._cut:
            self.dropped += 1
            return
        self._deliver(sender, to, data)

    def cut(self, sender: int, to: int) -> None:
        """Lose everything from `sender` to `to` from now on."""
        self._cut[sender, to] = self._cut.get((sender, to), 0) + 1

    def mend(self, sender: int, to: int) -> None:
        """Undo one `cut`."""
        count = self._cut.get((sender, to), 0) - 1
        if count > 0:
            self._cut[sender, to] = count
        else:
            self._cut.pop((sender, to), None)

    def mend_all(self) -> None:
        """No link is cut."""
        self._cut.clear()
