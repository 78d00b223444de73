"""Cores in a hostile network, from a seed: messages lost, doubled and overtaken, crashes that
forget what was not flushed, wiped and shortened disks, membership changes, transfers. Named
invariants are checked after every step; then the world heals and the group has to make progress.

The simulation with the real log and engine is `jepsen_like`; this one runs in milliseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest

from raftmq.errors import KafkaError
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import Entry, Message, Ready, Role
from raftmq.raft.progress import Progress
from raftmq.types import RaftIndex, ReplicaId
from tests.raft.network import Disk, Network, Node, configuration, replica

SEEDS = int(os.environ.get("RAFTMQ_RAFT_SEEDS", "40"))
STEPS = int(os.environ.get("RAFTMQ_RAFT_STEPS", "1500"))


class World:
    """A network, the dice, and what must always hold."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.network = Network()
        self.leaders: dict[int, ReplicaId] = {}  # by term
        self.commits: dict[RaftIndex, tuple[int, bytes]] = {}  # entry start: term, payload
        self.commit_end = 0
        self.reads: list[tuple[RaftCore, int]] = []  # who asked, round
        self.stale_reads: list[tuple[RaftCore, int]] = []
        self.proposed = 0
        self.confirmed_reads = 0
        self.elections = 0
        self.weak: int | None = None  # the one node that was wiped or cut and is not whole yet
        self.storages = 100
        self.is_hostile = True
        size = self.random.choice([1, 3, 3, 3, 5])
        spare = self.random.randrange(0, 2)
        self.base = configuration(range(1, size + 1), range(size + 1, size + 1 + spare))
        buggy = Random(seed + 1)
        self.settings: dict[str, Any] = {
            "append_bytes_max": self.random.choice([1, 40, 1 << 20]),
            "inflight_messages_max": self.random.choice([1, 3, 64]),
            "inflight_bytes_max": self.random.choice([50, 8 << 20]),
            "pre_vote": self.random.random() < 0.8,
            "check_quorum": self.random.random() < 0.8,
            "announce_commit": self.random.random() < 0.5,
            "priority": self.random.choice([0, 0, 2]),
            "buggify": (lambda _site: buggy.random() < 0.1) if seed % 2 else (lambda _site: False),
        }
        for member in self.base.members:
            self.start(member.node_id, Disk(base=self.base), self_id=member)
        self.loss = self.random.choice([0.0, 0.05, 0.3])

    def start(self, node_id: int, disk: Disk, **more: Any) -> Node:
        node = self.network.add(
            node_id, disk, seed=self.random.randrange(0, 1 << 30), **self.settings, **more
        )
        node.auto_flush = False
        node.on_ready = self.check_ready
        return node

    # Invariants

    def check_ready(self, node: Node, ready: Ready) -> None:
        soft = ready.soft_state
        if soft is not None and soft.role is Role.LEADER:
            self.check_new_leader(node)
        if ready.commit_end is not None:
            self.check_commit(node, ready.commit_end)
        assert node.core.epochs.pairs() == pairs(node.cache)

    def check_new_leader(self, node: Node) -> None:
        """Election safety, leader completeness (Raft figure 3)."""
        core = node.core
        assert self.leaders.setdefault(core.term, core.self_id) == core.self_id, "single leader"
        self.elections += 1
        held = {each.start: (each.term, bytes(each.payload)) for each in node.cache.entries}
        for start, committed in self.commits.items():
            if start >= node.cache.log_start:
                assert held.get(start) == committed, "leader completeness"

    def check_commit(self, node: Node, commit_end: RaftIndex) -> None:
        """State machine safety; committed means durable at a majority."""
        assert commit_end <= node.core.log_end
        for each in node.cache.entries:
            if each.end <= commit_end:
                value = each.term, bytes(each.payload)
                assert self.commits.setdefault(each.start, value) == value, "state machine safety"
        if commit_end > self.commit_end:
            voters = node.core.configuration.voters
            is_gone = node.self_id not in voters  # a leader that committed its own removal
            assert node.core.is_leader or is_gone, "a follower learns of commits from its leader"
            holders = [voter for voter in voters if self.holds(voter, node, commit_end)]
            assert len(holders) > len(voters) // 2, "committed is durable at a majority"
            self.commit_end = commit_end

    def holds(self, voter: ReplicaId, leader: Node, commit_end: int) -> bool:
        other = self.network.nodes[voter.node_id]
        if self.weak == voter.node_id:
            return True  # it held it when it said so
        if other.self_id != voter:
            return False
        start = max(other.disk.log_start, leader.cache.log_start)
        return other.disk.log_end >= commit_end and (
            between(other.disk, start, commit_end) == between(leader.cache, start, commit_end)
        )

    def check_logs(self) -> None:
        """Log matching: the same term at the same position means the same log up to there."""
        seen: dict[tuple[int, int], tuple[int, bytes]] = {}
        for node in self.network.nodes.values():
            before = (int(node.cache.log_start), int(node.cache.previous_term))
            for each in node.cache.entries:
                value = (before[1], bytes(each.payload))
                assert seen.setdefault((each.start, each.term), value) == value, "log matching"
                before = (each.end, each.term)

    # Steps

    def step(self) -> None:
        dice = self.random.random()
        nodes = [node for node in self.network.nodes.values() if node.is_up]
        if not nodes:
            self.restart_all()
            return
        node = self.random.choice(nodes)
        flight = self.network.flight
        if dice < 0.55 and flight:
            self.deliver(flight[self.random.randrange(0, min(len(flight), 4))])
        elif dice < 0.72:
            node.core.tick()
            node.drain()
        elif dice < 0.84:
            node.flush()
            node.drain()
        elif dice < 0.92:
            self.propose()
        elif dice < 0.95:
            self.read()
        elif dice < 0.965:
            self.lead_somewhere_else(node)
        elif dice < 0.98:
            self.change_membership()
        elif dice < 0.983:
            node.core.campaign()
            node.drain()
        elif self.is_hostile:
            self.hurt(node)

    def deliver(self, message: Message) -> None:
        fate = self.random.random() if self.is_hostile else 1.0
        if fate < self.loss:
            self.network.flight.remove(message)
        elif fate < self.loss + 0.05:
            self.network.flight.append(message)
            self.network.deliver(message)
        else:
            self.network.deliver(message)

    def leader(self) -> Node | None:
        leading = [
            node for node in self.network.nodes.values() if node.is_up and node.core.is_leader
        ]
        return self.random.choice(leading) if leading else None

    def propose(self) -> None:
        node = self.leader()
        if node is None:
            return
        for _ in range(self.random.randrange(1, 4)):
            self.proposed += 1
            payload = f"{self.proposed}".encode() * self.random.randrange(1, 6)
            try:
                node.core.propose(payload, self.random.randrange(1, 4))
            except KafkaError:
                assert node.core.transferee is not None
        node.drain()

    def read(self) -> None:
        for core, round_number in list(self.reads):
            if core.read_confirmed(round_number):
                self.reads.remove((core, round_number))
                self.confirmed_reads += 1
        node = self.leader()
        asked = None if node is None else node.core.read_index()
        if node is not None and asked is not None:
            round_number, commit_end = asked
            # If others committed more, no majority may ever confirm that this one still leads.
            is_stale = commit_end < self.commit_end
            (self.stale_reads if is_stale else self.reads).append((node.core, round_number))
            node.drain()
        for core, round_number in self.stale_reads:
            assert not core.read_confirmed(round_number), "a stale read was confirmed"

    def lead_somewhere_else(self, node: Node) -> None:
        core = node.core
        if core.is_leader:
            try:
                core.transfer_leadership(self.random.choice(core.configuration.voters))
            except KafkaError:
                return
            node.drain()
        elif core.commit_end > core.log_start and self.random.random() < 0.3:
            ends = [each.end for each in node.cache.entries if each.end <= core.commit_end]
            node.trim(self.random.choice(ends))

    def change_membership(self) -> None:
        node = self.leader()
        if node is None:
            return
        core = node.core
        step = self.repair_step(core.configuration, core.progress)
        if step is None and self.is_hostile and self.weak is None:
            member = self.random.choice(self.base.members)
            present = self.network.nodes[member.node_id].self_id
            changes = [
                core.configuration.with_voter(present),
                core.configuration.with_learner(present),
                core.configuration.without(present),
            ]
            step = self.random.choice(changes)
            if len(step.voters) * 2 < len(self.base.voters):
                return
        if step is not None:
            try:
                core.propose_membership(step)
            except KafkaError:
                return
            node.drain()

    def repair_step(
        self, current: Configuration, progress: Mapping[ReplicaId, Progress]
    ) -> Configuration | None:
        """Bring every node back as a voter under its present storage."""
        for member in self.base.members:
            present = self.network.nodes[member.node_id].self_id
            if present not in current.members:
                return current.with_learner(present)
            if present in current.learners and member in self.base.voters:
                known = progress.get(present)
                if known is None:
                    continue  # a leader on its way out
                if known.match_end > 0 and known.match_end >= known.next_end - 3:
                    return current.with_voter(present)
                continue
            for each in current.members:
                if each.node_id == member.node_id and each != present:
                    return current.without(each)
        return None

    # Harm

    def hurt(self, node: Node) -> None:
        dice = self.random.random()
        if dice < 0.30:
            node.crash(self.random.randrange(0, 3))
            if self.random.random() < 0.5:
                self.restart_all()  # at once, while its own messages are still on their way
        elif dice < 0.55:
            self.restart_all()
        elif dice < 0.70:
            members = [member.node_id for member in self.base.members]
            side = [each for each in members if self.random.random() < 0.5]
            leader = self.leader()
            if leader is not None and self.random.random() < 0.7:
                side = [leader.self_id.node_id]
            self.network.partition(side, [each for each in members if each not in side])
        elif dice < 0.78:
            self.network.cut = [
                (self.random.choice(self.base.members).node_id, node.self_id.node_id)
            ]
        elif dice < 0.90:
            self.network.heal()
        elif self.weak is None and len(self.base.voters) > 2:
            self.harm_disk(node)
        elif self.weak is not None:
            self.recover_weak()

    def harm_disk(self, node: Node) -> None:
        """At most one disk at a time breaks its word."""
        node_id = node.self_id.node_id
        whole = sorted(self.network.nodes[each.node_id].self_id for each in self.base.voters)
        for each in self.everyone():
            if not each.is_up or list(each.core.configuration.voters) != whole:
                return
        # Unflushed truncations and messages in flight might bring back a smaller configuration,
        # of which this node would be half: no group survives the loss of a half.
        for each in self.everyone():
            each.flush()
            each.drain()
        self.network.flight.clear()
        self.weak = node_id
        if self.random.random() < 0.5:
            self.storages += 1
            self.start(
                node_id,
                Disk(base=self.base),
                self_id=replica(node_id, self.storages),
            )
            return
        claimed = node.disk.log_end
        node.crash()
        keep = self.random.randrange(0, len(node.cache.entries) + 1)
        del node.cache.entries[keep:]
        node.restart()
        node.core.claimed_end_floor = claimed
        node.core.suspended = self.random.random() < 0.3

    def recover_weak(self) -> None:
        """The engine's part: lift what it set once the core says that the claim is restored."""
        assert self.weak is not None
        node = self.network.nodes[self.weak]
        if not node.is_up:
            return
        core = node.core
        core.suspended = False
        if core.claimed_end_floor:
            if core.is_claim_restored:
                core.claimed_end_floor = RaftIndex(0)
                self.weak = None
        elif core.is_voter:
            everywhere = [each.core.configuration for each in self.network.nodes.values()]
            if all(each == everywhere[0] for each in everywhere):
                self.weak = None

    def restart_all(self) -> None:
        for node in self.network.nodes.values():
            if not node.is_up:
                floor = node.core.claimed_end_floor
                node.restart()
                node.core.claimed_end_floor = floor

    # The end: everything works again, so there must be progress.

    def heal(self) -> None:
        self.is_hostile = False
        self.network.heal()
        self.restart_all()
        for node in self.network.nodes.values():
            node.auto_flush = True
            node.flush()
            node.drain()
        self.wait_until(self.repaired, "the group does not repair itself")
        self.wait_until(self.converged, "the group does not converge")

    def wait_until(self, condition: Callable[[], bool], complaint: str) -> None:
        for _ in range(600):
            self.network.tick()
            self.network.settle()
            self.change_membership()
            if self.weak is not None:
                self.recover_weak()
            if condition():
                return
        raise AssertionError(complaint + ": " + repr([describe(each) for each in self.everyone()]))

    def everyone(self) -> list[Node]:
        return list(self.network.nodes.values())

    def repaired(self) -> bool:
        node = self.leader()
        wanted = tuple(
            sorted(self.network.nodes[each.node_id].self_id for each in self.base.voters)
        )
        return (
            node is not None
            and node.core.has_committed_own_term
            and node.core.configurations.is_committed(node.core.commit_end)
            and set(node.core.configuration.voters) >= set(wanted)
        )

    def converged(self) -> bool:
        node = self.leader()
        if node is None:
            return False
        members = [self.network.nodes[each.node_id] for each in node.core.configuration.members]
        return all(
            each.core.commit_end == node.core.log_end and each.core.leader == node.self_id
            for each in members
        )


def describe(node: Node) -> tuple[object, ...]:
    core = node.core
    return (
        core.self_id.node_id,
        core.role.value,
        core.term,
        core.log_start,
        core.log_end,
        core.commit_end,
        core.claimed_end_floor,
        core.configuration,
        dict(core.progress),
    )


def pairs(disk: Disk) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for each in disk.entries:
        if not found or found[-1][0] != each.term:
            found.append((each.term, each.start if found else disk.log_start))
    return found


def between(disk: Disk, start: int, end: int) -> list[Entry]:
    return [each for each in disk.entries if start <= each.start and each.end <= end]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_invariants_hold_in_a_hostile_network(seed: int) -> None:
    """Safety under faults, then liveness once they end."""
    world = World(seed)
    for step in range(STEPS):
        world.step()
        if step % 50 == 0:
            world.check_logs()
    world.heal()
    world.check_logs()
    assert world.commit_end > 0
