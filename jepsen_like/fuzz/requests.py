"""Requests of every announced API, as frames of the client port.

The grammar is the product's own schemas. Names are drawn from those that exist, those that do not
and those that nobody should use; a client that does real work beside the fuzzer must use none of
them, since some of what is drawn here is a valid order (delete that topic).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from random import Random
from typing import Final

from jepsen_like.fuzz.spoil import Frame, Spot, spoiled
from raftmq.protocol import ANNOUNCED, ApiKey, encode_request_header
from raftmq.protocol.compile import schema_of
from raftmq.protocol.schema import FIXED, Field, Schema
from raftmq.protocol.wire import long_varint
from raftmq.records import NewRecord, build_batch

PRODUCE_FROM: Final = 3
"""Older versions are announced, and refused."""
ODD_NAMES: Final = (
    b"",
    b".",
    b"..",
    b"__consumer_offsets",
    b"__cluster_metadata",
    b"a" * 249,
    b"a" * 250,
    b"new\nline\x1b[2J",
    "漢字".encode(),
)
ITEMS_MAX: Final = 3


class RequestMaker:
    """Draws request frames; `names` are topics and groups that exist for it alone."""

    def __init__(self, names: Sequence[str], random: Random) -> None:
        self._names = [*(name.encode() for name in names), *ODD_NAMES]
        self._random = random
        self._versions = [
            (api, version)
            for api, (low, high) in ANNOUNCED.items()
            for version in range(max(low, PRODUCE_FROM if api is ApiKey.PRODUCE else low), high + 1)
        ]

    def draw(self) -> Frame:
        """One frame, its size in front, spoiled or whole."""
        random = self._random
        api, version = random.choice(self._versions)
        body = spoiled(self.body(api, version), random)
        client_id = random.choice((None, "fuzz", "fuzz\n\x1b[1m", "x" * 300))
        head = encode_request_header(api, version, random.getrandbits(31), client_id)
        data = head + body.data
        if random.random() < 0.1:
            data = spoiled(Frame("", data), random).data
        size = len(data)
        if random.random() < 0.1:
            size = random.choice((0, 7, size - 1, size + 1, 100 << 20, 0x7FFFFFFF, 0xFFFFFFFF))
        return Frame(body.label, struct.pack(">I", size & 0xFFFFFFFF) + data)

    def body(self, api: ApiKey, version: int) -> Frame:
        """The body of one request, well-formed, with its spots."""
        writer = _BodyWriter(self._names, self._random)
        writer.struct(schema_of(api, version, "request"))
        label = f"{api.name.lower()} v{version}"
        return Frame(label, bytes(writer.out), tuple(writer.spots))


class _BodyWriter:
    """Writes values of a schema and remembers where numbers stand."""

    def __init__(self, names: Sequence[bytes], random: Random) -> None:
        self.out = bytearray()
        self.spots: list[Spot] = []
        self._names = names
        self._random = random

    def struct(self, schema: Schema) -> None:
        """One part of a message."""
        for field in schema.fields:
            self._field(schema.flexible, field)
        if schema.flexible:
            self._tags(schema)

    def _tags(self, schema: Schema) -> None:
        chosen = [field for field in schema.tagged if self._random.random() < 0.3]
        self._varint(len(chosen))
        for field in chosen:
            assert field.tag is not None
            inner = _BodyWriter(self._names, self._random)
            inner._field(True, field)
            self._varint(field.tag)
            self._varint(len(inner.out))
            start = len(self.out)
            self.out += inner.out
            moved = (Spot(s.start + start, s.end + start, s.is_varint) for s in inner.spots)
            self.spots += moved

    def _varint(self, value: int) -> None:
        start = len(self.out)
        self.out += long_varint(value)
        self.spots.append(Spot(start, len(self.out), True))

    def _fixed(self, code: str, value: object) -> None:
        start = len(self.out)
        self.out += struct.pack(f">{code}", value)
        self.spots.append(Spot(start, len(self.out)))

    def _length(self, flexible: bool, code: str, length: int) -> None:
        if flexible:
            self._varint(length + 1)
        else:
            self._fixed(code, length)

    def _field(self, flexible: bool, field: Field) -> None:
        random = self._random
        if field.array:
            count = -1 if field.nullable and random.random() < 0.1 else random.randrange(ITEMS_MAX)
            self._length(flexible, "i", count)
            for _ in range(max(count, 0)):
                self._value(flexible, field)
        elif field.struct is not None and field.nullable:
            is_there = random.random() < 0.7
            self._fixed("b", 1 if is_there else -1)
            if is_there:
                self.struct(field.struct)
        else:
            self._value(flexible, field)

    def _value(self, flexible: bool, field: Field) -> None:
        random = self._random
        if field.struct is not None:
            self.struct(field.struct)
        elif field.wire == "uuid":
            self.out += random.choice((bytes(16), random.randbytes(16)))
        elif field.wire == "bool":
            self._fixed("?", random.random() < 0.5)
        elif field.wire == "float64":
            self._fixed("d", random.choice((0.0, 1.5, float("inf"), float("nan"))))
        elif field.wire in FIXED:
            self._integer(FIXED[field.wire])
        elif field.nullable and random.random() < 0.1:
            self._length(flexible, "h" if field.wire == "string" else "i", -1)
        else:
            data = self._text() if field.wire == "string" else self._blob()
            self._length(flexible, "h" if field.wire == "string" else "i", len(data))
            self.out += data

    def _integer(self, code: str) -> None:
        random = self._random
        bits = 8 * struct.calcsize(f">{code}")
        low, high = (
            (0, (1 << bits) - 1) if code.isupper() else (-1 << bits - 1, (1 << bits - 1) - 1)
        )
        value = random.choice((0, 0, 1, 1, -1, 3, 100, low, high, random.randint(low, high)))
        self._fixed(code, min(max(value, low), high))

    def _text(self) -> bytes:
        return self._random.choice(self._names)

    def _blob(self) -> bytes:
        random = self._random
        if random.random() < 0.3:
            return random.randbytes(random.randrange(64))
        keys = (None, b"", b"k" * 5)
        records = [
            NewRecord(random.choice(keys), random.randbytes(random.randrange(40)))
            for _ in range(random.randrange(1, 4))
        ]
        batch = bytes(build_batch(records, timestamp=1_700_000_000_000))
        return batch if random.random() < 0.5 else spoiled(Frame("", batch), random).data
