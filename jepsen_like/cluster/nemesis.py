"""The source of trouble: picks faults by the run's odds, starts them, ends them.

A fault never takes more than the design promises to survive: at most a minority of the storages is
lost or damaged in the same place at a time, and what a disk has synced stays. Everything else is
fair: any number of nodes may crash, be cut off, slow or paused at once. Each strike has a draw of
its own, so that a run can be repeated with some of its strikes left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random

from jepsen_like.cluster.admins import NodeReplacer
from jepsen_like.cluster.damage import Damage
from jepsen_like.cluster.faults import SELDOM, STEPS
from jepsen_like.cluster.mover import Mover
from jepsen_like.cluster.node import ClusterNode
from jepsen_like.cluster.operator import Operator
from jepsen_like.cluster.watch import TRANSACTIONS
from jepsen_like.cluster.world import ClusterWorld, Fault
from raftmq.errors import KafkaError
from raftmq.log.log_start import LocalStart, Pending
from raftmq.types import METADATA_GROUP, NodeId, RaftGroupId

CALM_MS = 3_000.0
OUT_OF_TOUCH_MS = 13_500.0
"""Ten seconds until a broker calls itself isolated, and some for asking and handing over."""


class Nemesis:
    """Faults of one run."""

    def __init__(self, world: ClusterWorld, faults: Sequence[Fault]) -> None:
        self._world = world
        self._faults = faults
        self._draw, self._random = 0, Random(0)
        self._damage = Damage(world)
        self._operator = Operator(world)
        self._is_stopped = False
        self._calm_until_ms = 0.0
        self._awaits_newcomer = False
        self._mover = Mover(world)
        self._kinds: dict[str, Callable[[], None]] = {
            "isolate": lambda: self._isolate(self._any_node()),
            "isolate-leader": lambda: self._isolate(self._leader()),
            "isolate-controller": lambda: self._isolate(self._controller()),
            "one-way": self._one_way,
            "deaf": self._deaf,
            "halves": self._halves,
            "newcomer-first": self._newcomer_first,
            "bridge": self._bridge,
            "swizzle": self._swizzle,
            "crash": lambda: self._crash(self._any_node()),
            "crash-leader": lambda: self._crash(self._leader()),
            "crash-controller": lambda: self._crash(self._controller()),
            "crash-all": self._crash_all,
            "crash-point": self._crash_point,
            "crash-in": self._crash_in,
            "crash-in-change": self._crash_in_change,
            "kill": self._kill,
            "pause": self._pause,
            "slow-disk": self._slow_disk,
            "full-disk": self._full_disk,
            "failed-sync": self._failed_sync,
            "storm": self._storm,
            "transfer": self._transfer,
            "wipe": self._wipe,
            "replace": self._replace,
            "move": lambda: self._mover.move(self._random),
            "lose-folder": self._lose_folder,
            "rot": self._rot,
            "rot-everywhere": self._rot_everywhere,
            "rot-index": self._rot_index,
            "rot-journal": self._rot_journal,
            "clock-jump": self._clock_jump,
            "clock-strobe": self._clock_strobe,
            "delete-records": self._delete_records,
            "clients-cut": self._clients_cut,
            "malformed": self._malformed,
            "cut-controller": self._cut_controller,
            "crash-voter": self._crash_voter,
            "stale-metadata": self._stale_metadata,
            "shutdown": lambda: self._any_node().shut_down(),
        }

    def start(self) -> None:
        """Strike at the given times, from now on."""
        for fault in self._faults:
            self._world.schedule(fault.at_ms, partial(self._strike, fault))

    def stop(self) -> None:
        """No new faults, and none that was to come for certain."""
        self._is_stopped = True

    def _strike(self, fault: Fault) -> None:
        if self._is_stopped or self._world.now_ms < self._calm_until_ms:
            return
        world = self._world
        self._draw, self._random = fault.draw, Random(fault.draw)
        world.note("fault", fault.name)
        world.recorder.note(-1, "fault", error=fault.name)
        world.counts.faults[fault.name] = world.counts.faults.get(fault.name, 0) + 1
        self._kinds[fault.name]()

    # ---- whom, how long ----

    def _any_node(self) -> ClusterNode:
        return self._random.choice(self._world.nodes)

    def _up_node(self) -> ClusterNode:
        up = [node for node in self._world.nodes if node.is_up]
        return self._random.choice(up or self._world.nodes)

    def _leader(self) -> ClusterNode:
        groups = self._world.watch.groups()
        leaders = self._world.watch.leaders(self._random.choice(groups)) if groups else []
        return leaders[0] if leaders else self._any_node()

    def _controller(self) -> ClusterNode:
        leaders = self._world.watch.leaders(METADATA_GROUP)
        return leaders[0] if leaders else self._any_node()

    def _lasts_ms(self) -> float:
        low, high = self._world.options.fault_lasts_ms
        return self._random.uniform(low, high)

    def _others(self, node: ClusterNode) -> list[int]:
        return [int(other.node_id) for other in self._world.nodes if other is not node]

    def _links_of(self, node: ClusterNode) -> list[tuple[int, int]]:
        """Both directions between a node and all others."""
        me, others = int(node.node_id), self._others(node)
        return [(me, other) for other in others] + [(other, me) for other in others]

    def _for_a_while(self, links: Sequence[tuple[int, int]], lasts_ms: float | None = None) -> None:
        if self._is_stopped:
            return  # the rest of a swizzle
        wires = self._world.wires
        for sender, to in links:
            wires.cut(sender, to)

        def mend() -> None:
            if self._is_stopped:
                return  # all links were mended
            for sender, to in links:
                wires.mend(sender, to)

        self._world.schedule(self._lasts_ms() if lasts_ms is None else lasts_ms, mend)

    def _later(self, action: Callable[[], None]) -> None:
        self._world.schedule(self._lasts_ms(), action)

    def _when_whole(self, action: Callable[[], None], *, must_be_in_sync: bool = False) -> None:
        """Once no storage is missing any more, for which nothing else strikes; not at all, if that
        is not soon: what there is left may be the only sound copy."""
        world = self._world
        self._calm_until_ms = world.now_ms + CALM_MS

        def look() -> None:
            if self._is_stopped or world.now_ms >= self._calm_until_ms:
                return
            watch = world.watch
            if watch.is_whole() if must_be_in_sync else watch.may_lose_a_storage():
                self._calm_until_ms = 0.0
                action()
                watch.storage_is_lost()
            else:
                world.schedule(50.0, look)

        look()

    # ---- links ----

    def _isolate(self, node: ClusterNode) -> None:
        self._for_a_while(self._links_of(node))
        if self._random.random() < 0.5:
            self._cut_clients(node)

    def _cut_controller(self) -> None:
        """A broker and the controller do not hear each other, and everybody else hears both: what
        the broker leads it has to hand over, for its metadata grows old."""
        world, controller = self._world, self._controller()
        others = [node for node in world.present if node is not controller]
        watch = world.watch
        leading = [n for n in others if any(n in watch.leaders(g) for g in watch.groups())]
        lonely = self._random.choice(leading or others)
        me, its = int(lonely.node_id), int(controller.node_id)
        world.note("cut off", me, its)
        self._calm_until_ms = world.now_ms + OUT_OF_TOUCH_MS
        self._for_a_while([(me, its), (its, me)], OUT_OF_TOUCH_MS)

        def judge() -> None:
            if self._is_stopped or controller not in watch.leaders(METADATA_GROUP):
                return
            led = [str(g) for g in watch.groups() if lonely in watch.leaders(g)[:1]]
            if led:
                told = f"node {me} saw no controller for {OUT_OF_TOUCH_MS:.0f} ms and leads {led}"
                watch.invariants.breach("IsolatedHandsOver", told)

        world.schedule(OUT_OF_TOUCH_MS - 1.0, judge)

    def _one_way(self) -> None:
        node = self._any_node()
        self._for_a_while([(int(node.node_id), other) for other in self._others(node)])

    def _deaf(self) -> None:
        node = self._any_node()
        self._for_a_while([(other, int(node.node_id)) for other in self._others(node)])

    def _halves(self) -> None:
        ids: list[int] = [int(node.node_id) for node in self._world.nodes]
        self._random.shuffle(ids)
        cut = self._random.randint(1, len(ids) - 1)
        left, right = ids[:cut], ids[cut:]
        self._for_a_while(
            [(a, b) for a in left for b in right] + [(b, a) for a in left for b in right]
        )

    def _newcomer_first(self) -> None:
        """A leader that has just added somebody to its group hears nobody, and the newcomer before
        all others: just late enough for a change that leaves no majority of those who answer."""
        world, options = self._world, self._world.options
        draw = Random(self._random.getrandbits(32))
        if self._awaits_newcomer:
            return
        self._awaits_newcomer = True

        def look() -> None:
            if self._is_stopped:
                return
            found = world.watch.newcomers()
            if not found:
                world.schedule(1.0, look)
                return
            self._awaits_newcomer = False
            leader, newcomer = draw.choice(found)
            silent_ms = draw.uniform(0.7, 1.5) * options.election_ticks * options.tick_ms
            links = self._links_of(leader)
            self._for_a_while([link for link in links if newcomer in link], silent_ms)
            self._for_a_while([link for link in links if newcomer not in link], 3 * silent_ms)

        look()

    def _bridge(self) -> None:
        """One node sees both halves, which do not see each other."""
        ids: list[int] = [int(node.node_id) for node in self._world.nodes]
        self._random.shuffle(ids)
        middle, rest = ids[0], ids[1:]
        cut = max(1, len(rest) // 2)
        assert middle not in rest
        self._for_a_while(
            [pair for a in rest[:cut] for b in rest[cut:] for pair in ((a, b), (b, a))]
        )

    def _swizzle(self) -> None:
        """Nodes are cut off one after the other, and come back in another order."""
        nodes = list(self._world.nodes)
        self._random.shuffle(nodes)
        for number, node in enumerate(nodes):
            lasts_ms = self._random.uniform(300.0, 1_500.0)
            begin_ms = number * self._random.uniform(30.0, 200.0)
            self._world.schedule(
                begin_ms, partial(self._for_a_while, self._links_of(node), lasts_ms)
            )

    def _stale_metadata(self) -> None:
        """A node hears of the metadata group late, or not at all, and of all else as before: its
        image grows old, and it comes to lead partitions with it, mostly such as transactions write
        to."""
        target, stale = self._up_node(), self._world.wires.stale
        node_id, draw = int(target.node_id), Random(self._random.getrandbits(32))
        stale[node_id] = draw.choice((0.0, draw.uniform(50.0, 400.0)))

        def lead() -> None:
            groups = [group for group in self._world.watch.groups() if group != METADATA_GROUP]
            written = [g for g in groups if self._world.names.get(g, "").startswith(TRANSACTIONS)]
            if written and draw.random() < 0.8:
                groups = written
            if groups and node_id in stale and not self._is_stopped:
                self._hand_to(target, draw.choice(groups))

        for after_ms in (100.0, 200.0, 300.0):
            self._world.schedule(after_ms, lead)

        def end() -> None:
            if not self._is_stopped:
                stale.pop(node_id, None)

        self._later(end)

    def _storm(self) -> None:
        wires = self._world.wires
        wires.is_stormy = True

        def end() -> None:
            wires.is_stormy = False

        self._world.schedule(self._lasts_ms() / 2, end)

    def _cut_clients(self, node: ClusterNode) -> None:
        cut_off = self._world.cut_off
        cut_off[int(node.node_id)] = True

        def join() -> None:
            if not self._is_stopped:
                cut_off.pop(int(node.node_id), None)

        self._later(join)

    def _clients_cut(self) -> None:
        self._cut_clients(self._any_node())

    # ---- power and processes ----

    def _crash(self, node: ClusterNode) -> None:
        node.crash()
        self._visit(node)
        self._later(self._world.restart(node))

    def _visit(self, node: ClusterNode) -> None:
        """Sometimes an operator works at a node that is down; nothing else depends on whether."""
        draw = Random(f"operator {self._draw}")
        if not node.is_up and draw.random() < 0.3:
            self._operator.visit(node, draw)

    def _crash_all(self) -> None:
        for node in self._world.nodes:
            node.crash()
            self._later(self._world.restart(node))

    def _crash_voter(self) -> None:
        """A node loses power right after each vote that it gives, and is back at once."""
        node = self._any_node()
        node.crashes_after_voting = True

        def end() -> None:
            node.crashes_after_voting = False

        self._later(end)

    def _kill(self) -> None:
        node = self._any_node()
        node.kill("by the nemesis")
        self._later(self._world.restart(node))

    def _crash_point(self) -> None:
        """Lose power in the middle of one of the coming changes to a disk."""
        node = self._up_node()
        node.disk.crash_after(self._random.randint(1, 25))
        life = node.life

        def certainly() -> None:
            if node.life == life and not self._is_stopped:
                node.crash()
            self._later(self._world.restart(node))

        self._later(certainly)

    def _crash_in(self) -> None:
        """Lose power in the middle of an operation of several steps, the next time it comes."""
        node, draw = self._up_node(), Random(self._random.getrandbits(32))
        disk, life = node.disk, node.life
        odds = [3 if name in SELDOM else 1 for name in STEPS]
        self._set_trap(node, draw.choices(list(STEPS), odds)[0], draw)

        def certainly() -> None:
            if node.life == life:
                disk.crash_when(None)
            self._later(self._world.restart(node))

        self._world.schedule(3 * self._lasts_ms(), certainly)

    def _set_trap(self, node: ClusterNode, name: str, draw: Random) -> None:
        """Power goes in the middle of the next operation of that name; nobody comes then."""

        def trap(verb: str, path: str) -> int | None:
            if not any(verb == v and path.endswith(tail) for v, tail in STEPS[name]):
                return None
            self._world.note("in the middle of", name, node.node_id, verb, path)
            self._world.had_effect(f"in the middle of: {name}")
            return draw.randint(0, 4)

        node.disk.crash_when(trap)

    def _crash_in_repair(self, node: ClusterNode, draw: Random) -> None:
        """What the next repair of this node comes to, half the time; somebody comes soon."""
        if draw.random() < 0.5:
            self._set_trap(node, "repair", draw)
            for after_ms in (1_000.0, 2_000.0):
                self._world.schedule(after_ms, self._world.restart(node))

    def _crash_in_change(self) -> None:
        """Give some log a reason to be cut back or begun anew, and lose power in the middle of the
        next such change, on whichever node it comes to: the file `log-start` tells of it."""
        lonely, lasts_ms = self._leader(), self._lasts_ms()
        self._for_a_while(self._links_of(lonely), lasts_ms)
        draw, world = Random(self._random.getrandbits(32)), self._world
        if draw.random() < 0.6:
            world.schedule(0.8 * lasts_ms, partial(self._delete, draw.choice(world.partitions)))
        armed = [(node, node.life) for node in world.nodes if node.is_up]

        def trap(node: ClusterNode, verb: str, path: str) -> int | None:
            if verb != "rename" or not path.endswith("/log-start"):
                return None
            local = LocalStart.decode(node.disk.content(f"{path}.tmp"))
            if local is None or local.pending is Pending.NOTHING:
                return None
            world.note("in the middle of", local.pending.name, node.node_id, path)
            world.had_effect("in the middle of: change")
            disarm()
            world.schedule(draw.uniform(*world.options.fault_lasts_ms), world.restart(node))
            return draw.randint(1, 9)

        def disarm() -> None:
            for node, life in armed:
                if node.life == life:
                    node.disk.crash_when(None)

        for node, _ in armed:
            node.disk.crash_when(partial(trap, node))
        world.schedule(lasts_ms + 5 * self._lasts_ms(), disarm)

    def _pause(self) -> None:
        node = self._leader() if self._random.random() < 0.6 else self._any_node()
        node.pauses.begin(self._lasts_ms())

    # ---- disks ----

    def _slow_disk(self) -> None:
        """Flushes take long; where memory is short, too, reads are from the device."""
        node = self._any_node()
        node.is_slow = True
        if self._random.random() < 0.5:
            node.disk.drop_cache()

        def recover() -> None:
            node.is_slow = False

        self._later(recover)

    def _full_disk(self) -> None:
        """No space but for some bytes; sometimes the process has to come up with that."""
        node = self._any_node()
        disk = node.disk
        disk.capacity_bytes = disk.used_bytes() + self._random.randint(0, 600)

        refused = disk.counters.refused

        def free() -> None:
            disk.capacity_bytes = None
            if disk.counters.refused > refused:
                self._world.had_effect("no space")

        self._later(free)
        if self._random.random() < 0.3:
            node.kill("while its disk is full")
            self._world.schedule(self._random.uniform(20.0, 200.0), self._world.restart(node))

    def _failed_sync(self) -> None:
        """The next fdatasync of some file fails."""
        node = self._up_node()
        draw, disk = Random(self._random.getrandbits(32)), node.disk

        def fails(what: str, path: str) -> bool:
            if what != "fdatasync" or draw.random() < 0.7:
                return False
            self._world.note("sync failed", node.node_id, path)
            self._world.had_effect("sync failed")
            disk.fail_when(None)
            return True

        disk.fail_when(fails)
        self._later(lambda: disk.fail_when(None))

    def _wipe(self) -> None:
        node = self._any_node()

        def wipe() -> None:
            node.wipe()
            self._later(self._world.restart(node))

        self._when_whole(wipe)

    def _replace(self) -> None:
        """A node is given up for good, or taken out of service, and a spare one takes its place."""
        world = self._world
        spares = [node for node in world.nodes if node.life == 0]
        if not spares:
            return  # a storage that was given up is never taken in again
        old, new = self._random.choice(world.present), spares[0]
        is_dead = self._random.random() < 0.6

        def replace() -> None:
            if new.life or not old.is_wanted:
                return  # an operator of brokers was faster
            world.note("replace", old.node_id, new.node_id, is_dead)
            world.counts.replacements += 1
            if is_dead:
                old.crash()
            old.is_wanted = False
            new.is_wanted = True
            new.start()
            replacer = NodeReplacer(world, old.node_id, new.node_id)
            world.clients.spawn(replacer.run)

        self._when_whole(replace)

    def _lose_folder(self) -> None:
        """One group's folder is gone, the journal that knows of its promises is not."""
        node, draw = self._any_node(), Random(self._random.getrandbits(32))

        def lose() -> None:
            node.crash()
            self._damage.lose_folder(node, draw)
            self._later(self._world.restart(node))

        self._when_whole(lose)

    def _rot(self) -> None:
        """Flushed bytes of one replica go bad while its node is down."""
        node, draw = self._any_node(), Random(self._random.getrandbits(32))
        seen = self._draw

        def rot() -> None:
            node.crash()
            node.must_start.append(lambda: self._damage.rot(node, draw))
            node.must_start.append(lambda: self._operator.visit(node, Random(f"operator {seen}")))
            node.must_start.append(lambda: self._crash_in_repair(node, Random(f"repair {seen}")))
            self._later(self._world.restart(node))

        self._when_whole(rot)

    def _rot_everywhere(self) -> None:
        """Every replica of a partition is damaged, each in another place."""
        draw = Random(self._random.getrandbits(32))

        def rot() -> None:
            self._damage.rot_everywhere(draw)
            for node in self._world.nodes:
                self._later(self._world.restart(node))

        self._when_whole(rot, must_be_in_sync=True)

    def _rot_index(self) -> None:
        """What a node that is down can do without goes bad: indexes, which are built anew, and one
        copy of what is written twice."""
        also = (self._damage.rot_one_copy, self._damage.rot_promise)
        node, draw = self._any_node(), Random(self._random.getrandbits(32))
        node.crash()
        node.must_start.append(lambda: self._damage.rot_indexes(node, draw))
        for rot_it in also:
            if draw.random() < 0.5:
                node.must_start.append(partial(rot_it, node, draw))
        self._later(self._world.restart(node))

    def _rot_journal(self) -> None:
        """What a node has promised in all of its groups goes bad, or one of the two copies does.
        Sometimes another, which it may have voted for, loses power with it: then who knows less
        might be voted for as well."""
        node, draw = self._any_node(), Random(self._random.getrandbits(32))
        damage = self._damage
        rot_it = damage.rot_promise if draw.random() < 0.25 else damage.rot_journal

        def rot() -> None:
            watch = self._world.watch
            leaders = [n for g in watch.groups() for n in watch.leaders(g)[:1] if n is not node]
            if leaders and draw.random() < 0.7:
                self._crash(draw.choice(leaders))
            node.crash()
            node.must_start.append(lambda: rot_it(node, draw))
            self._world.schedule(draw.uniform(10.0, 200.0), self._world.restart(node))

        self._when_whole(rot)

    # ---- clocks ----

    def _clock_jump(self) -> None:
        node = self._any_node()
        far_ms = 15 * 86_400_000.0 if node.may_be_far_off else 3_600_000.0
        node.clock.skew_ms += self._random.choice((-1, 1)) * self._random.choice(
            (300.0, 60_000.0, far_ms)
        )

    def _clock_strobe(self) -> None:
        node = self._any_node()
        node.clock.strobe_ms = self._random.choice((200.0, 5_000.0, 86_400_000.0))

        def end() -> None:
            node.clock.strobe_ms = 0.0

        self._later(end)

    # ---- wishes at a bad moment ----

    def _transfer(self) -> None:
        groups = self._world.watch.groups()
        target = self._any_node()
        if groups:
            self._hand_to(target, self._random.choice(groups))

    def _hand_to(self, target: ClusterNode, group: RaftGroupId) -> None:
        leaders = self._world.watch.leaders(group)
        if not leaders or leaders[0] is target or leaders[0].is_paused:
            return
        leaders[0].run(partial(_hand_over, leaders[0], group, target.node_id))

    def _delete_records(self) -> None:
        where = self._random.choice(self._world.partitions)
        share = self._random.choice((0.3, 0.7, 1.0))
        self._delete(where, share)
        if self._random.random() < 0.5:
            self._delete(where, 0.6 * share)  # asked at once, it may be behind the other

    def _delete(self, where: tuple[str, int], share: float = 1.0) -> None:
        deleter = self._world.deleter
        if deleter is not None:
            self._world.clients.spawn(lambda: deleter.delete(where, share))

    def _malformed(self) -> None:
        self._damage.malformed(self._up_node(), self._random)


def _hand_over(node: ClusterNode, group: RaftGroupId, to: NodeId) -> None:
    assert node.core is not None
    with suppress(KafkaError):  # that one cannot lead now
        if node.core.plane.multiraft.replicas[group].transfer_leadership(to):
            node.world.had_effect("handed over")
