"""How many files a produce crosses: `python -m benchmarks.crossings [--runs N] [--pairs]`.

Three real nodes in this process, over sockets and disks; one record with `acks=all` at a time, each
sent after the last was acknowledged. From the request to its answer, a profile hook sees each call
of a function of `raftmq/`. A crossing is a call from a function of one file directly into one
of another; threads of the flushers count too. Ticks, heartbeats and whatever else a node does
meanwhile are in some of the runs, so the run with the fewest crossings is the one that counts.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import trio
from attrs import define, field

import raftmq
from raftmq.config import Address, NodeConfig, PeerAddress
from raftmq.logs import configure_logs
from raftmq.node.node import Node
from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_response,
    encode_request,
    encode_request_header,
    frame,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)
from raftmq.records import NewRecord, build_batch

ROOT: Final = f"{Path(raftmq.__file__).parent}/"
TOPIC: Final = "crossings"
CREATE_TOPICS_VERSION: Final = 5
METADATA_VERSION: Final = 8
PRODUCE_VERSION: Final = 8
TRIES_MAX: Final = 600
"""Of a question whose answer is awaited, a tenth of a second apart."""


@define
class Crossings:
    """What one request crossed."""

    files: set[str] = field(factory=set)
    pairs: Counter[tuple[str, str]] = field(factory=Counter)

    @property
    def count(self) -> int:
        """All crossings."""
        return self.pairs.total()


class Counting:
    """The profile hook; it counts while a request is under way."""

    def __init__(self) -> None:
        self._now: Crossings | None = None

    def begin(self) -> None:
        """Count from here on."""
        self._now = Crossings()

    def end(self) -> Crossings:
        """What was crossed since `begin`."""
        now, self._now = self._now, None
        assert now is not None
        return now

    def __call__(self, called: FrameType, event: str, _argument: Any) -> None:
        now = self._now
        if now is None or event != "call":
            return
        to = own_file(called.f_code)
        if to is None:
            return
        now.files.add(to)
        caller = called.f_back
        origin = None if caller is None else own_file(caller.f_code)
        if origin is not None and origin != to:
            now.pairs[origin, to] += 1


def own_file(code: CodeType) -> str | None:
    """The file below `raftmq/` that this code stands in; None of all other code."""
    name = code.co_filename
    return name[len(ROOT) :] if name.startswith(ROOT) else None


@contextmanager
def watched(counting: Counting) -> Iterator[None]:
    """The hook sees this thread, and all that begin meanwhile."""
    threading.setprofile(counting)
    sys.setprofile(counting)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


class Client:
    """Raw requests on one connection, one at a time; left as a context manager, it hangs up."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._stream.aclose()

    async def ask(self, api: ApiKey, version: int, body: bytes) -> memoryview:
        """The body of the answer."""
        request = frame(encode_request_header(api, version, 1, "crossings") + body)
        await self._stream.send_all(request)
        size = int.from_bytes(await self._receive(4))
        return memoryview(await self._receive(size))[4:]

    async def _receive(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = await self._stream.receive_some(size - len(got))
            assert more, "the node hung up"
            got += more
        return got


async def connect(port: int) -> Client:
    """To a node of this machine."""
    return Client(await trio.open_tcp_stream("127.0.0.1", port))


def listeners() -> list[socket.socket]:
    """Three bound sockets: of clients, peers, administrators."""
    opened = [socket.socket() for _ in range(3)]
    for sock in opened:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)
    return opened


@contextmanager
def nodes_in(folder: Path) -> Iterator[tuple[list[Node], list[int]]]:
    """Three nodes, and the ports of their clients."""
    with ExitStack() as opened:
        sockets = [[opened.enter_context(sock) for sock in listeners()] for _ in range(3)]
        ports = [[sock.getsockname()[1] for sock in three] for three in sockets]
        peers = tuple(PeerAddress(i, "127.0.0.1", three[1]) for i, three in enumerate(ports))
        nodes = []
        for i, (three, (client, peer, admin)) in enumerate(zip(sockets, ports, strict=True)):
            config = NodeConfig(
                node_id=i,
                data=folder / str(i),
                client_listener=Address("127.0.0.1", client),
                peer_listener=Address("127.0.0.1", peer),
                admin_listener=Address("127.0.0.1", admin),
                peers=peers,
                formation_wait_ms=0,
                replicas_max=100,
            )
            of_clients, of_peers, of_admin = three
            nodes.append(Node(config, [of_clients], of_peers, of_admin))
        yield nodes, [client for client, _, _ in ports]


