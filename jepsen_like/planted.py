"""All bugs planted on purpose, each of which the simulation must find: the test of the tests.

Each bug is a context manager that patches the product's own modules and undoes it, with the options
that stress what it breaks. `hunt` runs seeds until one is caught. A bug that escapes means that the
faults or the invariants of the simulation are too weak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from attrs import frozen

from jepsen_like.bug import Bug, Plant
from jepsen_like.cluster.planted_clients import CLIENT_BUGS
from jepsen_like.cluster.planted_delays import DELAY_BUGS
from jepsen_like.cluster.planted_elastic import ELASTIC_BUGS
from jepsen_like.cluster.planted_moves import MOVE_BUGS
from jepsen_like.cluster.planted_narrow import NARROW_BUGS
from jepsen_like.cluster.planted_nodes import NODE_BUGS
from jepsen_like.cluster.planted_replicas import REPLICA_BUGS
from jepsen_like.cluster.planted_transactions import TRANSACTION_BUGS
from jepsen_like.cluster.planted_views import VIEW_BUGS
from jepsen_like.cluster.run import Verdict, run_cluster_seed

BUGS: Final[dict[str, Bug]] = {
    **CLIENT_BUGS,
    **DELAY_BUGS,
    **ELASTIC_BUGS,
    **MOVE_BUGS,
    **NARROW_BUGS,
    **NODE_BUGS,
    **REPLICA_BUGS,
    **TRANSACTION_BUGS,
    **VIEW_BUGS,
}
"""By name. Each must be caught within 200 seeds."""


@frozen
class Catch:
    """What came of a hunt.

    Attributes:
        found: what caught it.
        others: anomalies that do not count, with their seeds.
        clean_verdict: of the same seed without the bug.
    """

    name: str
    seeds: int
    seconds: float
    found: str = ""
    others: tuple[str, ...] = ()
    clean_verdict: str = ""

    @property
    def is_caught(self) -> bool:
        """True when it was found, and the same seed has no anomaly without it."""
        return bool(self.found) and self.clean_verdict != Verdict.ANOMALY.name

    def __str__(self) -> str:
        told = f"{self.name}: "
        if self.found:
            told += f"caught at seed {self.seeds} by {self.found}"
        else:
            told += f"ESCAPED {self.seeds} seeds"
        told += f" ({self.seconds:.1f} s)"
        if self.found and not self.is_caught:
            told += f"; NOT CLEAN without it: {self.clean_verdict}"
        if self.others:
            told += f"; before that: {', '.join(self.others)}"
        return told


SECONDS_MAX: Final = 60.0
"""Of a core: no bug may take longer to catch."""


class Finding(Protocol):
    """What is asked of a run."""

    verdict: Verdict
    name: str


def hunt_with(
    name: str,
    plant: Plant,
    caught_by: Sequence[str],
    run: Callable[[int], Finding],
    seeds: range,
    seconds_max: float = SECONDS_MAX,
    clock: Callable[[], float] = time.process_time,
) -> Catch:
    """Run seeds with a bug planted until it is caught by one of those that must catch it, or has
    escaped for so many seconds of a core."""
    began = clock()
    others: list[str] = []
    for tried, seed in enumerate(seeds):
        if clock() - began > seconds_max:
            return Catch(name, tried, clock() - began, "", tuple(others))
        with plant():
            result = run(seed)
        if result.verdict is not Verdict.ANOMALY:
            continue
        if result.name in caught_by:
            seconds = clock() - began
            clean = run(seed)
            found = result.name
            return Catch(name, seed, seconds, found, tuple(others), clean.verdict.name)
        others.append(f"{result.name} at {seed}")
    return Catch(name, len(seeds), clock() - began, "", tuple(others))


def hunt(name: str, first: int = 1, seeds: int = 200) -> Catch:
    """Look for one of these bugs, from the `first` seed on that it is hunted with."""
    bug = BUGS[name]
    first += bug.begins_at - 1
    return hunt_with(
        name,
        bug.plant,
        bug.caught_by,
        lambda seed: run_cluster_seed(seed, bug.options(seed)),
        range(first, first + seeds),
    )
