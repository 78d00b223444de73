"""The faults: each breaks something for a while, never more than the design promises to survive.

A nemesis breaks and holds; the stage makes whole again what it left. Only one is at work at a time,
and the next one waits until every partition is fully replicated, since a wiped, damaged or replaced
node has spent the minority that may be gone. What a machine lacks is said by `lack`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from itertools import pairwise, permutations
from typing import Final

from attrs import frozen

from jepsen_like.live import clocks
from jepsen_like.live.cluster import Node, StuckError
from jepsen_like.live.damage import spoil_bytes
from jepsen_like.live.links import CLIENTS, Pair, Weather
from jepsen_like.live.scarcity import Patience
from jepsen_like.live.stage import Stage
from jepsen_like.live.workloads.base import DELAYS

REPLACE_S: Final = 60.0
ONE_CLOCK: Final = 0.5
Strike = Callable[[Stage], None]
Lack = Callable[[Stage], str]


def _nothing(_stage: Stage) -> str:
    return ""


@frozen
class Nemesis:
    """One kind of fault."""

    name: str
    strike: Strike
    lack: Lack = _nothing
    """Why it cannot be done here; empty when it can."""
    needs_proxy: bool = False
    """Passed over in rounds whose links can only be whole or blocked."""
    is_about: frozenset[str] = frozenset()
    """Workloads whose promises rest on what it breaks."""


def kill_one(stage: Stage) -> None:
    """kill -9 of one node."""
    nodes = stage.choose(1)
    stage.tell(f"kill -9 of {_names(nodes)}")
    stage.kill(nodes)
    stage.hold(1.5, 4)


def kill_majority(stage: Stage) -> None:
    """kill -9 of more nodes than may be gone; nobody can write meanwhile."""
    nodes = stage.choose(stage.minority + 1)
    stage.tell(f"kill -9 of {_names(nodes)}")
    stage.kill(nodes)
    stage.hold(0.5, 2)


def kill_all(stage: Stage) -> None:
    """kill -9 of all nodes."""
    stage.tell("kill -9 of all nodes")
    stage.kill(list(stage.cluster.nodes.values()))
    stage.hold(0.2, 1)


def pause(stage: Stage) -> None:
    """SIGSTOP of as many as may be gone."""
    nodes = stage.choose(stage.rng.randint(1, stage.minority))
    stage.tell(f"SIGSTOP of {_names(nodes)}")
    stage.pause(nodes)
    stage.hold(1.5, 4)


def partition_one(stage: Stage) -> None:
    """One node is cut off from the others; clients reach it."""
    lonely = stage.rng.choice(stage.ids)
    stage.tell(f"node {lonely} is cut off")
    stage.partition({lonely}, set(stage.ids) - {lonely})
    stage.hold(2, 5)


def partition_majority(stage: Stage) -> None:
    """A majority on one side, a minority on the other, some of it out of clients' reach."""
    few = set(stage.rng.sample(stage.ids, stage.minority))
    stage.tell(f"nodes {sorted(few)} are cut off from the majority and from clients")
    stage.partition(few, set(stage.ids) - few | {CLIENTS})
    stage.hold(2, 5)


def partition_all(stage: Stage) -> None:
    """Nobody hears anybody, for so long that TCP's next try would be seconds after the heal."""
    stage.tell("no node hears any other")
    stage.cut(set(permutations(stage.ids, 2)))
    stage.hold(6.6, 9)


def partition_ring(stage: Stage) -> None:
    """Each node sees its neighbours in a ring alone; with three nodes, one link is gone."""
    ring = stage.rng.sample(stage.ids, len(stage.ids))
    near = set(pairwise([*ring, ring[0]])) if len(ring) > 3 else set(pairwise(ring))
    whole = near | {(b, a) for a, b in near}
    gone = {pair for pair in permutations(ring, 2) if pair not in whole}
    stage.tell(f"a ring of {ring}")
    stage.cut(gone)
    stage.hold(2, 5)


