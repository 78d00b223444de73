"""Ways to spoil good bytes: what a fuzzer does to a frame once the grammar has written it.

A frame comes with its spots: where a count, a length or a number stands. Spoiling a spot reaches
places that random bytes never do, since all around it stays well-formed. Everything follows from
the generator that is handed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

from attrs import frozen

from raftmq.protocol.wire import long_varint

EDGES: Final = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
INT64_EDGES: Final = ((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 62, (1 << 31) - 1)
REPEATS_MAX: Final = 200


@frozen(slots=True)
class Spot:
    """A number within a frame: `[start, end)`, a varint where `is_varint`."""

    start: int
    end: int
    is_varint: bool = False


@frozen(slots=True)
class Frame:
    """Bytes and the spots in them; `label` says what they were before they were spoiled."""

    label: str
    data: bytes
    spots: tuple[Spot, ...] = ()


def spoiled(frame: Frame, random: Random) -> Frame:
    """The frame, spoiled once to three times; now and then it stays as it is."""
    data, label = frame.data, frame.label
    spots: Sequence[Spot] = frame.spots
    if random.random() < 0.15:
        return frame
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        way = random.choice(_WAYS)
        data = way(data, spots, random)
        label = f"{label} {way.__name__.strip('_')}"
        spots = ()  # positions moved
    return Frame(label, data)


def _number(data: bytes, spots: Sequence[Spot], random: Random) -> bytes:
    if not spots:
        return _flip(data, spots, random)
    spot = random.choice(spots)
    if spot.is_varint:
        raw = long_varint(random.choice((*EDGES, 1 << 34, 1 << 63)))
    else:
        size = spot.end - spot.start
        value = random.choice((*EDGES, *INT64_EDGES, random.getrandbits(8 * size)))
        raw = (value & ((1 << 8 * size) - 1)).to_bytes(size, "big")
    return data[: spot.start] + raw + data[spot.end :]


def _flip(data: bytes, _spots: Sequence[Spot], random: Random) -> bytes:
    if not data:
        return b"\xff"
    out = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8))):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def _cut(data: bytes, _spots: Sequence[Spot], random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _repeat(data: bytes, _spots: Sequence[Spot], random: Random) -> bytes:
    if not data:
        return data
    start = random.randrange(len(data))
    end = min(len(data), start + random.randrange(1, 64))
    times = random.randrange(2, REPEATS_MAX)
    return data[:start] + data[start:end] * times + data[end:]


def _insert(data: bytes, _spots: Sequence[Spot], random: Random) -> bytes:
    at = random.randrange(len(data) + 1)
    what = random.choice((random.randbytes(random.randrange(1, 32)), b"\xff" * 9, bytes(64)))
    return data[:at] + what + data[at:]


def _swap(data: bytes, _spots: Sequence[Spot], random: Random) -> bytes:
    if len(data) < 4:
        return data[::-1]
    a, b, c = sorted(random.sample(range(len(data) + 1), 3))
    return data[:a] + data[b:c] + data[a:b] + data[c:]


_WAYS: Final = (_number, _number, _number, _flip, _cut, _repeat, _insert, _swap)
