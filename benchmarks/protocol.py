"""Micro-benchmarks of the protocol layer: `python -m benchmarks.protocol [--repeat N]`.

Prints microseconds per call, the best of several rounds, beside kio's own reader and writer where
they do the same work. No network, no disk, one core; the garbage collector rests, as in timeit.
"""

from __future__ import annotations

import argparse
import gc
import io
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any
from uuid import UUID

from attrs import frozen
from kio.schema.fetch.v12.response import FetchResponse as KioFetchResponse
from kio.schema.metadata.v12.response import MetadataResponse as KioMetadataResponse
from kio.schema.produce.v9.request import ProduceRequest as KioProduceRequest
from kio.schema.produce.v9.response import ProduceResponse as KioProduceResponse
from kio.serial import entity_reader, entity_writer

from raftmq.protocol import (
    ApiKey,
    Framer,
    Struct,
    decode_request,
    decode_request_header,
    decode_response,
    encode_request,
    encode_request_header,
    encode_response,
    frame,
)
from raftmq.protocol.fetch import (
    FetchPartition,
    FetchPartitionResponse,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    FetchTopicResponse,
    decode_fetch_request,
    decode_fetch_response,
    encode_fetch_frame,
    encode_fetch_request,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProducePartitionResponse,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    ProduceTopicResponse,
    decode_produce_request,
    encode_produce_request,
    encode_produce_response,
)

MIB = 1 << 20
Row = tuple[str, Callable[[], Any], Callable[[], Any] | None]


@frozen
class FakeSpan:
    """Stands for bytes of the log."""

    size: int


def best_us(call: Callable[[], Any], repeat: int) -> float:
    """Microseconds per call: the best of `repeat` rounds of about 30 ms each."""
    call()
    started = time.perf_counter()
    call()
    number = max(int(0.03 / max(time.perf_counter() - started, 1e-7)), 1)
    best = float("inf")
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeat):
            started = time.perf_counter()
            for _ in range(number):
                call()
            best = min(best, (time.perf_counter() - started) / number)
    finally:
        gc.enable()
    return best * 1e6


def kio_writes(entity: Any) -> Callable[[], Any]:
    """kio's writer on one entity."""
    write = entity_writer(type(entity))
    return lambda: write(io.BytesIO(), entity)


def kio_reads(kind: Any, body: bytes) -> Any:
    """kio's reader on one body."""
    return entity_reader(kind)(body, 0)[0]


def produce_rows() -> list[Row]:
    """Produce: one partition, a mebibyte."""
    records = bytes(MIB)
    topic = ProduceTopic("events", None, [ProducePartition(3, memoryview(records))])
    request = ProduceRequest(None, -1, 30_000, [topic])
    body = b"".join(encode_produce_request(9, request))
    view = memoryview(body)
    part = ProducePartitionResponse(3, 0, 123_456)
    response = ProduceResponse([ProduceTopicResponse("events", None, [part])])
    answer = encode_produce_response(9, response)
    return [
        (
            "Produce v9 request, 1 MiB: decode",
            lambda: decode_produce_request(9, view),
            lambda: kio_reads(KioProduceRequest, body),
        ),
        ("  the same, compiled", lambda: decode_request(ApiKey.PRODUCE, 9, view), None),
        ("  the same: encode as pieces", lambda: encode_produce_request(9, request), None),
        (
            "Produce v9 response: encode",
            lambda: encode_produce_response(9, response),
            kio_writes(kio_reads(KioProduceResponse, answer)),
        ),
    ]


