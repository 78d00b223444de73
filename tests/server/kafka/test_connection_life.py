"""The state of a connection as a table: each way is taken, and no other one can be."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pytest
import trio
import trio.testing
from attrs import frozen

from raftmq.server.kafka.connection import NEXT, QUIET_S, Connection, ConnectionState
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

    async def come_to(self, state: ConnectionState) -> None:
        """Let the connection, which is at rest, come to a state."""
        if state in (ConnectionState.BUSY, ConnectionState.RECEIVING):
            self.send(LARGE[:60_000])
            await settled()
        if state is ConnectionState.BUSY:
            self.send(LARGE[60_000:])
            await settled()
        if state in (ConnectionState.DRAINING, ConnectionState.ENDING):
            self.send(request(2))  # without an answer: it waits for that
            await settled()
        if state is ConnectionState.DRAINING:
            self.connection.finish()
            await settled()
        elif state is ConnectionState.ENDING:
            self.connection.broken()
        elif state is ConnectionState.CLOSED:
            self.connection.close()
        assert self.connection.state is state


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


EVENTS: Final[dict[Callable[[One], None], dict[ConnectionState, list[ConnectionState]]]] = {
    # What a connection goes through, by where it is: at once, and until nothing is left to do.
    say_a_little: {
        ConnectionState.AT_REST: [ConnectionState.AT_REST],
        ConnectionState.BUSY: [ConnectionState.BUSY],
        ConnectionState.DRAINING: [ConnectionState.DRAINING],
        ConnectionState.ENDING: [ConnectionState.ENDING, ConnectionState.CLOSED],
    },
    begin_a_large_one: {
        ConnectionState.AT_REST: [
            ConnectionState.AT_REST,
            ConnectionState.BUSY,
            ConnectionState.RECEIVING,
        ],
        ConnectionState.BUSY: [ConnectionState.BUSY, ConnectionState.RECEIVING],
    },
    send_the_rest: {ConnectionState.RECEIVING: [ConnectionState.RECEIVING, ConnectionState.BUSY]},
    be_quiet: {
        ConnectionState.AT_REST: [ConnectionState.AT_REST],
        ConnectionState.BUSY: [ConnectionState.BUSY, ConnectionState.AT_REST],
        ConnectionState.RECEIVING: [ConnectionState.RECEIVING],
        ConnectionState.DRAINING: [ConnectionState.DRAINING],
    },
    drain: {
        ConnectionState.AT_REST: [ConnectionState.DRAINING, ConnectionState.CLOSED],
        ConnectionState.BUSY: [
            ConnectionState.DRAINING
        ],  # it has a request that waits for its answer
        ConnectionState.RECEIVING: [ConnectionState.DRAINING, ConnectionState.CLOSED],
        ConnectionState.DRAINING: [ConnectionState.DRAINING],
        ConnectionState.ENDING: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.CLOSED: [ConnectionState.CLOSED],
    },
    break_it: {
        ConnectionState.AT_REST: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.BUSY: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.RECEIVING: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.DRAINING: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.ENDING: [ConnectionState.ENDING, ConnectionState.CLOSED],
        ConnectionState.CLOSED: [ConnectionState.CLOSED],
    },
    hang_up: {
        state: [ConnectionState.CLOSED]
        for state in ConnectionState
        if state is not ConnectionState.NEW
    },
    client_goes: {
        ConnectionState.AT_REST: [ConnectionState.AT_REST, ConnectionState.CLOSED],
        ConnectionState.BUSY: [ConnectionState.BUSY, ConnectionState.CLOSED],
        ConnectionState.RECEIVING: [ConnectionState.RECEIVING, ConnectionState.CLOSED],
    },
}
ROWS: Final = [(event, state) for event, ways in EVENTS.items() for state in ways]


@pytest.mark.parametrize(
    ("event", "state"), ROWS, ids=[f"{event.__name__}-{state.name}" for event, state in ROWS]
)
async def test_each_way(
    event: Callable[[One], None], state: ConnectionState, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = EVENTS[event][state]
    async with callers(1) as found:
        one = One(found)
        await one.come_to(state)
        become, gone = Connection._become, [state]

        def noted(self: Connection, after: ConnectionState) -> None:
            become(self, after)
            gone.append(after)

        monkeypatch.setattr(Connection, "_become", noted)
        event(one)
        assert one.connection.state is wanted[0], "at once"
        with trio.fail_after(30):
            while one.connection.state is not wanted[-1]:
                await settled()
            await settled()
        assert one.connection.state is wanted[-1]
        assert gone == list(dict.fromkeys([state, *wanted]))
        one.connection.close()  # as one that is parting would not before its answer


def test_no_way_is_left_out() -> None:
    """Each of the table is one that an event takes; NEW lasts until a connection is watched."""
    taken = {
        ConnectionState.NEW: {
            ConnectionState.AT_REST,
            ConnectionState.ENDING,
            ConnectionState.CLOSED,
        },
        ConnectionState.CLOSED: set[ConnectionState](),
    }
    for ways in EVENTS.values():
        for state, wanted in ways.items():
            steps = list(dict.fromkeys([state, *wanted]))
            for before, after in pairwise(steps):
                taken.setdefault(before, set()).add(after)
    assert taken == {state: set(after) for state, after in NEXT.items()}


async def test_no_other_way_can_be_taken() -> None:
    async with callers(1) as found:
        connection = found.connections[0]
        for before in ConnectionState:
            for after in set(ConnectionState) - NEXT[before]:
                connection.state = before
                with pytest.raises(AssertionError, match="a connection goes from"):
                    connection._become(after)
        connection.state = ConnectionState.AT_REST
