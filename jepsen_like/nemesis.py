"""The source of trouble: picks faults by the run's odds, starts them, ends them.

A fault never takes more than the design promises to survive: at most a minority of the storages is
lost at any time (the next one only after the group is whole again), and what a disk has synced
stays. Everything else is fair: any number of nodes may crash, be cut off, slow or paused at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from jepsen_like.node import SimNode
from jepsen_like.world import World


class Nemesis:
    """Faults of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(f"nemesis {world.seed}")
        self._is_stopped = False
        self._faults: dict[str, Callable[[], None]] = {
            "isolate": lambda: self._isolate(self._any_node()),
            "isolate-leader": lambda: self._isolate(self._leader()),
            "one-way": self._one_way,
            "halves": self._halves,
            "crash": lambda: self._crash(self._any_node()),
            "crash-leader": lambda: self._crash(self._leader()),
            "crash-all": self._crash_all,
            "crash-point": self._crash_point,
            "pause": self._pause,
            "slow-disk": self._slow_disk,
            "storm": self._storm,
            "log-start": self._log_start,
            "transfer": self._transfer,
            "wipe": self._wipe,
            "lose-folder": self._lose_folder,
            "rot": self._rot,
            "full-disk": self._full_disk,
            "crash-voter": self._crash_voter,
            "siesta": self._siesta,
        }

    def start(self) -> None:
        """Begin after a moment of peace."""
        self._world.schedule(400.0, self._strike)

    def stop(self) -> None:
        """No new faults."""
        self._is_stopped = True

    def _strike(self) -> None:
        if self._is_stopped:
            return
        low, high = self._world.options.fault_every_ms
        self._world.schedule(self._random.uniform(low, high), self._strike)
        weights = self._world.options.weights
        names = [name for name, _ in weights]
        name = self._random.choices(names, [weight for _, weight in weights])[0]
        self._world.note("fault", name)
        self._faults[name]()

    # ---- whom, how long ----

    def _any_node(self) -> SimNode:
        return self._random.choice(self._world.nodes)

    def _leader(self) -> SimNode:
        leaders = self._world.leaders(self._random.choice(self._world.groups))
        return leaders[0] if leaders else self._any_node()

    def _lasts_ms(self) -> float:
        low, high = self._world.options.fault_lasts_ms
        return self._random.uniform(low, high)

    def _for_a_while(self, links: Sequence[tuple[int, int]]) -> None:
        network = self._world.network
        for sender, to in links:
            network.cut(sender, to)

        def mend() -> None:
            for sender, to in links:
                network.mend(sender, to)

        self._world.schedule(self._lasts_ms(), mend)

    # ---- faults ----

    def _isolate(self, node: SimNode) -> None:
        others = [n.node_id for n in self._world.nodes if n is not node]
        self._for_a_while(
            [(node.node_id, other) for other in others]
            + [(other, node.node_id) for other in others]
        )

    def _one_way(self) -> None:
        node = self._any_node()
        others = [n.node_id for n in self._world.nodes if n is not node]
        if self._random.random() < 0.5:
            self._for_a_while([(node.node_id, other) for other in others])
        else:
            self._for_a_while([(other, node.node_id) for other in others])

    def _halves(self) -> None:
        ids: list[int] = [node.node_id for node in self._world.nodes]
        self._random.shuffle(ids)
        cut = self._random.randint(1, len(ids) - 1)
        left, right = ids[:cut], ids[cut:]
        self._for_a_while(
            [(a, b) for a in left for b in right] + [(b, a) for a in left for b in right]
        )

    def _crash(self, node: SimNode) -> None:
        node.crash()
        self._world.schedule(self._lasts_ms(), self._world.restart(node))

    def _crash_all(self) -> None:
        for node in self._world.nodes:
            node.crash()
            self._world.schedule(self._lasts_ms(), self._world.restart(node))

    def _crash_point(self) -> None:
        """Lose power in the middle of one of the coming changes to a disk."""
        node = self._any_node()
        if not node.is_up:
            return
        node.disk.crash_after(self._random.randint(1, 12))
        incarnation = node.incarnation

        def certainly() -> None:
            if node.incarnation == incarnation:
                node.crash()
            self._world.schedule(self._lasts_ms(), self._world.restart(node))

        self._world.schedule(self._lasts_ms(), certainly)

    def _pause(self) -> None:
        node = self._leader() if self._random.random() < 0.6 else self._any_node()
        node.paused_until_ms = self._world.now_ms + self._lasts_ms()

    def _slow_disk(self) -> None:
        node = self._any_node()
        node.is_slow = True

        def recover() -> None:
            node.is_slow = False

        self._world.schedule(self._lasts_ms(), recover)

    def _storm(self) -> None:
        network = self._world.network
        network.is_stormy = True

        def end() -> None:
            network.is_stormy = False

        self._world.schedule(self._lasts_ms() / 2, end)

    def _log_start(self) -> None:
        for group in self._world.groups:
            share = self._random.choice((0.3, 0.7, 1.0))
            for node in self._world.leaders(group)[:1]:
                if node.move_log_start(group, share):
                    self._world.summary.log_starts += 1

    def _transfer(self) -> None:
        group = self._random.choice(self._world.groups)
        target = self._any_node()
        for node in self._world.leaders(group)[:1]:
            replica = node.leads(group)
            if replica is not None and target is not node:
                node.run(partial(node.transfer, group, target.node_id))

    def _wipe(self) -> None:
        if not self._world.is_whole():
            return
        node = self._any_node()
        node.wipe()
        self._world.schedule(self._lasts_ms(), self._world.restart(node))

    def _lose_folder(self) -> None:
        """One group's folder is gone, the journal that knows of its promises is not."""
        if not self._world.is_whole():
            return
        node = self._any_node()
        node.lose_folder(self._random.randrange(len(self._world.groups)))
        self._world.schedule(self._lasts_ms(), self._world.restart(node))

    def _rot(self) -> None:
        """Flushed bytes of one replica go bad while its node is down."""
        if not self._world.is_whole():
            return
        node = self._any_node()
        node.crash()
        node.must_rot = True
        self._world.schedule(self._lasts_ms(), self._world.restart(node))

    def _crash_voter(self) -> None:
        """A node that loses power right after it gave its vote, and is back at once."""
        node = self._any_node()
        node.crashes_after_voting = True

        def end() -> None:
            node.crashes_after_voting = False

        self._world.schedule(self._lasts_ms(), end)

    def _siesta(self) -> None:
        """All clients stop for a while, so that groups come to rest."""
        self._world.siesta_until_ms = self._world.now_ms + self._random.uniform(600.0, 1_800.0)

    def _full_disk(self) -> None:
        node = self._any_node()
        disk = node.disk
        disk.capacity_bytes = disk.used_bytes() + self._random.randint(0, 300)

        def free() -> None:
            disk.capacity_bytes = None

        self._world.schedule(self._lasts_ms(), free)
