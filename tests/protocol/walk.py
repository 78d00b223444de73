"""Finds the counts and lengths in an encoded message, by reading it the slow and obvious way.

A second reader of our schemas, with none of the compiled decoders' tricks: it tells the fuzzer
where to plant absurd sizes, and the tests that it agrees with the decoders on where a body ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from raftmq.protocol.schema import SIZES, Field, Schema


@dataclass(frozen=True)
class Length:
    """Where a count or length stands: `size` bytes at `position`; varint if `compact`."""

    position: int
    size: int
    compact: bool


class Walk:
    """One walk over an encoded body."""

    def __init__(self, schema: Schema, body: bytes) -> None:
        self.body = body
        self.position = 0
        self.lengths: list[Length] = []
        self._struct(schema)

    def _varint(self) -> int:
        start, value, shift = self.position, 0, 0
        while True:
            byte = self.body[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 128:
                break
        self.lengths.append(Length(start, self.position - start, True))
        return value

    def _length(self, flexible: bool, size: int) -> int:
        if flexible:
            return self._varint() - 1
        raw = self.body[self.position : self.position + size]
        self.lengths.append(Length(self.position, size, False))
        self.position += size
        return int.from_bytes(raw, "big", signed=True)

    def _struct(self, schema: Schema) -> None:
        for field in schema.fields:
            self._field(schema.flexible, field)
        if not schema.flexible:
            return
        known = {field.tag: field for field in schema.tagged}
        for _ in range(self._varint()):
            tag, size = self._varint(), self._varint()
            stop = self.position + size
            if tag in known:
                self._field(True, known[tag])
                assert self.position == stop
            self.position = stop

    def _field(self, flexible: bool, field: Field) -> None:
        if field.array:
            for _ in range(max(self._length(flexible, 4), 0)):
                self._value(flexible, field)
        elif field.struct is not None and field.nullable:
            self.position += 1
            if self.body[self.position - 1] < 128:
                self._struct(field.struct)
        else:
            self._value(flexible, field)

    def _value(self, flexible: bool, field: Field) -> None:
        if field.wire in SIZES:
            self.position += SIZES[field.wire]
        elif field.struct is not None:
            self._struct(field.struct)
        else:
            length = self._length(flexible, 2 if field.wire == "string" else 4)
            self.position += max(length, 0)
