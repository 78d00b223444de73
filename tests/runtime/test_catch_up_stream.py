"""The stream for peers that are far behind: frames from files, apart from everything else."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from crc32c import crc32c

from raftmq.log.model import FileSpan
from raftmq.ports import File
from raftmq.raft.messages import StoredChunk
from raftmq.replication.multiraft import Stream
from raftmq.runtime import peer_links, peer_streams
from raftmq.runtime.disk import RealDisk
from raftmq.runtime.peer_links import KIND_RAFT
from raftmq.runtime.peer_streams import KIND_STORED
from raftmq.types import NodeId
from tests.runtime import test_peer_links
from tests.runtime.test_peer_links import introduce, running

TWO = NodeId(2)


class Node(test_peer_links.Node):
    @property
    def socket(self) -> socket.socket | None:
        """Of the catch-up stream to node 2."""
        return self.links._streams[TWO, Stream.CATCH_UP].sock


def file_of(folder: Path, data: bytes) -> File:
    path = folder / "segment"
    path.write_bytes(data)
    return RealDisk().open(str(path))


def chunk(file: File, position: int, size: int) -> StoredChunk:
    data = file.pread(size, position)
    return StoredChunk((), size, FileSpan(file, position, size), (size,), crc32c(data))


async def connected(a: Node) -> None:
    """Until all that node dialled stands: each stream on its own, in no order."""
    await a.until(lambda: a.links.is_connected(TWO) and a.socket is not None)


async def test_bytes_of_a_file_follow_their_head(tmp_path: Path) -> None:
    a, b = Node(1, queue_bytes_max=8 << 20), Node(2)
    introduce(a, b)
    data = bytes(range(256)) * 12_000
    file = file_of(tmp_path, data)
    async with running(a, b):
        await connected(a)
        assert a.links.send_stored(TWO, [b"he", b"ad"], chunk(file, 7, 3_000_000))
        assert a.links.send_stored(TWO, [b"bare"], StoredChunk((), 4))
        assert a.links.send_stored(TWO, [b"head"], chunk(file, 0, 10))
        await b.until(lambda: len(b.frames) == 3)
        assert [kind for _, kind, _ in b.frames] == [KIND_STORED] * 3
        bodies = [body for *_, body in b.frames]
        assert bodies == [b"head" + data[7:3_000_007], b"bare", b"head" + data[:10]]
        assert a.links.counts(TWO, Stream.CATCH_UP).queued_bytes == 0


async def test_what_is_not_in_memory_is_read_by_a_worker_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    data = b"x" * 300_000
    file = file_of(tmp_path, data)
    warmed: list[tuple[int, int]] = []
    monkeypatch.setattr(peer_streams, "is_warm", lambda *_: False)
    monkeypatch.setattr(
        peer_streams, "warm", lambda _file, position, size: warmed.append((position, size))
    )
    async with running(a, b):
        await connected(a)
        assert a.links.send_stored(TWO, [b"head"], chunk(file, 0, len(data)))
        await b.until(lambda: b.frames)
    assert warmed[0] == (0, 300_000)


async def test_damage_on_the_way_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    """Also in base offset and leader epoch, which no batch's own checksum covers."""
    a, b = Node(1), Node(2)
    introduce(a, b)
    file = file_of(tmp_path, b"0123456789")
    async with running(a, b):
        await connected(a)
        wrong = StoredChunk((), 10, FileSpan(file, 0, 10), (10,), crc32c(b"0123456788"))
        first = a.socket
        assert a.links.send_stored(TWO, [b"head"], wrong)
        await a.until(lambda: a.socket is not first)
        await connected(a)
        assert a.links.send_stored(TWO, [b"head"], chunk(file, 0, 10))
        await b.until(lambda: b.frames)
        assert b.frames == [(1, KIND_STORED, b"head0123456789")]


async def test_a_file_that_ends_early_ends_the_connection(tmp_path: Path) -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    file = file_of(tmp_path, b"0123456789")
    async with running(a, b):
        await connected(a)
        too_long = StoredChunk((), 20, FileSpan(file, 0, 20), (20,), 0)
        first = a.socket
        assert a.links.send_stored(TWO, [b"head"], too_long)
        await a.until(lambda: a.socket is not first)
        assert b.frames == []


