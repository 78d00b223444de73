"""100-byte records in batches built beforehand: what the servers take when no client is in the way.

Raw Produce requests of one batch each, without sequences, over one connection per leader with
several requests in flight. Each partition's batches go in turn.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import time
from collections import deque
from typing import Final

from attrs import define, field

from benchmarks.clients import create_topic, delete_topics, new_name
from benchmarks.errors import BenchmarkError
from benchmarks.plan import Metrics, Plan
from benchmarks.processes import MIB, CpuWatch
from benchmarks.targets import Target
from benchmarks.wire import batch_of, check_produced, produce_frame, settled_leaders

_SIZE: Final = struct.Struct(">i")
_STALL_S: Final = 30.0
_BATCH_MAX: Final = 1_048_588
"""`max.message.bytes` as both brokers have it by default."""


@define(eq=False)
class Stream:
    """One connection to a leader: frames still to send, and how many are not answered."""

    sock: socket.socket
    waiting: deque[bytes] = field(factory=deque)
    in_flight: int = 0
    sending: memoryview | None = None
    received: bytearray = field(factory=bytearray)

    def send(self, in_flight_max: int) -> bool:
        """Send what the socket takes; True while there is more to send now."""
        while True:
            if self.sending is None:
                if not self.waiting or self.in_flight >= in_flight_max:
                    return False
                self.sending = memoryview(self.waiting.popleft())
                self.in_flight += 1
            try:
                sent = self.sock.send(self.sending)
            except BlockingIOError:
                return True
            self.sending = self.sending[sent:] if sent < len(self.sending) else None

    def receive(self) -> int:
        """Take what came; how many requests were answered.

        Raises:
            BenchmarkError: one was refused, or the server hung up.
        """
        data = self.sock.recv(1 << 16)
        if not data:
            raise BenchmarkError("the server closed the connection")
        self.received += data
        answered = 0
        while len(self.received) >= 4:
            end = 4 + _SIZE.unpack_from(self.received)[0]
            if len(self.received) < end:
                break
            check_produced(bytes(self.received[4:end]))
            del self.received[:end]
            answered += 1
        self.in_flight -= answered
        return answered


def send_all(streams: list[Stream], in_flight_max: int) -> float:
    """Send everything and wait for every answer; seconds.

    Raises:
        BenchmarkError: refused, hung up, or no answer for long.
    """
    selector = selectors.DefaultSelector()
    left = sum(len(stream.waiting) for stream in streams)
    for stream in streams:
        selector.register(stream.sock, selectors.EVENT_READ, stream)
    started = time.perf_counter()

    def push(stream: Stream) -> None:
        wants = selectors.EVENT_READ
        if stream.send(in_flight_max):
            wants |= selectors.EVENT_WRITE
        if selector.get_key(stream.sock).events != wants:
            selector.modify(stream.sock, wants, stream)

    for stream in streams:
        push(stream)
    while left:
        ready = selector.select(_STALL_S)
        if not ready:
            raise BenchmarkError(f"no answer for {_STALL_S:.0f} s, {left} requests left")
        for key, events in ready:
            if events & selectors.EVENT_READ:
                left -= key.data.receive()
            push(key.data)
    seconds = time.perf_counter() - started
    selector.close()
    return seconds


def batches(target: Target, plan: Plan) -> Metrics:
    """Prebuilt batches of a mebibyte over all partitions."""
    topic = new_name("batches")
    create_topic(target, topic, plan.partitions)
    batch = batch_of(plan.batch_records, 100, os.urandom(64 << 10))
    if len(batch) > _BATCH_MAX:
        raise BenchmarkError(f"a batch of {len(batch)} bytes; {_BATCH_MAX} are taken")
    leaders = settled_leaders(target.bootstrap, topic)
    frames = {part: produce_frame(topic, part, batch) for part in leaders}
    streams: dict[tuple[str, int], Stream] = {}
    for address in leaders.values():
        if address not in streams:
            sock = socket.create_connection(address, timeout=30)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            streams[address] = Stream(sock)

    def queue(rounds: int) -> int:
        for _ in range(rounds):
            for part, address in leaders.items():
                streams[address].waiting.append(frames[part])
        return rounds * len(leaders)

    try:
        queue(4)
        send_all(list(streams.values()), plan.batches_in_flight)
        count = queue(max(1, plan.batch_count // len(leaders)))
        watch = CpuWatch(target.servers)
        seconds = send_all(list(streams.values()), plan.batches_in_flight)
        cpu, cores = watch.servers_s, watch.client_cores
    finally:
        for stream in streams.values():
            stream.sock.close()
    delete_topics(target, topic)
    size = count * len(batch)
    return {
        "batches_msgs_s": count * plan.batch_records / seconds,
        "batches_mb_s": size / MIB / seconds,
        "batches_cpu_s_per_gb": cpu / (size / 2**30),
        "batches_client_cores": cores,
    }
