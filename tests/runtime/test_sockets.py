"""Large frames cost few turns of the loop, and slow senders are seen to be alive."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from raftmq.runtime.sockets import MARK_BYTES_MAX, MARK_BYTES_MIN, LowWater

PACKET = bytes(16 << 10)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    with sender, receiver:
        sender.setblocking(False)
        receiver.setblocking(False)
        yield sender, receiver


async def _is_readable(sock: socket.socket, within_s: float = 0.05) -> bool:
    with trio.move_on_after(within_s):
        await trio.lowlevel.wait_readable(sock)
        return True
    return False


def mark_of(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)


async def test_a_reader_is_woken_once_for_many_packets(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    size = 1 << 20
    low_water = LowWater(receiver)
    got = wakes = 0
    sent = 0
    buffer = bytearray(size)
    while got < size:
        low_water.wait_for(size - got)
        while not await _is_readable(receiver):
            sent += sender.send(PACKET)
        wakes += 1
        got += receiver.recv_into(memoryview(buffer)[got:])
    low_water.end()
    assert sent == size
    assert wakes <= 4, "one wake-up for half a megabyte, not for every packet"
    assert mark_of(receiver) == 1
    sender.send(b"x")
    assert await _is_readable(receiver, within_s=30)


async def test_the_end_of_a_frame_waits_for_nothing_behind_it(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    low_water = LowWater(receiver)
    low_water.wait_for(8 * MARK_BYTES_MAX)
    assert mark_of(receiver) == MARK_BYTES_MAX
    low_water.wait_for(MARK_BYTES_MIN - 1)
    sender.send(b"x")
    assert await _is_readable(receiver, within_s=30)


async def test_a_hang_up_is_seen_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    LowWater(receiver).wait_for(MARK_BYTES_MAX)
    sender.close()
    with trio.fail_after(30):
        await trio.lowlevel.wait_readable(receiver)
    assert receiver.recv(1) == b""


async def test_a_slow_sender_is_received_as_it_comes(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    low_water = LowWater(receiver)
    low_water.wait_for(MARK_BYTES_MAX)
    sender.send(b"x")
    assert not await _is_readable(receiver)
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with trio.fail_after(30):
                await trio.lowlevel.wait_readable(receiver)

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        low_water.tolerate()
    assert receiver.recv(2) == b"x"
    low_water.wait_for(MARK_BYTES_MAX - 1)
    assert mark_of(receiver) == 1, "for the rest of this frame"