async def test_a_full_stream_refuses_and_live_frames_pass_it(tmp_path: Path) -> None:
    """Megabytes for somebody who does not read them delay no live append."""
    a, b = Node(1, queue_bytes_max=20 << 20), Node(2)
    introduce(a, b)
    data = b"y" * (1 << 20)
    file = file_of(tmp_path, data)
    piece = chunk(file, 0, len(data))
    async with running(a, b):
        await connected(a)
        sent = 0
        while a.links.has_room_for_stored(TWO, len(data)):
            assert a.links.send_stored(TWO, [b"head"], piece)
            sent += 1
        assert sent == 3, "a slow line must not have seconds of it queued: see CHUNKS_BYTES_MAX"
        assert not a.links.send_stored(TWO, [b"head"], piece)
        assert a.links.counts(TWO, Stream.CATCH_UP).dropped_frames == 1
        assert a.links.send(TWO, KIND_RAFT, [b"live"])
        await b.until(lambda: (1, KIND_RAFT, b"live") in b.frames)
        await b.until(lambda: len(b.frames) == sent + 1)
        assert b.frames.index((1, KIND_RAFT, b"live")) < sent


async def test_a_chunk_that_exceeds_the_bound_leaves_alone(tmp_path: Path) -> None:
    """A batch may be as large as its topic allows: it must come through sometime."""
    a, b = Node(1, queue_bytes_max=1 << 20), Node(2)
    introduce(a, b)
    data = b"w" * (9 << 20)
    file = file_of(tmp_path, data)
    async with running(a, b):
        await connected(a)
        assert a.links.has_room_for_stored(TWO, len(data))
        assert a.links.send_stored(TWO, [b"head"], chunk(file, 0, len(data)))
        assert not a.links.has_room_for_stored(TWO, 1)
        await b.until(lambda: b.frames)
        await a.until(lambda: a.links.has_room_for_stored(TWO, 1))


async def test_little_of_what_is_unsent_waits_in_the_kernel() -> None:
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await connected(a)
        assert a.socket is not None
        unsent = a.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        # Of several segments in any case: the tail of a sendfile waits for more to fill one.
        assert 256 << 10 <= unsent <= peer_streams.CHUNKS_BYTES_MAX


async def test_nothing_waits_for_a_peer_that_is_not_there(tmp_path: Path) -> None:
    a, b = Node(1), Node(2)
    a.links.set_addresses({TWO: b.address})
    assert not a.links.has_room_for_stored(TWO, 1)
    assert not a.links.send_stored(TWO, [b"head"], chunk(file_of(tmp_path, b"z" * 100), 0, 100))
    assert a.links.counts(TWO, Stream.CATCH_UP).dropped_frames == 1
    a.listener.close()
    b.listener.close()


async def test_what_is_too_large_for_a_frame_comes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_links, "PARTED_BYTES_MIN", 1_000)
    monkeypatch.setattr(peer_links, "PART_BYTES", 300)
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await connected(a)
        large = bytes(range(250)) * 5
        assert a.links.send(TWO, KIND_RAFT, [large[:900], large[900:]])
        # One after the other: what waits of a large one is beyond the bound of the queue.
        assert not a.links.send(TWO, KIND_RAFT, [large])
        await b.until(lambda: b.frames)
        await a.until(lambda: a.links.counts(TWO, Stream.CATCH_UP).queued_bytes == 0)
        assert a.links.send(TWO, KIND_RAFT, [b"x" * 1_001])
        assert a.links.send(TWO, KIND_RAFT, [b"small"])
        await b.until(lambda: len(b.frames) == 3)
        kinds = {kind for _, kind, _ in b.frames}
        assert kinds == {KIND_RAFT}
        assert {body for *_, body in b.frames} == {large, b"x" * 1_001, b"small"}


async def test_parts_without_end_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_links, "PARTED_BYTES_MIN", 1_000)
    monkeypatch.setattr(peer_links, "PART_BYTES", 300)
    a, b = Node(1), Node(2)
    introduce(a, b)
    async with running(a, b):
        await connected(a)
        first = a.socket
        assert a.links.send(TWO, KIND_RAFT, [b"x" * 3_000])
        monkeypatch.setattr(peer_streams, "WHOLE_BYTES_MAX", 2_000)
        await a.until(lambda: a.socket is not first)
        assert b.frames == []
