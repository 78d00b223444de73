"""One incoming stream: read at once, or at looks only, and the same frames in the same order."""

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
from raftmq.runtime import peer_reader
from raftmq.runtime.peer_reader import (
    FRAME_BYTES_MAX,
    FRAME_HEADER,
    KIND_PART,
    PART_HEADER,
    READ_BUFFER_SIZE,
    FrameReader,
    PeerMemory,
    PeerRefusedError,
)
from raftmq.runtime.turns import Lane, Turns
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
    may_rest: bool = True
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
            may_rest=lambda: self.may_rest,
            turns=Turns(),
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
        """Everything that a reader at rest leaves to the kernel fits there."""
        while data:
            data = data[self.ours.send(data) :]
            await trio.testing.wait_all_tasks_blocked()

    async def look(self) -> None:
        """Look, and let the reader do what that leaves to it."""
        self.reader.look()
        await trio.testing.wait_all_tasks_blocked()

    async def is_at_rest(self) -> bool:
        """Ask with a frame, which is read in any case."""
        count = len(self.frames)
        await self.send(frame(b"?"))
        is_at_rest = len(self.frames) == count
        if is_at_rest:
            self.reader.look()
        assert self.frames.pop() == (KIND, b"?")
        assert len(self.frames) == count
        return is_at_rest


@asynccontextmanager
async def streaming(*, may_rest: bool = True) -> AsyncIterator[Stream]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        stream = Stream(ours, theirs, may_rest)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await trio.testing.wait_all_tasks_blocked()
            yield stream
            nursery.cancel_scope.cancel()
        stream.reader.look()  # of one whose task is over: nothing is left to wake


async def test_frames_are_read_at_once_where_nobody_may_rest() -> None:
    async with streaming(may_rest=False) as stream:
        await stream.send(frame(b"one") + frame(b"", 7) + frame(LARGE))
        assert stream.frames == [(KIND, b"one"), (7, b""), (KIND, LARGE)]
        await stream.look()
        assert len(stream.frames) == 3
        assert not stream.has_ended


class SpentTurns(Turns):
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
    async with streaming(may_rest=False) as stream:
        turns = stream.reader._turns = SpentTurns()
        await stream.send(frame(b"before it") + frame(LARGE) + frame(b"after it"))
        assert stream.contents == [b"before it"]
        turns.renewed.set()
        await trio.testing.wait_all_tasks_blocked()
        assert stream.contents == [b"before it", LARGE, b"after it"]
        assert turns.asked == [(len(LARGE), Lane.PEERS)], "small ones are not charged"


async def test_a_stream_at_rest_is_read_at_looks_only() -> None:
    async with streaming() as stream:
        for number in range(3):
            stream.frames.clear()
            await stream.send(frame(b"one") + frame(b"", 7))
            await stream.send(frame(b"%d" % number))
            assert stream.frames == []
            stream.reader.look()
            assert stream.frames == [(KIND, b"one"), (7, b""), (KIND, b"%d" % number)], "at once"
            await trio.testing.wait_all_tasks_blocked()


