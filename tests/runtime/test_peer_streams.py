"""One incoming stream: whole frames in their order, however they arrive."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio
import trio.testing
from attrs import define, field
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.runtime import peer_streams
from raftmq.runtime.loop import Lane, LoopBudget
from raftmq.runtime.peer_streams import (
    FRAME_BYTES_MAX,
    FRAME_HEADER,
    KIND_PART,
    PART_HEADER,
    READ_BUFFER_SIZE,
    FrameReader,
    PeerMemory,
    PeerRefusedError,
)
from raftmq.types import NodeId

KIND = 2
LARGE = bytes(READ_BUFFER_SIZE + 50_000)

Outcome = EOFError | OSError | PeerRefusedError | RemoteProtocolError | trio.TooSlowError


def frame(content: bytes, kind: int = KIND) -> bytes:
    return FRAME_HEADER.pack(len(content), crc32c(content), kind) + content


@define(eq=False)
class Stream:
    """Both ends of a stream, and what its reader made of it."""

    ours: socket.socket
    theirs: socket.socket
    is_blocked: bool = False
    refused: bytes | None = None  # content that the node does not take
    frames: list[tuple[int, bytes]] = field(factory=list)
    has_ended: bool = False
    error: Outcome | None = None
    memory: PeerMemory = field(factory=lambda: PeerMemory(1 << 30))
    reader: FrameReader = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = FrameReader(
            self.theirs,
            NodeId(1),
            self.on_frame,
            is_blocked=lambda: self.is_blocked,
            budget=LoopBudget(),
            memory=self.memory,
            takes_parts=True,
        )

    def on_frame(self, kind: int, content: memoryview) -> None:
        if bytes(content) == self.refused:
            raise RemoteProtocolError("not for this node")
        assert content.readonly
        self.frames.append((kind, bytes(content)))

    @property
    def contents(self) -> list[bytes]:
        return [content for _, content in self.frames]

    async def run(self) -> None:
        try:
            await self.reader.run()
        except (
            EOFError,
            OSError,
            PeerRefusedError,
            RemoteProtocolError,
            trio.TooSlowError,
        ) as error:
            self.error = error
        self.has_ended = True

    async def send(self, data: bytes) -> None:
        """Send all of it, as far as the reader takes it."""
        while data:
            data = data[self.ours.send(data) :]
            await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def streaming() -> AsyncIterator[Stream]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        stream = Stream(ours, theirs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await trio.testing.wait_all_tasks_blocked()
            yield stream
            nursery.cancel_scope.cancel()


async def test_frames_are_read_at_once() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"one") + frame(b"", 7) + frame(LARGE))
        assert stream.frames == [(KIND, b"one"), (7, b""), (KIND, LARGE)]
        assert not stream.has_ended


class SpentBudget(LoopBudget):
    """A budget that others have spent until `renewed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, Lane]] = []
        self.renewed = trio.Event()

    def try_take(self, cost: int, lane: Lane = Lane.CLIENTS) -> bool:
        self.asked.append((cost, lane))
        return False

    async def take(self, cost: int, lane: Lane = Lane.CLIENTS) -> None:
        await self.renewed.wait()


async def test_large_frames_wait_for_a_pass_with_budget_left() -> None:
    async with streaming() as stream:
        budget = stream.reader._budget = SpentBudget()
        await stream.send(frame(b"before it") + frame(LARGE) + frame(b"after it"))
        assert stream.contents == [b"before it"]
        budget.renewed.set()
        await trio.testing.wait_all_tasks_blocked()
        assert stream.contents == [b"before it", LARGE, b"after it"]
        assert budget.asked == [(len(LARGE), Lane.PEERS)], "small ones are not charged"


@pytest.mark.parametrize("cut", [1, FRAME_HEADER.size, FRAME_HEADER.size + 3])
async def test_a_frame_may_come_in_two(cut: int) -> None:
    async with streaming() as stream:
        data = frame(b"split")
        await stream.send(frame(b"whole") + data[:cut])
        assert stream.contents == [b"whole"]
        await stream.send(data[cut:])
        assert stream.contents == [b"whole", b"split"]


@pytest.mark.parametrize("sent", [40_000, READ_BUFFER_SIZE - 1, len(LARGE)])
async def test_a_frame_beyond_the_buffer(sent: int) -> None:
    """`sent`: bytes of it that come first."""
    async with streaming() as stream:
        data = frame(LARGE)
        await stream.send(data[:sent])
        await stream.send(data[sent:] + frame(b"next"))
        assert stream.contents[0] == LARGE
        assert stream.contents[1:] == [b"next"]
        assert stream.error is None


async def test_a_large_frame_behind_a_small_one() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"small") + frame(LARGE) + frame(b"next"))
        assert stream.contents == [b"small", LARGE, b"next"]


async def test_an_end_is_noticed() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"last"))
        stream.ours.close()
        await trio.testing.wait_all_tasks_blocked()
        assert stream.contents == [b"last"]
        assert isinstance(stream.error, EOFError)


async def test_an_end_in_the_middle_of_a_frame_is_noticed() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole") + frame(b"half")[:-2])
        stream.ours.close()
        await trio.testing.wait_all_tasks_blocked()
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, EOFError)


async def test_a_connection_that_failed_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setblocking(False)
    with theirs:
        stream = Stream(ours, theirs)
        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.run)
                await trio.testing.wait_all_tasks_blocked()
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                ours.close()
        assert isinstance(stream.error, ConnectionResetError)


async def test_a_damaged_frame_that_is_the_last_ends_the_stream() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole") + FRAME_HEADER.pack(3, 0, KIND) + b"bad")
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)


async def test_a_damaged_frame_ends_the_stream() -> None:
    async with streaming() as stream:
        damaged = bytearray(frame(b"damaged"))
        damaged[-1] ^= 1
        await stream.send(frame(b"whole") + damaged + frame(b"next"))
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)
        assert "damaged frame from node 1" in str(stream.error)


async def test_a_frame_that_the_node_refuses_ends_the_stream() -> None:
    async with streaming() as stream:
        stream.refused = b"refused"
        await stream.send(frame(b"whole") + frame(b"refused") + frame(b"next"))
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, RemoteProtocolError)


async def test_a_frame_of_impossible_size_ends_the_stream() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole") + FRAME_HEADER.pack(FRAME_BYTES_MAX + 1, 0, KIND))
        if stream.error is None:
            await stream.send(b"and so on")
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)
        assert f"{FRAME_BYTES_MAX + 1} bytes from node 1" in str(stream.error)


async def test_parts_are_joined() -> None:
    def part(content: bytes, *, is_last: bool) -> bytes:
        return frame(PART_HEADER.pack(7, is_last) + content, KIND_PART)

    async with streaming() as stream:
        await stream.send(part(b"a", is_last=False) + part(b"b", is_last=False))
        assert stream.frames == []
        await stream.send(part(b"c", is_last=True) + part(b"", is_last=True) + frame(b"d"))
        assert stream.frames == [(7, b"abc"), (7, b""), (KIND, b"d")]


async def test_a_blocked_stream_is_swallowed_and_ends_when_it_is_heard_again() -> None:
    """Something is missing there: the peer shall know, and begin anew."""
    async with streaming() as stream:
        await stream.send(frame(b"heard"))
        stream.is_blocked = True
        for _ in range(3):
            await stream.send(frame(b"lost") + frame(b"lost, too"))
        assert not stream.has_ended
        stream.is_blocked = False
        assert not stream.has_ended, "nothing shows what is missing"
        await stream.send(frame(b"next") + frame(b"and so on"))
        assert stream.has_ended
        assert stream.error is None
        assert stream.contents == [b"heard"]


async def test_damage_is_not_seen_where_nothing_is_heard() -> None:
    async with streaming() as stream:
        stream.is_blocked = True
        await stream.send(FRAME_HEADER.pack(3, 0, KIND) + b"bad")
        assert not stream.has_ended


# Few bytes in all, for a buffer of few bytes: every place is a cut, and some frames fit it exactly.
SMALL_BUFFER = 40


@pytest.mark.parametrize("content_bytes_max", [SMALL_BUFFER - FRAME_HEADER.size, 3 * SMALL_BUFFER])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cut_anywhere_it_is_the_same(content_bytes_max: int, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, content_bytes_max), min_size=1, max_size=12))
    contents = [bytes([number]) * size for number, size in enumerate(sizes)]
    sent = b"".join(frame(content) for content in contents)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))

    async def run() -> None:
        async with streaming() as stream:
            start = 0
            for cut in (*cuts, len(sent)):
                await stream.send(sent[start:cut])
                start = cut
            await trio.testing.wait_all_tasks_blocked()
            assert stream.error is None
            assert stream.contents == contents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_streams, "READ_BUFFER_SIZE", SMALL_BUFFER)
        trio.run(run)


# ---- memory and time ----


def announced(size: int) -> bytes:
    return FRAME_HEADER.pack(size, 0, KIND)


async def test_what_is_only_announced_costs_little() -> None:
    """A kibibyte that begins a frame of 96 MiB; the buffer grows with what comes."""
    async with streaming() as stream:
        await stream.send(announced(FRAME_BYTES_MAX) + bytes(1024))
        assert stream.memory.used_bytes == peer_streams.FIRST_BYTES
        sent = 1024
        while sent < 5 << 20:
            await stream.send(bytes(1 << 16))
            sent += 1 << 16
        assert stream.memory.used_bytes <= 2 * sent
        assert stream.error is None


async def test_a_frame_that_grew_arrives_as_it_was() -> None:
    content = bytes(range(256)) * (5 << 12)
    async with streaming() as stream:
        data = memoryview(frame(content))
        while data:
            await stream.send(bytes(data[: 1 << 16]))
            data = data[1 << 16 :]
        assert stream.contents == [content]
        assert stream.memory.used_bytes == 0


async def test_who_holds_most_makes_room() -> None:
    memory = PeerMemory(4 << 20)
    async with streaming() as large, streaming() as small:
        for stream, size in ((large, 2 << 20), (small, 1 << 10)):
            stream.reader._memory = memory
            data = announced(FRAME_BYTES_MAX) + bytes(size)
            for start in range(0, len(data), 1 << 16):
                await stream.send(data[start : start + (1 << 16)])
        while large.error is None:
            await small.send(bytes(1 << 16))
            await trio.testing.wait_all_tasks_blocked()
        assert isinstance(large.error, peer_streams.PeerMemoryError)
        assert small.error is None
        with suppress(BrokenPipeError):  # it ended in the middle
            while small.error is None:
                await small.send(bytes(1 << 16))
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(small.error, peer_streams.PeerMemoryError), "alone it holds most"
        assert memory.used_bytes == 0


async def test_parts_are_charged_until_the_whole_is_handed_on() -> None:
    def part(content: bytes, *, is_last: bool) -> bytes:
        return frame(PART_HEADER.pack(KIND, is_last) + content, KIND_PART)

    async with streaming() as stream:
        await stream.send(part(bytes(1000), is_last=False))
        assert stream.memory.used_bytes == 1000
        await stream.send(part(bytes(500), is_last=True))
        assert stream.memory.used_bytes == 0
        assert [len(content) for content in stream.contents] == [1500]
        await stream.send(part(b"a", is_last=False) + frame(PART_HEADER.pack(9, True), KIND_PART))
        assert isinstance(stream.error, PeerRefusedError), "parts of two frames"


@pytest.mark.parametrize(
    "begun", [FRAME_HEADER.pack(100, 0, KIND) + b"x", announced(1 << 20) + b"x"]
)
async def test_a_frame_has_a_deadline(begun: bytes, autojump_clock: trio.testing.MockClock) -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole"))
        await trio.sleep(1_000)
        assert stream.error is None, "between frames there is none"
        await stream.send(begun)
        await trio.sleep(20)
        assert stream.error is None
        await trio.sleep(20)
        assert isinstance(stream.error, trio.TooSlowError)