def partition_bridge(stage: Stage) -> None:
    """Two halves that only one node connects."""
    order = stage.rng.sample(stage.ids, len(stage.ids))
    middle, rest = order[0], order[1:]
    left, right = set(rest[: len(rest) // 2]), set(rest[len(rest) // 2 :])
    stage.tell(f"node {middle} is the bridge between {sorted(left)} and {sorted(right)}")
    stage.partition(left, right)
    stage.hold(2, 5)


def partition_one_way(stage: Stage) -> None:
    """One node hears nothing, or nobody hears it."""
    lonely = stage.rng.choice(stage.ids)
    others = [other for other in stage.ids if other != lonely]
    if stage.rng.random() < 0.5:
        stage.tell(f"node {lonely} hears no other node")
        stage.cut({(other, lonely) for other in others})
    else:
        stage.tell(f"no other node hears node {lonely}")
        stage.cut({(lonely, other) for other in others})
    stage.hold(2, 5)


def slow_links(stage: Stage) -> None:
    """Some links are slow or narrow."""
    pairs = [(a, b) for a in [CLIENTS, *stage.ids] for b in [CLIENTS, *stage.ids] if a != b]
    weather: dict[Pair, Weather] = {}
    for pair in stage.rng.sample(pairs, max(1, len(pairs) // 3)):
        if stage.rng.random() < 0.5:
            weather[pair] = Weather(delay_ms=stage.rng.uniform(5, 60))
        else:
            weather[pair] = Weather(bytes_per_s=stage.rng.uniform(100e3, 1e6))
    stage.tell(f"{len(weather)} of {len(pairs)} links are slow or narrow")
    stage.spoil(weather)
    stage.hold(2, 5)


def reset_connections(stage: Stage) -> None:
    """Connections are reset again and again, as by a firewall that forgets."""
    struck = 0
    for _ in range(stage.rng.randint(3, 8)):
        dialler = stage.rng.choice([CLIENTS, *stage.ids])
        struck += stage.links.reset((dialler, node) for node in stage.ids)
        stage.hold(0.1, 0.6)
    stage.tell(f"{struck} connections reset")


def restart_storm(stage: Stage) -> None:
    """Nodes are killed and started again at once, one after the other, without a pause."""
    count = stage.rng.randint(3, 6)
    stage.tell(f"{count} nodes killed and started one after the other")
    for _ in range(count):
        nodes = stage.choose(1)
        stage.kill(nodes)
        stage.start(nodes)
        stage.hold(0.1, 1.5)


def wipe(stage: Stage) -> None:
    """A node loses its disk and comes back with an empty one."""
    nodes = stage.choose(1)
    stage.tell(f"node {_names(nodes)} comes back with an empty disk")
    stage.kill(nodes)
    stage.damaged |= {node.node_id for node in nodes}
    for node in nodes:
        node.wipe()
    stage.hold(0.2, 2)


def replace(stage: Stage) -> None:
    """A node is gone for good, and another takes its place by an operator's command."""
    cluster = stage.cluster
    # One of the first voters stays: by their addresses a new node finds the cluster.
    lost = cluster.nodes[stage.rng.choice(stage.ids[1:])]
    stage.kill([lost])
    cluster.remove(lost)
    new = cluster.add()
    stage.tell(f"node {new.node_id} takes the place of node {lost.node_id}")
    stage.mark(down=[new.node_id])
    stage.damaged.add(new.node_id)
    stage.start([new])
    stage.wait_up()
    patience = Patience(REPLACE_S, stage.scarcity)
    while True:
        done = cluster.command("node", "replace", str(lost.node_id), str(new.node_id))
        if done.returncode == 0:
            return
        if patience.is_over:
            raise StuckError(f"node replace: {done.stdout}{done.stderr}")
        time.sleep(0.2)  # the old one still counts as alive, or the new one has not joined yet


def full_disk(stage: Stage) -> None:
    """A disk is full to its last byte."""
    nodes = stage.choose(1)
    stage.tell(f"the disk of node {_names(nodes)} is full")
    stage.mark(down={node.node_id for node in nodes})
    for node in nodes:
        node.disk.fill()
    stage.hold(2, 5)


def power_loss(stage: Stage) -> None:
    """Power fails: what was not synced is gone. Of one node, of more than a minority, or of all."""
    count = stage.rng.choice([1, stage.minority + 1, len(stage.ids)])
    nodes = stage.choose(count)
    stage.tell(f"power loss of {_names(nodes)}")
    stage.mark(down={node.node_id for node in nodes})
    for node in nodes:
        node.disk.lose_power()
    stage.kill(nodes)
    for node in nodes:
        node.disk.repower()
    stage.hold(0.2, 1)


def damage(stage: Stage) -> None:
    """A node is stopped, some of its bytes change, and it starts again."""
    nodes = stage.choose(1)
    stage.kill(nodes)
    stage.damaged |= {node.node_id for node in nodes}
    for node in nodes:
        for told in spoil_bytes(node.data, stage.rng):
            stage.tell(f"node {node.node_id}: {told}")
    stage.hold(0.2, 1)


def slow_disk(stage: Stage) -> None:
    """Every fsync takes long, on as many nodes as may be gone."""
    nodes = stage.choose(stage.rng.randint(1, stage.minority))
    delay_ms = round(stage.rng.uniform(20, 300))
    stage.tell(f"fsyncs of {_names(nodes)} take {delay_ms} ms more")
    for node in nodes:
        stage.slowed.add(node.node_id)
        node.fault({"fsync_delay_ms": delay_ms})
    stage.hold(2, 5)


def clock_skew(stage: Stage) -> None:
    """The wall clocks of some nodes jump, forth and back, while these run.

    Every other time one clock alone is wrong: then the others know the time, and nothing that rests
    on it is excused.
    """
    is_one = stage.rng.random() < ONE_CLOCK
    nodes = stage.choose(1 if is_one else stage.rng.randint(2, len(stage.ids)))
    # First under the library that moves clocks, one at a time.
    for node in nodes:
        stage.kill([node])
        clocks.prepare(node)
        stage.start([node])
        stage.wait_up()
    offsets_s = clocks.offsets(stage.rng)
    for _ in range(stage.rng.randint(2, 3)):
        for node in nodes:
            clocks.move(node, next(offsets_s))
            jump = clocks.measure(node)
            stage.jumps.append(jump)
            stage.tell(
                f"clocks of {node.node_id}: wall {jump.wall_s:+.1f} s, "
                f"monotonic {jump.monotonic_s:+.1f} s"
            )
        stage.hold(2, 4)  # of which the library needs one second, and brokers another
    # The library breaks Python's sleep, on which other faults rest: nobody keeps it.
    for node in nodes:
        stage.kill([node])
        node.environment = {}
        stage.start([node])
        stage.wait_up()


def _lacks_full_disk(stage: Stage) -> str:
    node = next(iter(stage.cluster.nodes.values()))
    return "" if node.disk.can_be_full else "needs a disk of its own (root, and tmpfs or XFS)"


def _lacks_power_loss(stage: Stage) -> str:
    node = next(iter(stage.cluster.nodes.values()))
    return "" if node.disk.can_lose_power else "needs XFS on a loop device (root, xfsprogs)"


def _lacks_clocks(_stage: Stage) -> str:
    return clocks.lack()


def _names(nodes: list[Node]) -> str:
    return ", ".join(str(node.node_id) for node in nodes)


_ALL: Final = (
    Nemesis("kill-one", kill_one),
    Nemesis("kill-majority", kill_majority),
    Nemesis("kill-all", kill_all),
    Nemesis("pause", pause),
    Nemesis("partition-one", partition_one),
    Nemesis("partition-majority", partition_majority),
    Nemesis("partition-all", partition_all),
    Nemesis("partition-ring", partition_ring),
    Nemesis("partition-bridge", partition_bridge),
    Nemesis("partition-one-way", partition_one_way),
    Nemesis("slow-links", slow_links, needs_proxy=True),
    Nemesis("reset-connections", reset_connections, needs_proxy=True),
    Nemesis("restart-storm", restart_storm),
    Nemesis("wipe", wipe),
    Nemesis("replace", replace),
    Nemesis("full-disk", full_disk, _lacks_full_disk),
    Nemesis("power-loss", power_loss, _lacks_power_loss),
    Nemesis("damage", damage),
    Nemesis("slow-disk", slow_disk),
    Nemesis("clock-skew", clock_skew, _lacks_clocks, is_about=frozenset({DELAYS})),
)
OWN_DISKS: Final = frozenset({"full-disk", "power-loss"})
"""Those for which every node needs a disk of its own."""
NEMESES: Final[Mapping[str, Nemesis]] = {nemesis.name: nemesis for nemesis in _ALL}
