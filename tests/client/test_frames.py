"""However a stream is cut, the frames that come out are the frames that went in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq_client.core.frames import FrameReader


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


@pytest.mark.parametrize("size", [-1, -(2**31), 101], ids=["minus one", "least", "over the limit"])
def test_impossible_sizes_are_refused_before_anything_is_allocated(size: int) -> None:
    with pytest.raises(RemoteProtocolError):
        feed(FrameReader(frame_bytes_max=100), struct.pack(">i", size), [4])