async def leader_of(client: Client) -> int:
    """Create the topic; the node that leads it, once there is one."""
    topic = Struct(name=TOPIC, num_partitions=1, replication_factor=3, assignments=[], configs=[])
    create = Struct(topics=[topic], timeout=10_000, validate_only=False)
    await client.ask(
        ApiKey.CREATE_TOPICS,
        CREATE_TOPICS_VERSION,
        encode_request(ApiKey.CREATE_TOPICS, CREATE_TOPICS_VERSION, create),
    )
    wanted = encode_request(ApiKey.METADATA, METADATA_VERSION, Struct(topics=[Struct(name=TOPIC)]))
    for _ in range(TRIES_MAX):
        body = await client.ask(ApiKey.METADATA, METADATA_VERSION, wanted)
        answer = decode_response(ApiKey.METADATA, METADATA_VERSION, body)
        partitions = answer.topics[0].partitions
        if partitions and partitions[0].leader_id >= 0 and len(partitions[0].isr_nodes) == 3:
            leader: int = partitions[0].leader_id
            return leader
        await trio.sleep(0.1)
    raise AssertionError("no leader")


def produce_body() -> bytes:
    """A Produce of one record, acks=all."""
    batch = build_batch([NewRecord(None, b"x" * 100)], timestamp=1_700_000_000_000)
    part = ProducePartition(0, memoryview(batch))
    request = ProduceRequest(None, -1, 30_000, [ProduceTopic(TOPIC, None, [part])])
    return b"".join(encode_produce_request(PRODUCE_VERSION, request))


async def measure(folder: Path, runs: int, counting: Counting) -> list[Crossings]:
    """The crossings of each of so many produces, the first (which warms up) left out."""
    measured = []
    with nodes_in(folder) as (nodes, ports):
        async with trio.open_nursery() as nursery:
            ready = [trio.Event() for _ in nodes]
            for node, event in zip(nodes, ready, strict=True):
                nursery.start_soon(node.run, event.set)
            for event in ready:
                await event.wait()
            async with await connect(ports[0]) as client:
                leader = await leader_of(client)
            async with await connect(ports[leader]) as client:
                body = produce_body()
                for _ in range(runs + 1):
                    measured.append(await crossings_of(client, body, counting))
            for node in nodes:
                node.stop()
    return measured[1:]


async def crossings_of(client: Client, body: bytes, counting: Counting) -> Crossings:
    """Of one produce, from its request to its answer."""
    counting.begin()
    answer = await client.ask(ApiKey.PRODUCE, PRODUCE_VERSION, body)
    crossed = counting.end()
    code = decode_produce_response(PRODUCE_VERSION, answer).topics[0].partitions[0].error_code
    assert code == 0, code
    return crossed


def fewest(runs: int) -> Crossings:
    """The crossings of the produce that had the fewest."""
    counting = Counting()
    with tempfile.TemporaryDirectory() as folder, watched(counting):
        return min(trio.run(measure, Path(folder), runs, counting), key=lambda one: one.count)


def main() -> None:
    """Print how many, and between which files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200, help="produces of which the best counts")
    parser.add_argument("--pairs", action="store_true", help="list every pair of files")
    options = parser.parse_args()
    configure_logs(log_format="console", level="error", cluster_id="", node_id=0)
    crossed = fewest(options.runs)
    say = sys.stdout.write
    say(f"{len(crossed.files)} files, {crossed.count} crossings between them\n")
    if options.pairs:
        for (origin, to), count in crossed.pairs.most_common():
            say(f"{count:>5}  {origin} -> {to}\n")
        say("".join(f"{name}\n" for name in sorted(crossed.files)))


if __name__ == "__main__":
    main()
