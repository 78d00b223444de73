"""Where messages take longer than timeouts, these grow until a leader can stay, and then decay.

Without it three replicas on a machine that is only slow depose one another for ever.
"""

from __future__ import annotations

import itertools
from collections import deque
from random import Random

import pytest

from raftmq.raft.election import DECAY_TIMEOUTS, TIMEOUT_DOUBLINGS_MAX
from raftmq.raft.messages import Message, Role
from tests.raft.network import Disk, Network, configuration, entries_of

ELECTION_TICKS = 6
VOTERS = (1, 2, 3)


class SlowNetwork(Network):
    """Delivers in order, `delay` ticks after a message was sent."""

    def __init__(self, delay: int, seed: int) -> None:
        super().__init__()
        self.delay = delay
        self.now = 0
        self.late: deque[tuple[int, Message]] = deque()
        random = Random(seed)
        for number in VOTERS:
            disk = Disk(base=configuration(VOTERS), entries=entries_of([]))
            self.add(
                number,
                disk,
                seed=random.randrange(1 << 30),
                election_ticks=ELECTION_TICKS,
                heartbeat_ticks=2,
            )

    def run(self, ticks: int) -> list[int | None]:
        """Who led at each tick; None where nobody did, or two believed it."""
        led = []
        for _ in range(ticks):
            self.now += 1
            while self.late and self.late[0][0] <= self.now:
                message = self.late.popleft()[1]
                node = self.nodes[message.to.node_id]
                if node.is_up:
                    node.core.step(message)
                    node.drain()
            self.tick()
            self.late += [(self.now + self.delay, message) for message in self.flight]
            self.flight.clear()
            led.append(self.leader())
        return led

    def leader(self) -> int | None:
        nodes = self.nodes.items()
        leaders = [n for n, node in nodes if node.is_up and node.core.role is Role.LEADER]
        return leaders[0] if len(leaders) == 1 else None

    def timeout_doublings(self) -> list[int]:
        return [node.core.election.timeout_doublings for node in self.nodes.values()]


def run_until_led(network: SlowNetwork) -> int:
    """Returns the leader once all know it and messages of its election are over."""
    for _ in range(1_000):
        led = network.run(1)[0]
        if led is not None and all(
            node.core.leader == network.core(led).self_id for node in network.nodes.values()
        ):
            return led
    raise AssertionError("no leader")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("delay", [1, 3, 5, 8, 12, 16])
def test_a_slow_network_keeps_a_leader(delay: int, seed: int) -> None:
    network = SlowNetwork(delay, seed)
    network.run(1_000)
    led = network.run(2_000)
    changes = sum(1 for before, after in itertools.pairwise(led) if before != after)
    assert led.count(None) < 400, "there is a leader nearly all the time"
    assert changes <= 8


def test_backoff_ends_with_the_trouble() -> None:
    network = SlowNetwork(12, 1)
    run_until_led(network)
    assert max(network.timeout_doublings()) >= 2
    network.delay = 1
    network.run(3 * DECAY_TIMEOUTS * ELECTION_TICKS << TIMEOUT_DOUBLINGS_MAX)
    assert network.timeout_doublings() == [0, 0, 0]


def test_a_group_without_a_majority_does_not_back_off() -> None:
    """Nobody answers because nobody is there: when they come back, there is a leader soon."""
    network = SlowNetwork(1, 1)
    network.run(200)
    for number in (2, 3):
        network.nodes[number].crash()
    network.run(1_000)
    assert network.core(1).role is not Role.LEADER
    assert network.core(1).election.timeout_doublings <= 1
    network.nodes[2].restart()
    assert any(network.run(10 * ELECTION_TICKS))


@pytest.mark.parametrize("reluctant", VOTERS)
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_replica_that_stands_last_leads_only_where_no_other_can(
    reluctant: int, *, is_closed: bool
) -> None:
    network = SlowNetwork(1, 1)
    network.core(reluctant).stands_last = True
    network.core(reluctant).election.reset()
    for turn in range(6):
        led = run_until_led(network)
        assert led != reluctant, f"of three, in turn {turn}"
        network.nodes[led].crash()
        rest = [number for number in VOTERS if number != led]
        for number in rest if is_closed else ():
            network.core(number).campaign()
            network.nodes[number].drain()
        followed = network.run(20 * ELECTION_TICKS)[-1]
        assert followed in rest
        assert followed != reluctant, f"of two, in turn {turn}"
        network.nodes[led].restart()
        network.run(6 * ELECTION_TICKS)  # its log is as long as the others'
    for number in VOTERS:
        network.core(number).stands_last = True
    network.nodes[run_until_led(network)].crash()
    assert network.run(12 * ELECTION_TICKS)[-1] is not None, "one of them has to"


def test_a_closed_connection_is_believed_whatever_the_backoff() -> None:
    network = SlowNetwork(12, 1)
    led = run_until_led(network)
    assert max(network.timeout_doublings()) >= 2
    network.delay = 1
    network.nodes[led].crash()
    network.late.clear()
    rest = [number for number in VOTERS if number != led]
    for number in rest:
        network.core(number).campaign()
        network.nodes[number].drain()
    followed = network.run(2 * ELECTION_TICKS)[-1]
    assert followed in rest
