"""Where nemeses act: the cluster, what is broken of it now, and whether it must make progress.

Every change goes through here, so that the timeline of `Standing`s is complete: a group of nodes
must acknowledge records whenever a majority of it is up, undamaged, mutually connected and reached
by clients. What a nemesis broke, `restore` makes whole again, whatever state it left behind.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping
from random import Random
from typing import Any, Final

from attrs import define, field, frozen

from jepsen_like.live import clocks
from jepsen_like.live.cluster import Cluster, Node, StuckError
from jepsen_like.live.links import BLOCKED, CLIENTS, Links, Pair, Weather, between
from jepsen_like.live.scarcity import Patience, Scarcity

UP_S: Final = 60.0
WHOLE_S: Final = 90.0
POLL_S: Final = 0.03


@frozen
class Standing:
    """From a moment on, which nodes work, and how they are connected."""

    at: float
    well: frozenset[int]
    """Nodes that are up, undamaged, and reached by clients both ways."""
    cut: frozenset[Pair]
    members: Mapping[str, frozenset[int]]
    """Voters by partition, and of metadata under ''."""

    def must_progress(self, key: str) -> bool:
        """True when well nodes that see each other are a majority of this group and of metadata."""
        return any(
            not any(pair in self.cut for pair in itertools.permutations(side | controllers, 2))
            for side in self._majorities(self.members[key])
            for controllers in self._majorities(self.members[""])
        )

    def _majorities(self, members: frozenset[int]) -> list[frozenset[int]]:
        quorum = len(members) // 2 + 1
        return [*map(frozenset, itertools.combinations(sorted(members & self.well), quorum))]


@define(eq=False)
class Stage:
    """The cluster under faults; one thread acts here."""

    cluster: Cluster
    rng: Random
    down: set[int] = field(factory=set)
    """Nodes that cannot be counted on: dead, starting, paused or full."""
    damaged: set[int] = field(factory=set)
    """Nodes that lost something on their disk, until the cluster is whole again."""
    slowed: set[int] = field(factory=set)
    """Nodes whose own fault switch is on."""
    weather: dict[Pair, Weather] = field(factory=dict)
    members: dict[str, frozenset[int]] = field(factory=dict)
    timeline: list[Standing] = field(factory=list)
    details: list[str] = field(factory=list)
    """What the fault under way is, in words."""
    jumps: list[clocks.Jump] = field(factory=list)
    """What it did to clocks."""

    @property
    def links(self) -> Links:
        """The network."""
        return self.cluster.links

    @property
    def scarcity(self) -> Scarcity:
        """What nodes and clients lack of this machine's cores."""
        return self.cluster.scarcity

    @property
    def ids(self) -> list[int]:
        """All nodes."""
        return sorted(self.cluster.nodes)

    @property
    def minority(self) -> int:
        """How many nodes may be gone while the rest is a majority."""
        return (len(self.ids) - 1) // 2

    def tell(self, detail: str) -> None:
        """Say what the fault is."""
        self.details.append(detail)

    def choose(self, count: int) -> list[Node]:
        """Some nodes."""
        return [self.cluster.nodes[i] for i in sorted(self.rng.sample(self.ids, count))]

    def hold(self, low_s: float, high_s: float) -> None:
        """Leave things as they are for a while."""
        time.sleep(self.rng.uniform(low_s, high_s))

    # ---- nodes ----

    def mark(self, down: Iterable[int] = (), up: Iterable[int] = ()) -> None:
        """Note which nodes can be counted on from now on."""
        self.down |= set(down)
        self.down -= set(up)
        self._note()

    def kill(self, nodes: Collection[Node]) -> None:
        """kill -9, all at once."""
        self.mark(down={node.node_id for node in nodes})
        for node in nodes:
            node.kill()

    def start(self, nodes: Collection[Node]) -> None:
        """Start processes; they count from when they are up."""
        for node in nodes:
            node.start()

    def wait_up(self) -> None:
        """Wait until every running node that is down is up, noting each.

        Raises:
            StuckError: one does not come up.
        """
        patience = Patience(UP_S, self.scarcity)
        nodes = self.cluster.nodes
        while waiting := [i for i in sorted(self.down & nodes.keys()) if nodes[i].is_running]:
            self.mark(up=[i for i in waiting if nodes[i].is_up])
            if patience.is_over:
                tails = "; ".join(f"{i}: {nodes[i].log_tail(600)}" for i in waiting)
                raise StuckError(f"not up within {UP_S:g} s: {tails}")
            time.sleep(POLL_S)

    def pause(self, nodes: Collection[Node]) -> None:
        """SIGSTOP."""
        self.mark(down={node.node_id for node in nodes})
        for node in nodes:
            node.pause()

    def resume(self, nodes: Collection[Node]) -> None:
        """SIGCONT."""
        for node in nodes:
            node.resume()
        self.mark(up={node.node_id for node in nodes})

    # ---- links ----

    def spoil(self, weather: Mapping[Pair, Weather]) -> None:
        """Make these links so; others stay as they are."""
        self.weather.update(weather)
        self._note()
        self.links.set(self.weather)

    def cut(self, pairs: Iterable[Pair]) -> None:
        """Block links."""
        self.spoil(dict.fromkeys(pairs, BLOCKED))

    def partition(self, *sides: Collection[int]) -> None:
        """Cut every link between nodes of different sides."""
        self.cut(between(*sides))

    # ---- the end of a fault ----

    def restore(self) -> None:
        """Make everything whole: links, disks, paused and dead processes; wait until all are up."""
        self.weather.clear()
        self.links.set({})
        self._note()
        for node in self.cluster.nodes.values():
            node.disk.free()
            if node.is_paused:
                self.resume([node])
            if node.node_id in self.slowed and node.is_running:
                node.fault({})
            if not node.is_running:
                self.mark(down=[node.node_id])
                self.start([node])
        self.slowed.clear()
        clocks.put_right(self.cluster)
        self.wait_up()

    def wait_whole(self) -> None:
        """Wait until every node and partition is as good as new.

        Raises:
            StuckError: it takes too long.
        """
        self.cluster.wait_whole(WHOLE_S)
        self.damaged.clear()
        self.learn_members()

    def learn_members(self) -> None:
        """Read who votes where, from a well node."""
        members: dict[str, frozenset[int]] = {}
        for node in self.cluster.nodes.values():
            status: dict[str, Any] | None = node.get("/status")
            if status is not None:
                members[""] = frozenset(status["metadata"]["voters"])
                for row in status["partitions"]:
                    members[f"{row['topic']}-{row['partition']}"] = frozenset(row["voters"])
        self.members = members
        self._note()

    def _note(self) -> None:
        cut = frozenset(pair for pair, how in self.weather.items() if how.is_blocked)
        unheard = {a or b for a, b in cut if CLIENTS in (a, b)}
        well = frozenset(self.cluster.nodes) - self.down - self.damaged - unheard
        standing = Standing(time.monotonic(), well, cut, dict(self.members))
        self.timeline.append(standing)
