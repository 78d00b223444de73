"""Frames come out whole, however the stream was cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftmq.errors import RemoteProtocolError
from raftmq.protocol import Framer, check_frame_size, frame


@given(
    bodies=st.lists(st.binary(max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 300), max_size=12),
    tail=st.binary(max_size=3),
)
def test_split_anywhere(bodies: list[bytes], cuts: list[int], tail: bytes) -> None:
    stream = b"".join(frame(body) for body in bodies) + tail
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    framer = Framer()
    seen: list[bytes] = []
    for start, stop in pairwise(edges):
        framer.feed(memoryview(stream)[start:stop])
        seen += framer.frames()
    assert seen == bodies
    assert framer.pending_bytes == len(tail)


def test_byte_by_byte() -> None:
    framer = Framer()
    seen: list[bytes] = []
    for byte in frame(b"ab", memoryview(b"cd")) + frame() + frame(b"e"):
        framer.feed(bytes([byte]))
        seen += framer.frames()
    assert seen == [b"abcd", b"", b"e"]


def test_frames_may_be_taken_one_at_a_time() -> None:
    framer = Framer()
    framer.feed(frame(b"a") + frame(b"b"))
    frames = framer.frames()
    assert next(frames) == b"a"
    frames.close()  # type: ignore[attr-defined]
    assert list(framer.frames()) == [b"b"]


@pytest.mark.parametrize("size", [-1, -(1 << 31), 101, (1 << 31) - 1])
def test_sizes_that_may_not_be(size: int) -> None:
    framer = Framer(size_max=100)
    framer.feed(frame(b"good") + size.to_bytes(4, "big", signed=True))
    frames = framer.frames()
    assert next(frames) == b"good"
    with pytest.raises(RemoteProtocolError, match="the limit is 100"):
        next(frames)
    with pytest.raises(RemoteProtocolError):
        check_frame_size(size, 100)
    assert check_frame_size(100, 100) == 100