def fetch_rows() -> list[Row]:
    """Fetch: a session's request, and answers of one and ten spans."""
    by_name = FetchRequest(topics=[FetchTopic("events", None, [FetchPartition(0)])])
    by_id = FetchRequest(topics=[FetchTopic(None, UUID(int=7), [FetchPartition(0)])])
    old, new = encode_fetch_request(12, by_name), encode_fetch_request(17, by_id)

    def answer(spans: int, records: Any) -> FetchResponse:
        parts = [
            FetchPartitionResponse(number, 0, 100, 100, 0, records=[records])
            for number in range(spans)
        ]
        return FetchResponse([FetchTopicResponse("events", None, parts)])

    one, ten = answer(1, FakeSpan(MIB)), answer(10, FakeSpan(MIB))
    pieces: list[Any] = list(encode_fetch_frame(12, 1, answer(1, bytes(MIB))))
    body = b"".join(pieces)[9:]
    small: list[Any] = list(encode_fetch_frame(12, 1, answer(1, b"x")))
    kio_one = kio_reads(KioFetchResponse, b"".join(small)[9:])
    return [
        ("Fetch v12 request: decode", lambda: decode_fetch_request(12, old), None),
        ("Fetch v17 request: decode", lambda: decode_fetch_request(17, new), None),
        (
            "Fetch v12 response, one span: encode",
            lambda: encode_fetch_frame(12, 1, one),
            kio_writes(kio_one),
        ),
        ("Fetch v12 response, ten spans: encode", lambda: encode_fetch_frame(12, 1, ten), None),
        (
            "Fetch v12 response, 1 MiB: decode",
            lambda: decode_fetch_response(12, body),
            lambda: kio_reads(KioFetchResponse, body),
        ),
    ]


def metadata_answer(partitions: int) -> Struct:
    """A Metadata answer of one topic."""
    return Struct(
        brokers=[
            Struct(node_id=number, host="127.0.0.1", port=9092 + number, rack=None)
            for number in range(3)
        ],
        cluster_id="AAAAAAAAAAAAAAAAAAAAAA",
        controller_id=1,
        topics=[
            Struct(
                name="events",
                topic_id=UUID(int=5),
                partitions=[
                    Struct(
                        partition_index=number,
                        leader_id=1,
                        leader_epoch=3,
                        replica_nodes=[0, 1, 2],
                        isr_nodes=[0, 1, 2],
                    )
                    for number in range(partitions)
                ],
            )
        ],
    )


def other_rows() -> list[Row]:
    """Compiled codecs, headers and frames."""
    metadata = metadata_answer(1000)
    body = encode_response(ApiKey.METADATA, 12, metadata)
    heartbeat = Struct(group_id="group", generation_id=3, member_id="consumer-" + "x" * 36)
    beat = encode_request(ApiKey.HEARTBEAT, 4, heartbeat)
    header = memoryview(encode_request_header(ApiKey.METADATA, 12, 7, "rdkafka"))
    stream = frame(bytes(200)) * 100

    def cut() -> int:
        framer = Framer()
        framer.feed(stream)
        return sum(1 for _ in framer.frames())

    return [
        (
            "Metadata v12 response, 1,000 partitions: encode",
            lambda: encode_response(ApiKey.METADATA, 12, metadata),
            kio_writes(kio_reads(KioMetadataResponse, body)),
        ),
        (
            "Metadata v12 response, 1,000 partitions: decode",
            lambda: decode_response(ApiKey.METADATA, 12, body),
            lambda: kio_reads(KioMetadataResponse, body),
        ),
        ("Heartbeat v4 request: decode", lambda: decode_request(ApiKey.HEARTBEAT, 4, beat), None),
        ("Heartbeat v4 response: encode", lambda: encode_response(ApiKey.HEARTBEAT, 4, {}), None),
        ("request header v2: decode", lambda: decode_request_header(header), None),
        ("100 frames of 200 bytes: cut", cut, None),
    ]


def decoding_peak() -> tuple[int, int]:
    """Bytes of a full-sized request of tiny elements, and the most that decoding it takes."""
    topics = [Struct(name="t") for _ in range(100_000)]
    body = encode_request(ApiKey.METADATA, 12, Struct(topics=topics))
    decode_request(ApiKey.METADATA, 12, encode_request(ApiKey.METADATA, 12, {}))
    tracemalloc.start()
    decode_request(ApiKey.METADATA, 12, body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return len(body), peak


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=7, help="rounds per row (the best counts)")
    repeat = parser.parse_args().repeat
    say = sys.stdout.write
    say(f"{'us per call':<52}{'ours':>10}{'kio':>10}\n")
    for name, ours, kio in produce_rows() + fetch_rows() + other_rows():
        beside = f"{best_us(kio, repeat):>10.2f}" if kio else f"{'':>10}"
        say(f"{name:<52}{best_us(ours, repeat):>10.2f}{beside}\n")
    size, peak = decoding_peak()
    say(f"100,000 topics in {size} bytes: {peak / MIB:.1f} MiB while decoding\n")


if __name__ == "__main__":
    main()