async def test_nobody_is_woken_by_what_is_read_at_looks() -> None:
    """That is what they are for."""
    steps: list[trio.lowlevel.Task] = []

    class Steps(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            steps.append(task)

    async with streaming() as stream:
        counter = Steps()
        test = trio.lowlevel.current_task()
        trio.lowlevel.add_instrument(counter)
        for _ in range(5):
            await stream.send(frame(b"beat"))
            await stream.look()
            await stream.look()
        trio.lowlevel.remove_instrument(counter)
        assert stream.contents == [b"beat"] * 5
        assert [task for task in steps if task is not test] == []


@pytest.mark.parametrize("cut", [1, FRAME_HEADER.size, FRAME_HEADER.size + 3])
async def test_the_rest_of_a_frame_is_not_left_to_the_next_look(cut: int) -> None:
    async with streaming() as stream:
        data = frame(b"split")
        await stream.send(frame(b"whole") + data[:cut])
        await stream.look()
        assert stream.contents == [b"whole"]
        await stream.send(data[cut:])
        assert stream.contents == [b"whole", b"split"]
        assert await stream.is_at_rest(), "that was urgent, what follows is not"


async def test_two_misses_in_a_row_end_a_rest_until_something_comes() -> None:
    async with streaming() as stream:
        await stream.look()
        assert await stream.is_at_rest()
        for _ in range(3):
            await stream.look()
            await stream.send(frame(b"late"))
            await stream.look()
        assert await stream.is_at_rest(), "never two in a row"
        await stream.look()
        await stream.look()
        assert not await stream.is_at_rest()
        await stream.look()
        assert await stream.is_at_rest(), "which has begun again, and the misses count anew"


async def test_who_is_listened_to_has_no_misses() -> None:
    async with streaming(may_rest=False) as stream:
        for _ in range(5):
            await stream.look()
        stream.may_rest = True
        assert not await stream.is_at_rest(), "it waits since before"
        await stream.look()
        assert await stream.is_at_rest()


@pytest.mark.parametrize("sent", [40_000, READ_BUFFER_SIZE - 1, len(LARGE)])
async def test_a_frame_beyond_the_buffer_at_a_look(sent: int) -> None:
    """`sent`: bytes of it that are there when it is looked at."""
    async with streaming() as stream:
        data = frame(LARGE)
        await stream.send(data[:sent])
        await stream.look()
        await stream.send(data[sent:] + frame(b"next"))
        assert stream.contents[0] == LARGE
        await stream.look()
        assert stream.contents[1:] == [b"next"]
        assert stream.error is None
        assert await stream.is_at_rest()


async def test_a_large_frame_behind_a_small_one_at_a_look() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"small") + frame(LARGE) + frame(b"next"))
        await stream.look()
        await stream.look()
        assert stream.contents == [b"small", LARGE, b"next"]


async def test_listening_begins_when_it_is_told() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"one"))
        stream.may_rest = False
        stream.reader.attend()
        stream.reader.attend()
        stream.reader.look()
        await trio.testing.wait_all_tasks_blocked()
        assert stream.contents == [b"one"], "what was there, without a look"
        await stream.send(frame(b"two"))
        assert stream.contents == [b"one", b"two"]


async def test_a_frame_may_end_the_rest_in_which_it_is_read() -> None:
    """It wakes a group, say."""
    async with streaming() as stream:
        take = stream.on_frame

        def wake(kind: int, content: memoryview) -> None:
            take(kind, content)
            stream.may_rest = False
            stream.reader.attend()

        stream.reader._on_frame = wake
        await stream.send(frame(b"one") + frame(b"two") + frame(b"three")[:4])
        await stream.look()
        assert stream.contents == [b"one", b"two"]
        await stream.send(frame(b"three")[4:] + frame(b"four"))
        assert stream.contents == [b"one", b"two", b"three", b"four"]


async def test_an_end_is_noticed_at_the_second_look_at_the_latest() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"last"))
        stream.ours.close()
        for _ in range(3):
            await stream.look()
        assert stream.contents == [b"last"]
        assert isinstance(stream.error, EOFError)


async def test_an_end_in_the_middle_of_a_frame_is_noticed_at_a_look() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole") + frame(b"half")[:-2])
        stream.ours.close()
        await stream.look()
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, EOFError)


async def test_a_connection_that_failed_ends_at_looks() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setblocking(False)
    with theirs:
        stream = Stream(ours, theirs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stream.run)
            await trio.testing.wait_all_tasks_blocked()
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            ours.close()
            with trio.fail_after(5):
                await trio.lowlevel.wait_readable(theirs)
            for _ in range(2):
                await stream.look()
            assert isinstance(stream.error, EOFError | OSError)


