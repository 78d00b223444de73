"""However the network cuts a stream of requests, the same requests begin, in order, whole."""

from __future__ import annotations

import struct

import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.server.kafka.connection import SCRATCH_BYTES
from tests.server.kafka.test_connection import PRODUCE, FakeBroker, connected, reply

SIZES = st.one_of(
    st.integers(8, 64),
    st.integers(SCRATCH_BYTES - 8, SCRATCH_BYTES + 8),
    st.integers(8, 3 * SCRATCH_BYTES),
)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(SIZES, min_size=1, max_size=6), data=st.data())
def test_split_anywhere(sizes: list[int], data: st.DataObject) -> None:
    bodies = [
        struct.pack(">hhi", PRODUCE, 9, i) + bytes([i % 256]) * (size - 8)
        for i, size in enumerate(sizes)
    ]
    stream = b"".join(struct.pack(">i", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    seen: list[bytes] = []

    async def run() -> None:
        broker = FakeBroker(answer=lambda i: (seen.append(broker.last), (reply(i),))[1])
        async with connected(broker) as client:
            start = 0
            for cut in (*cuts, len(stream)):
                await client.send(stream[start:cut])
                await trio.testing.wait_all_tasks_blocked()
                start = cut
            assert await client.receive_ids(len(sizes)) == list(range(len(sizes)))

    trio.run(run)
    assert seen == bodies
