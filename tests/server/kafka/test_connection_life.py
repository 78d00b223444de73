"""The life of a connection as a table: each way is taken, and no other one can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pytest
import trio
import trio.testing
from attrs import frozen

from raftmq.server.kafka.connection import NEXT, QUIET_S, Connection, Life
from tests.server.kafka.test_readiness import Callers, callers, request

LARGE: Final = request(1, 100_000, 0)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked(0.01)


@frozen
class One:
    """A client and its connection."""

    found: Callers

    @property
    def connection(self) -> Connection:
        return self.found.connections[0]

    def send(self, data: bytes) -> None:
        assert self.found.socks[0].send(data) == len(data)

    async def come_to(self, life: Life) -> None:
        """Let the connection, which is at rest, come to a state."""
        if life in (Life.BUSY, Life.RECEIVING):
            self.send(LARGE[:60_000])
            await settled()
        if life is Life.BUSY:
            self.send(LARGE[60_000:])
            await settled()
        if life in (Life.PARTING, Life.ENDING):
            self.send(request(2))  # without an answer: it waits for that
            await settled()
        if life is Life.PARTING:
            self.connection.finish()
            await settled()
        elif life is Life.ENDING:
            self.connection.broken()
        elif life is Life.CLOSED:
            self.connection.close()
        assert self.connection.life is life


def begin_a_large_one(one: One) -> None:
    one.send(LARGE[:60_000])


def send_the_rest(one: One) -> None:
    one.send(LARGE[60_000:])


def say_a_little(one: One) -> None:
    one.send(request(3))


def be_quiet(one: One) -> None:
    one.connection.rest_if_quiet(one.connection.last_active + QUIET_S + 0.5)


def drain(one: One) -> None:
    one.connection.finish()


def break_it(one: One) -> None:
    one.connection.broken()


def hang_up(one: One) -> None:
    one.connection.close()


def client_goes(one: One) -> None:
    one.found.socks[0].close()


EVENTS: Final[dict[Callable[[One], None], dict[Life, list[Life]]]] = {
    # What a connection goes through, by where it is: at once, and until nothing is left to do.
    say_a_little: {
        Life.AT_REST: [Life.AT_REST],
        Life.BUSY: [Life.BUSY],
        Life.PARTING: [Life.PARTING],
        Life.ENDING: [Life.ENDING, Life.CLOSED],
    },
    begin_a_large_one: {
        Life.AT_REST: [Life.AT_REST, Life.BUSY, Life.RECEIVING],
        Life.BUSY: [Life.BUSY, Life.RECEIVING],
    },
    send_the_rest: {Life.RECEIVING: [Life.RECEIVING, Life.BUSY]},
    be_quiet: {
        Life.AT_REST: [Life.AT_REST],
        Life.BUSY: [Life.BUSY, Life.AT_REST],
        Life.RECEIVING: [Life.RECEIVING],
        Life.PARTING: [Life.PARTING],
    },
    drain: {
        Life.AT_REST: [Life.PARTING, Life.CLOSED],
        Life.BUSY: [Life.PARTING],  # it has a request that waits for its answer
        Life.RECEIVING: [Life.PARTING, Life.CLOSED],
        Life.PARTING: [Life.PARTING],
        Life.ENDING: [Life.ENDING, Life.CLOSED],
        Life.CLOSED: [Life.CLOSED],
    },
    break_it: {
        Life.AT_REST: [Life.ENDING, Life.CLOSED],
        Life.BUSY: [Life.ENDING, Life.CLOSED],
        Life.RECEIVING: [Life.ENDING, Life.CLOSED],
        Life.PARTING: [Life.ENDING, Life.CLOSED],
        Life.ENDING: [Life.ENDING, Life.CLOSED],
        Life.CLOSED: [Life.CLOSED],
    },
    hang_up: {life: [Life.CLOSED] for life in Life if life is not Life.NEW},
    client_goes: {
        Life.AT_REST: [Life.AT_REST, Life.CLOSED],
        Life.BUSY: [Life.BUSY, Life.CLOSED],
        Life.RECEIVING: [Life.RECEIVING, Life.CLOSED],
    },
}
ROWS: Final = [(event, life) for event, ways in EVENTS.items() for life in ways]


@pytest.mark.parametrize(
    ("event", "life"), ROWS, ids=[f"{event.__name__}-{life.name}" for event, life in ROWS]
)
async def test_each_way(
    event: Callable[[One], None], life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = EVENTS[event][life]
    async with callers(1) as found:
        one = One(found)
        await one.come_to(life)
        become, gone = Connection._become, [life]

        def noted(self: Connection, after: Life) -> None:
            become(self, after)
            gone.append(after)

        monkeypatch.setattr(Connection, "_become", noted)
        event(one)
        assert one.connection.life is wanted[0], "at once"
        with trio.fail_after(5):
            while one.connection.life is not wanted[-1]:
                await settled()
            await settled()
        assert one.connection.life is wanted[-1]
        assert gone == list(dict.fromkeys([life, *wanted]))
        one.connection.close()  # as one that is parting would not before its answer


def test_no_way_is_left_out() -> None:
    """Each of the table is one that an event takes; NEW lasts until a connection is watched."""
    taken = {Life.NEW: {Life.AT_REST, Life.ENDING, Life.CLOSED}, Life.CLOSED: set[Life]()}
    for ways in EVENTS.values():
        for life, wanted in ways.items():
            steps = list(dict.fromkeys([life, *wanted]))
            for before, after in pairwise(steps):
                taken.setdefault(before, set()).add(after)
    assert taken == {life: set(after) for life, after in NEXT.items()}


async def test_no_other_way_can_be_taken() -> None:
    async with callers(1) as found:
        connection = found.connections[0]
        for before in Life:
            for after in set(Life) - NEXT[before]:
                connection.life = before
                with pytest.raises(AssertionError, match="a connection goes from"):
                    connection._become(after)
        connection.life = Life.AT_REST