async def test_what_a_task_is_reading_is_not_looked_at() -> None:
    async with streaming() as stream:
        data = frame(LARGE)
        await stream.send(data[:40_000])
        await stream.look()
        await stream.send(data[40_000:100_000])
        assert stream.ours.send(data[100_000:] + frame(b"next")) > len(data) - 100_000
        stream.reader.look()
        await trio.testing.wait_all_tasks_blocked()
        await stream.look()
        assert stream.contents == [LARGE, b"next"]


async def test_a_damaged_frame_that_is_the_last_ends_the_stream() -> None:
    async with streaming() as stream:
        await stream.send(frame(b"whole") + FRAME_HEADER.pack(3, 0, KIND) + b"bad")
        await stream.look()
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)


@pytest.mark.parametrize("may_rest", [True, False])
async def test_a_damaged_frame_ends_the_stream(may_rest: bool) -> None:
    """A look itself raises nothing: it is one turn for all streams, within a tick."""
    async with streaming(may_rest=may_rest) as stream:
        damaged = bytearray(frame(b"damaged"))
        damaged[-1] ^= 1
        await stream.send(frame(b"whole") + damaged + frame(b"next"))
        await stream.look()
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)
        assert "damaged frame from node 1" in str(stream.error)


@pytest.mark.parametrize("may_rest", [True, False])
async def test_a_frame_that_the_node_refuses_ends_the_stream(may_rest: bool) -> None:
    async with streaming(may_rest=may_rest) as stream:
        stream.refused = b"refused"
        await stream.send(frame(b"whole") + frame(b"refused") + frame(b"next"))
        await stream.look()
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, RemoteProtocolError)


@pytest.mark.parametrize("may_rest", [True, False])
async def test_a_frame_of_impossible_size_ends_the_stream(may_rest: bool) -> None:
    async with streaming(may_rest=may_rest) as stream:
        await stream.send(frame(b"whole") + FRAME_HEADER.pack(FRAME_BYTES_MAX + 1, 0, KIND))
        await stream.look()
        if stream.error is None:
            await stream.send(b"and so on")
        assert stream.contents == [b"whole"]
        assert isinstance(stream.error, PeerRefusedError)
        assert f"{FRAME_BYTES_MAX + 1} bytes from node 1" in str(stream.error)


async def test_parts_are_joined_over_looks() -> None:
    def part(content: bytes, *, is_last: bool) -> bytes:
        return frame(PART_HEADER.pack(7, is_last) + content, KIND_PART)

    async with streaming() as stream:
        await stream.send(part(b"a", is_last=False) + part(b"b", is_last=False))
        await stream.look()
        assert stream.frames == []
        await stream.send(part(b"c", is_last=True) + part(b"", is_last=True) + frame(b"d"))
        await stream.look()
        assert stream.frames == [(7, b"abc"), (7, b""), (KIND, b"d")]


@pytest.mark.parametrize("may_rest", [True, False])
async def test_a_blocked_stream_is_swallowed_and_ends_when_it_is_heard_again(
    may_rest: bool,
) -> None:
    """Something is missing there: the peer shall know, and begin anew."""
    async with streaming(may_rest=may_rest) as stream:
        await stream.send(frame(b"heard"))
        await stream.look()
        stream.is_blocked = True
        for _ in range(3):
            await stream.send(frame(b"lost") + frame(b"lost, too"))
            await stream.look()
        assert not stream.has_ended
        stream.is_blocked = False
        await stream.look()
        assert not stream.has_ended, "nothing shows what is missing"
        await stream.send(frame(b"next") + frame(b"and so on"))
        await stream.look()
        assert stream.has_ended
        assert stream.error is None
        assert stream.contents == [b"heard"]


async def test_damage_is_not_seen_where_nothing_is_heard() -> None:
    async with streaming() as stream:
        stream.is_blocked = True
        await stream.send(FRAME_HEADER.pack(3, 0, KIND) + b"bad")
        await stream.look()
        assert not stream.has_ended


# Few bytes in all, for a buffer of few bytes: every place is a cut, and some frames fit it exactly.
SMALL_BUFFER = 40
TURNS = st.sampled_from(["look", "listen", "rest"])


