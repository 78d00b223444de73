"""Malformed requests of every (API, version): for decoders here, and for a running node.

Owns the ways to spoil a good body: cut it off, flip a bit, claim 2**31-1 or 2**32-1 where a count
or length stands, append rubbish, plant an unknown tag with an absurd size. Everything follows from
a seed. `malformed_requests` yields whole request frames, without their four bytes of size.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from raftmq.protocol import (
    ANNOUNCED,
    ApiKey,
    encode_request,
    encode_request_header,
    encode_response,
)
from raftmq.protocol.compile import schema_of
from raftmq.protocol.wire import long_varint
from tests.protocol.messages import KIO_FROM, RandomChooser, message
from tests.protocol.walk import Length, Walk

ABSURD = (0x7FFFFFFF, 0xFFFFFFFF)


def every_version() -> Iterator[tuple[ApiKey, int]]:
    """All announced (API, version) that are served."""
    for api, (low, high) in ANNOUNCED.items():
        for version in range(max(low, KIO_FROM.get(api, low)), high + 1):
            yield api, version


def good_body(api: ApiKey, version: int, direction: str, seed: int, *, items_max: int = 2) -> bytes:
    """A well-formed body of random content."""
    random = Random(f"{int(api)}/{version}/{direction}/{seed}")
    struct, _ = message(api, version, direction, RandomChooser(random), items_max=items_max)
    encode = encode_request if direction == "request" else encode_response
    return encode(api, version, struct)


def truncated(body: bytes, random: Random, count: int) -> Iterator[bytes]:
    """The body cut off at `count` places (all places if it is short)."""
    stops: range | list[int] = range(len(body))
    if len(body) > count:
        stops = sorted(random.sample(range(len(body)), count))
    for stop in stops:
        yield body[:stop]


def bit_flipped(body: bytes, random: Random, count: int) -> Iterator[bytes]:
    """The body with one bit changed, `count` times."""
    for _ in range(count if body else 0):
        spoiled = bytearray(body)
        spoiled[random.randrange(len(body))] ^= 1 << random.randrange(8)
        yield bytes(spoiled)


def count_bombed(api: ApiKey, version: int, direction: str, body: bytes) -> Iterator[bytes]:
    """The body with each of its counts and lengths in turn set to something absurd."""
    walk = Walk(schema_of(api, version, direction), body)  # type: ignore[arg-type]
    assert walk.position == len(body), "the walk and the encoder disagree"
    for length in walk.lengths:
        for absurd in ABSURD:
            yield with_length(body, length, absurd)


def with_length(body: bytes, length: Length, value: int) -> bytes:
    """The body with another number where a count or length stands."""
    if length.compact:
        raw = long_varint(value)
    else:
        raw = value.to_bytes(4, "big")[-length.size :]
        if length.size == 2:
            raw = (0x7FFF if value == ABSURD[0] else 0xFFFF).to_bytes(2, "big")
    return body[: length.position] + raw + body[length.position + length.size :]


def rubbish(random: Random, count: int) -> Iterator[bytes]:
    """Random bytes, and the bytes that made another implementation abort."""
    yield b"\xff\xff\xff\xff\x0f" + bytes(20)
    for _ in range(count):
        yield random.randbytes(random.randrange(64))


def malformed_bodies(
    api: ApiKey, version: int, direction: str = "request", *, seed: int = 0, variants: int = 12
) -> Iterator[bytes]:
    """Bodies spoiled in every way; some may still decode, as something else."""
    random = Random(f"spoil/{int(api)}/{version}/{direction}/{seed}")
    body = good_body(api, version, direction, seed)
    yield from truncated(body, random, variants)
    yield from bit_flipped(body, random, variants)
    yield from count_bombed(api, version, direction, body)
    yield from rubbish(random, 3)


def malformed_requests(
    api: ApiKey, version: int, *, seed: int = 0, variants: int = 12
) -> Iterator[bytes]:
    """Request frames, without size, whose header is good and whose body is not, and worse."""
    header = encode_request_header(api, version, seed, "fuzz")
    for body in malformed_bodies(api, version, seed=seed, variants=variants):
        yield header + body
    for stop in range(len(header)):
        yield header[:stop]
    yield header[:8] + b"\x7f\xff" + header[10:]  # a client id of 32,767 bytes
    yield header[:-1] + b"\xff\xff\xff\xff\x0f"  # four billion tagged fields, where flexible
