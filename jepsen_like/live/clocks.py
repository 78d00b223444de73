"""Wall clocks that jump while nodes run, by libfaketime (Debian package `libfaketime`).

A node that is to suffer starts under the library with a file that says how far its wall clock is
off; the file may change at any time. The monotonic clock stays true, as a kernel keeps it, so what
moves is CLOCK_REALTIME alone; `measure` tells what a process of that environment really sees.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Final

from attrs import frozen

from jepsen_like.live.cluster import Cluster, Node

_LIBRARIES: Final = (
    "/usr/lib/*/faketime/libfaketime.so.1",
    "/usr/lib*/faketime/libfaketime.so.1",
    "/usr/local/lib*/faketime/libfaketime.so.1",
)
CACHE_S: Final = 1
"""So long after a change of its file a clock may go on as before."""
_PROBE: Final = "import time; print(time.time(), time.monotonic())"
DAY_S: Final = 86_400.0
SIZES_S: Final = (0.2, 5.0, 3600.0, 20 * DAY_S)


@frozen
class Jump:
    """How far a node's clocks were off, in seconds, as a process of its environment saw them."""

    node_id: int
    wall_s: float
    monotonic_s: float


def library() -> Path | None:
    """Where libfaketime is."""
    for pattern in _LIBRARIES:
        for path in Path("/").glob(pattern.lstrip("/")):
            return path
    return None


def lack() -> str:
    """Why clocks cannot be moved here; empty when they can."""
    return "" if library() is not None else "needs libfaketime (package faketime)"


def _file(node: Node) -> Path:
    return node.cluster.folder / f"clock-{node.node_id}"


def environment(told: Path) -> dict[str, str]:
    """That of a process whose wall clock is off by what the file `told` says."""
    found = library()
    assert found is not None
    return {
        "LD_PRELOAD": str(found),
        "FAKETIME_TIMESTAMP_FILE": str(told),
        "FAKETIME_CACHE_DURATION": str(CACHE_S),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
        # Its cure for an old glibc makes threads wait far too long for Python's interpreter lock.
        "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        "NO_FAKE_STAT": "1",  # or every compiled module looks out of date
    }


def set_off(told: Path, offset_s: float) -> None:
    """Let clocks that go by this file be off by so much, within `CACHE_S`."""
    fresh = told.with_suffix(".new")
    fresh.write_text(f"{offset_s:+.3f}\n")
    fresh.rename(told)


def prepare(node: Node) -> None:
    """Let the node's next process run under the library, its clock still right."""
    set_off(_file(node), 0.0)
    node.environment = environment(_file(node))


def move(node: Node, offset_s: float) -> None:
    """Set the node's wall clock off by so much, within `CACHE_S`."""
    set_off(_file(node), offset_s)


def offsets(rng: Random) -> Iterator[float]:
    """How far clocks are to be off, in seconds: a little, a lot, or weeks; each before any of them
    comes again."""
    while True:
        for size in rng.sample(SIZES_S, len(SIZES_S)):
            yield rng.uniform(-size, size)


def put_right(cluster: Cluster) -> None:
    """Set all clocks right; later processes run without the library."""
    for node in cluster.nodes.values():
        if _file(node).exists():
            move(node, 0.0)
        node.environment = {}


def measure(node: Node) -> Jump:
    """How far the wall and the monotonic clock are off for a process that starts like the node."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **node.environment},
    )
    wall, monotonic = map(float, done.stdout.split())
    return Jump(node.node_id, wall - time.time(), monotonic - time.monotonic())