@pytest.mark.parametrize("content_bytes_max", [SMALL_BUFFER - FRAME_HEADER.size, 3 * SMALL_BUFFER])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cut_anywhere_and_read_at_any_time_it_is_the_same(
    content_bytes_max: int, data: st.DataObject
) -> None:
    sizes = data.draw(st.lists(st.integers(0, content_bytes_max), min_size=1, max_size=12))
    contents = [bytes([number]) * size for number, size in enumerate(sizes)]
    sent = b"".join(frame(content) for content in contents)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    turns = [data.draw(st.lists(TURNS, max_size=4)) for _ in (*cuts, len(sent))]

    async def run() -> None:
        async with streaming(may_rest=False) as stream:
            start = 0
            for cut, its_turns in zip((*cuts, len(sent)), turns, strict=True):
                await stream.send(sent[start:cut])
                start = cut
                for turn in its_turns:
                    if turn == "look":
                        await stream.look()
                    else:
                        stream.may_rest = turn == "rest"
                        if turn == "listen":
                            stream.reader.attend()
                    await trio.testing.wait_all_tasks_blocked()
            stream.may_rest = False
            stream.reader.attend()
            await trio.testing.wait_all_tasks_blocked()
            assert stream.error is None
            assert stream.contents == contents

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_reader, "READ_BUFFER_SIZE", SMALL_BUFFER)
        trio.run(run)


# ---- memory and time ----


def announced(size: int) -> bytes:
    return FRAME_HEADER.pack(size, 0, KIND)


async def test_what_is_only_announced_costs_little() -> None:
    """A kibibyte that begins a frame of 96 MiB; the buffer grows with what comes."""
    async with streaming(may_rest=False) as stream:
        await stream.send(announced(FRAME_BYTES_MAX) + bytes(1024))
        assert stream.memory.used_bytes == peer_reader.FIRST_BYTES
        sent = 1024
        while sent < 5 << 20:
            await stream.send(bytes(1 << 16))
            sent += 1 << 16
        assert stream.memory.used_bytes <= 2 * sent
        assert stream.error is None


async def test_a_frame_that_grew_arrives_as_it_was() -> None:
    content = bytes(range(256)) * (5 << 12)
    async with streaming(may_rest=False) as stream:
        data = memoryview(frame(content))
        while data:
            await stream.send(bytes(data[: 1 << 16]))
            data = data[1 << 16 :]
        assert stream.contents == [content]
        assert stream.memory.used_bytes == 0


async def test_who_holds_most_makes_room() -> None:
    memory = PeerMemory(4 << 20)
    async with streaming(may_rest=False) as large, streaming(may_rest=False) as small:
        for stream, size in ((large, 2 << 20), (small, 1 << 10)):
            stream.reader._memory = memory
            data = announced(FRAME_BYTES_MAX) + bytes(size)
            for start in range(0, len(data), 1 << 16):
                await stream.send(data[start : start + (1 << 16)])
        while large.error is None:
            await small.send(bytes(1 << 16))
            await trio.testing.wait_all_tasks_blocked()
        assert isinstance(large.error, peer_reader.PeerMemoryError)
        assert small.error is None
        with suppress(BrokenPipeError):  # it ended in the middle
            while small.error is None:
                await small.send(bytes(1 << 16))
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(small.error, peer_reader.PeerMemoryError), "alone it holds most"
        assert memory.used_bytes == 0


async def test_parts_are_charged_until_the_whole_is_handed_on() -> None:
    def part(content: bytes, *, is_last: bool) -> bytes:
        return frame(PART_HEADER.pack(KIND, is_last) + content, KIND_PART)

    async with streaming(may_rest=False) as stream:
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
    async with streaming(may_rest=False) as stream:
        await stream.send(frame(b"whole"))
        await trio.sleep(1_000)
        assert stream.error is None, "between frames there is none"
        await stream.send(begun)
        await trio.sleep(20)
        assert stream.error is None
        await trio.sleep(20)
        assert isinstance(stream.error, trio.TooSlowError)
