"""However a stream is cut, the frames that come out are the frames that went in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq_client.core.connection import FrameReader


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> list[bytes]:
    frames: list[bytes] = []
    position = 0
    turn = 0
    while position < len(data):
        buffer = reader.buffer()
        assert len(buffer) > 0
        size = min(len(buffer), cuts[turn % len(cuts)], len(data) - position)
        buffer[:size] = data[position : position + size]
        frames.extend(bytes(frame) for frame in reader.received(size))
        position += size
        turn += 1
    return frames


sizes = st.one_of(st.integers(0, 100), st.sampled_from([32_000, 40_000, 65_532, 70_000, 200_000]))

cuts_of_a_stream = st.lists(st.integers(1, 100), max_size=8).map(
    lambda cuts: [*cuts, 100_000, 7_000]  # now and then a large piece, so that it ends soon
)


@settings(deadline=None)
@given(st.lists(sizes, max_size=12), cuts_of_a_stream)
def test_frames_survive_any_cutting(frame_sizes: list[int], cuts: list[int]) -> None:
    frames = [bytes([i]) * size for i, size in enumerate(frame_sizes)]
    data = b"".join(struct.pack(">i", len(frame)) + frame for frame in frames)
    assert feed(FrameReader(), data, cuts) == frames


def receive(reader: FrameReader, content: bytes) -> memoryview:
    """One frame, as it comes from a socket."""
    data = struct.pack(">i", len(content)) + content
    position = 0
    while True:
        buffer = reader.buffer()
        size = min(len(buffer), len(data) - position, 50_000)
        buffer[:size] = data[position : position + size]
        buffer.release()
        position += size
        for frame in reader.received(size):
            return frame


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([40_000, 100_000, 300_000]), st.integers(0, 5)), max_size=30)
)
def test_a_frame_that_is_looked_into_is_not_written_again(turns: list[tuple[int, int]]) -> None:
    reader = FrameReader()
    held: list[tuple[bytes, memoryview]] = []
    for number, (size, dropped) in enumerate(turns):
        content = bytes([number]) * size
        held.append((content, receive(reader, content)[7:]))  # a part of it is enough
        if dropped < len(held):
            del held[dropped]
        assert all(view == content[7:] for content, view in held)


def test_the_memory_of_a_frame_is_used_again_and_not_much_of_it_is_kept() -> None:
    reader = FrameReader()
    first = receive(reader, bytes(300_000)).obj
    assert receive(reader, bytes(290_000)).obj is first
    views = [receive(reader, bytes(300_000)) for _ in range(20)]
    assert len({id(view.obj) for view in views}) == 20
    views.clear()
    assert sum(map(len, reader._kept)) <= 4 * 400_000
    huge = receive(reader, bytes(5 << 20)).obj
    assert all(kept is not huge for kept in reader._kept)


@pytest.mark.parametrize("size", [-1, -(2**31), 101], ids=["minus one", "least", "over the limit"])
def test_impossible_sizes_are_refused_before_anything_is_allocated(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        feed(FrameReader(frame_bytes_max=100), struct.pack(">i", size), [4])
