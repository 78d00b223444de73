"""A majority alone must move soon: what is checked once faults end, before all nodes are back.

Faults end everywhere. One node, though, that the others can do without, reaches nobody for a while
longer. As soon as the others serve, ten election timeouts must do: every partition and the metadata
group have a leader among them that takes writes, every partition acknowledges a record, and all
members of the consumer group are in one generation. Where members are patient, as in a quarter of
the seeds, so that their own timeouts are longer than that, these come on top; so does the patience
with a silent leader of a node whose own loop came late a moment ago, or of a replica that gave up
an election. One that was paused until the faults ended learns with its next tick how late it is, so
that is waited for.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import frozen

from jepsen_like.cluster.consumers import SILENCE_MAX
from jepsen_like.cluster.producers import Probe
from jepsen_like.cluster.supervisor import MISSING_MS, Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from jepsen_like.cluster.node import ClusterNode
    from jepsen_like.cluster.world import ClusterWorld
    from raftmq.types import RaftGroupId


FIRST_PROBE = 700
ELECTIONS = 10
BOOT_MS = 5_000.0
"""A node that has its storage opens all of it in less. What a failing disk kept from that is waited
for besides, and then the node is restarted."""


@frozen
class Held:
    """What one replica has of a group's log.

    Attributes:
        end_index: Raft index behind its last entry.
        end_offset: offset behind its last record.
        damaged: ranges of offsets whose bytes are bad.
    """

    end_index: int
    end_offset: int
    damaged: Sequence[tuple[int, int]] = ()

    def can_mend(self, start: int, end: int) -> bool:
        """True when it has all records of a range, sound."""
        return end <= self.end_offset and not any(
            first < end and start < last for first, last in self.damaged
        )


def is_in_doubt(promised: int, replicas: Sequence[Held]) -> bool:
    """True when none of these replicas has, or will get from the others, what may have been
    promised up to that Raft index."""
    return promised > 0 and not any(
        held.end_index >= promised
        and all(
            any(other.can_mend(start, end) for other in replicas) for start, end in held.damaged
        )
        for held in replicas
    )


class Majority:
    """All nodes but one; or all of them, where a storage is missing."""

    def __init__(self, world: ClusterWorld) -> None:
        self._world = world
        self._first = len(world.events)
        self._began_ms = world.now_ms
        self._supervisors = {node.node_id: Supervisor(node) for node in world.nodes}
        self.left_out = self._whom()
        if self.left_out is not None:
            self._cut_off(self.left_out)
        # Every partition must take records, also those that no producer of this run writes to.
        for number, (topic, index) in enumerate(world.partitions[world.options.producers :]):
            probe = Probe(world, FIRST_PROBE + number, topic, index)
            world.clients.spawn(probe.run)

    def phases(self) -> Iterator[tuple[float, Callable[[], str]]]:
        """What must be within how many milliseconds once what comes before it is; each check names
        what is missing, "" when nothing is."""
        options = self._world.options
        # Who lost its storage, or found it damaged, does not serve before others have helped it.
        fails = "failed-sync" in self._world.counts.faults
        boot_ms = BOOT_MS + MISSING_MS * fails if self.left_out else options.liveness_ms
        yield boot_ms, partial(self._told, self._why_not_running)
        # A timeout is drawn anew each time, from one to two times the configured one.
        timeout_ms = 2.0 * options.tick_ms * options.election_ticks
        late = self._timeout_doublings()
        elections_ms = ELECTIONS * timeout_ms + (timeout_ms * (1 << late) - timeout_ms)
        # The last word of a silent member, requests to the one left out (a fetch, then who
        # coordinates), a rebalance that waits for all.
        members_ms = (
            SILENCE_MAX * options.session_ms + 2 * options.request_timeout_ms + options.rebalance_ms
        )
        if members_ms <= elections_ms:
            yield elections_ms, partial(self._told, self._why_not_moving_together)
        else:
            yield elections_ms, partial(self._told, self._why_not_moving)
            yield members_ms, partial(self._told, self._why_not_together)

    def _timeout_doublings(self) -> int:
        """How patient the others are at most: whose loop came late a moment ago, or who lost an
        election that was under way, doubles the time after which it gives up a silent leader."""
        nodes = {node.node_id for node in self._others if node.core}
        loops = [node.core.plane.multiraft.timeout_doublings for node in self._others if node.core]
        elections = [
            watcher.replica.core.election.timeout_doublings
            for (node_id, _), watcher in self._world.watch.machines.items()
            if node_id in nodes
        ]
        return max([*loops, *elections], default=0)

    def end(self) -> None:
        """The last node is back, too."""
        if self.left_out is not None:
            self._world.note("let in", self.left_out.node_id)
            self._world.wires.mend_all()
            self._world.cut_off.clear()
            self.left_out = None

    @property
    def _others(self) -> list[ClusterNode]:
        return [node for node in self._world.present if node is not self.left_out]

    def _whom(self) -> ClusterNode | None:
        world = self._world
        if world.watch.is_storage_missing():
            return None
        node = world.random.choice(world.present)
        for watcher in world.watch.machines.values():
            voters = watcher.replica.configuration.voters
            others = [voter for voter in voters if voter.node_id != node.node_id]
            if 2 * len(others) <= len(voters):
                return None
        return node

    def _cut_off(self, node: ClusterNode) -> None:
        world, me = self._world, int(node.node_id)
        world.note("leave out", me)
        for other in world.nodes:
            if other is not node:
                world.wires.cut(me, other.node_id)
                world.wires.cut(other.node_id, me)
        world.cut_off[me] = True
        if node.port is not None:
            # A client that has just asked it would wait for longer than the majority is given.
            node.port.hang_up_at_clients()

    def _is_in_doubt(self) -> bool:
        """True when power loss tore what may have been promised, and only the one left out can tell
        what that was: nobody else may lead, for safety goes before progress."""
        watch = self._world.watch
        for group in watch.groups():
            replicas = [
                watch.machines[node.node_id, group].replica
                for node in self._others
                if (node.node_id, group) in watch.machines
            ]
            # What observers have helps nobody: they cannot lead.
            replicas = [r for r in replicas if r.self_id in r.configuration.voters]
            promised = max((r.core.claimed_end_floor for r in replicas), default=0)
            logs = [r.log for r in replicas]
            held = [Held(log.end_index, log.log_end_offset, log.damaged) for log in logs]
            if is_in_doubt(promised, held):
                return True
        return False

    def _why_not_led(self, group: RaftGroupId) -> str:
        watch = self._world.watch
        if not any((node.node_id, group) in watch.machines for node in self._others):
            return ""  # deleted behind the back of the one left out
        # One that is taken out of service leads until others have what it holds.
        leaders = [node for node in watch.leaders(group) if node is not self.left_out]
        if not leaders:
            return "no leader"
        is_writable = watch.machines[leaders[0].node_id, group].replica.is_writable
        return "" if is_writable else "its leader is not writable"

    def _why_not_up(self) -> str:
        for node in self._others:
            self._supervisors[node.node_id].look()
        down = [int(node.node_id) for node in self._others if not node.is_serving]
        return f"nodes {down} do not serve" if down else ""

    def _why_not_running(self) -> str:
        why = self._why_not_up()
        for node in () if why else self._others:
            if missing := self._supervisors[node.node_id].missing:
                return f"node {node.node_id} does not run {missing}"
        options = self._world.options
        if self._world.now_ms < self._began_ms + options.tick_ms * options.heartbeat_ticks:
            return why or "not every node has ticked since"
        return why

    def _why_not_moving(self) -> str:
        why = self._why_not_up()
        for group in () if why else self._world.watch.groups():
            if why := self._why_not_led(group):
                return f"{group}: {why}"
        return why or self._why_not_acknowledged()

    def _why_not_moving_together(self) -> str:
        return self._why_not_moving() or self._why_not_together()

    def _why_not_acknowledged(self) -> str:
        world = self._world
        wanted = {f"{topic}-{index}" for topic, index in world.partitions}
        acked = {
            name
            for event in world.events[self._first :]
            if event.f == "append" and event.type == "ok"
            for name in event.records
        }
        missing = sorted(wanted - acked)
        return f"nothing acknowledged in {missing}" if missing else ""

    def _why_not_together(self) -> str:
        self._why_not_up()
        generations = {member.generation for member in self._world.members}
        if len(generations) > 1 or -1 in generations:
            return f"members are in generations {sorted(generations)}"
        return ""

    def _told(self, check: Callable[[], str]) -> str:
        why = check()
        if why and self.left_out and self._is_in_doubt():
            self.end()
        return f"without node {self.left_out.node_id}: {why}" if why and self.left_out else why
