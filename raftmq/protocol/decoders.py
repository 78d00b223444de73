"""Writes the source of a decoder for one schema, and compiles it.

Owns the shape of generated decoders: one function per message, nested parts inlined as loops,
runs of constant-width fields read by one `struct` call. Every count and length is compared with
the bytes left before anything is allocated for it, and every array element is charged to one
budget. What escapes a decoder is RemoteProtocolError or one of `wire.MALFORMED`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from typing import Any

from raftmq.protocol import wire
from raftmq.protocol.schema import (
    FIXED,
    SIZES,
    STRING_BYTES_MAX,
    Field,
    Schema,
    Struct,
    value_size_min,
)

Decoder = Callable[[memoryview, int], tuple[Struct, int]]
"""(body, elements_max) -> (message, position after it)."""

SlowDecoder = Callable[[memoryview, int], Generator[None, None, tuple[Struct, int]]]

StructClassOf = Callable[[str], type[Struct]]
"""The Struct class for a path of the message's schema."""


class _Source:
    """Lines of Python in the making, with the names that they refer to."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[str, Any] = {}
        self._counter = 0

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def fresh(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def bind(self, prefix: str, value: Any) -> str:
        name = self.fresh(prefix)
        self.names[name] = value
        return name


class _Run:
    """Consecutive constant-width values, read by one struct call when flushed."""

    def __init__(self, source: _Source) -> None:
        self._source = source
        self._letters = ""
        self._targets: list[str] = []
        self._after: list[str] = []

    def add(self, letter: str, target: str, after: str | None = None) -> None:
        self._letters += letter
        self._targets.append(target)
        if after is not None:
            self._after.append(after)

    def flush(self) -> None:
        if not self._letters:
            return
        out = self._source
        shape = struct.Struct(">" + self._letters)
        unpack = out.bind("unpack", shape.unpack_from)
        out(f"{', '.join(self._targets)}, = {unpack}(buf, pos)")
        out(f"pos += {shape.size}")
        for line in self._after:
            out(line)
        self._letters, self._targets, self._after = "", [], []


def build_decoder(schema: Schema, title: str, struct_class_of: StructClassOf) -> Decoder:
    """Compile the decoder of one message."""
    decoder: Decoder = _compile(_Source(), schema, title, struct_class_of)
    return decoder


def build_slow_decoder(schema: Schema, title: str, struct_class_of: StructClassOf) -> SlowDecoder:
    """As `build_decoder`, of a generator that yields after every so many array elements."""
    decoder: SlowDecoder = _compile(_Source(is_slow=True), schema, title, struct_class_of)
    return decoder


def _compile(out: _Source, schema: Schema, title: str, struct_class_of: StructClassOf) -> Any:
    out.names.update(
        new=object.__new__,
        text=str,
        blob=bytes,
        read_varint=wire.read_varint,
        skip_tags=wire.skip_tags,
        short=wire.short,
        too_many=wire.too_many,
        too_many_tags=wire.too_many_tags,
        bad_length=wire.bad_length,
        bad_tag=wire.bad_tag,
        to_uuid=wire.to_uuid,
        unpack_dynamic=struct.unpack_from,
    )
    out("pos = 0")
    out("end = len(buf)")
    if out.is_slow:
        out("turn = 0")
        out("if turn:")
        out("    yield")  # a generator, also where there is no array
    result = _emit_struct(out, schema, struct_class_of)
    out(f"return {result}, pos")
    source = "def decode(buf, left):\n" + "\n".join(out.lines) + "\n"
    exec(compile(source, f"<decoder of {title}>", "exec"), out.names)
    return out.names["decode"]


def _emit_struct(out: _Source, schema: Schema, struct_class_of: StructClassOf) -> str:
    """Emit the reading of one part; answers the variable that holds it."""
    variable = out.fresh("s")
    cls = out.bind("Class", struct_class_of(schema.path))
    out(f"{variable} = new({cls})")
    run = _Run(out)
    for field in schema.fields:
        target = f"{variable}.{field.name}"
        if field.is_fixed:
            _add_fixed(run, field, target)
            continue
        if not field.array and field.struct is not None:
            run.flush()
            _emit_nested(out, field, target, struct_class_of)
        else:
            length = _emit_length(out, run, schema, field)
            _emit_sized(out, schema, field, target, length, struct_class_of)
    run.flush()
    if schema.flexible:
        _emit_tags(out, schema, variable, struct_class_of)
    return variable


def _add_fixed(run: _Run, field: Field, target: str) -> None:
    after = f"{target} = to_uuid({target})" if field.wire == "uuid" else None
    run.add(FIXED[field.wire], target, after)


def _emit_nested(out: _Source, field: Field, target: str, struct_class_of: StructClassOf) -> None:
    """A single nested part; a nullable one is led by a byte, negative for null (KIP-893)."""
    assert field.struct is not None
    if not field.nullable:
        out(f"{target} = {_emit_struct(out, field.struct, struct_class_of)}")
        return
    out("pos += 1")
    out("if buf[pos - 1] > 127:")
    out(f"    {target} = None")
    out("else:")
    out.depth += 1
    out(f"{target} = {_emit_struct(out, field.struct, struct_class_of)}")
    out.depth -= 1


def _emit_length(out: _Source, run: _Run, schema: Schema, field: Field) -> str:
    """Emit the reading of a count or length; null is -1. Joins the open run where it can."""
    length = out.fresh("n")
    if schema.flexible:
        run.flush()
        _emit_varint(out, length)
        out(f"{length} -= 1")
    else:
        letter = "h" if field.wire == "string" and not field.array else "i"
        run.add(letter, length)
        run.flush()
    return length


def _emit_varint(out: _Source, target: str) -> None:
    out(f"{target} = buf[pos]")
    out("pos += 1")
    out(f"if {target} > 127:")
    out(f"    {target}, pos = read_varint(buf, pos, {target})")


def _emit_sized(
    out: _Source,
    schema: Schema,
    field: Field,
    target: str,
    length: str,
    struct_class_of: StructClassOf,
) -> None:
    """Emit the reading of a string, bytes or array whose count is in `length`."""
    out(f"if {length} < 0:")
    if field.nullable:
        # Kafka's readers take any negative number for null.
        out(f"    {target} = None")
    else:
        out(f"    bad_length({field.name!r}, {length})")
    out("else:")
    out.depth += 1
    if field.array:
        _emit_array(out, schema, field, target, length, struct_class_of)
    else:
        _emit_bytes(out, field, target, length)
    out.depth -= 1


def _emit_bytes(out: _Source, field: Field, target: str, length: str) -> None:
    if field.wire == "string":
        out(f"if {length} > {STRING_BYTES_MAX}:")
        out(f"    bad_length({field.name!r}, {length})")
    out(f"stop = pos + {length}")
    out("if stop > end:")
    out(f"    short({length}, end - pos)")
    read = {
        "string": "text(buf[pos:stop], 'utf-8')",
        "bytes": "blob(buf[pos:stop])",  # outlives the frame, so it must not hold on to it
        "records": "buf[pos:stop]",
    }[field.wire]
    out(f"{target} = {read}")
    out("pos = stop")


def _emit_array(
    out: _Source,
    schema: Schema,
    field: Field,
    target: str,
    count: str,
    struct_class_of: StructClassOf,
) -> None:
    """Emit the reading of `count` elements: first the checks, then the allocation."""
    least = value_size_min(schema.flexible, field)
    claimed = count if least == 1 else f"{count} * {least}"
    out(f"if {claimed} > end - pos:")
    out(f"    short({claimed}, end - pos)")
    out(f"left -= {count}")
    out("if left < 0:")
    out("    too_many()")
    assert field.wire != "uuid", "no announced schema has an array of UUIDs"
    if field.wire in FIXED:
        letter = FIXED[field.wire]
        out(f"{target} = [*unpack_dynamic(f'>{{{count}}}{letter}', buf, pos)]")
        out(f"pos += {count} * {SIZES[field.wire]}")
        return
    items = out.fresh("items")
    out(f"{target} = {items} = []")
    out(f"for _ in range({count}):")
    out.depth += 1
    if field.struct is not None:
        out(f"{items}.append({_emit_struct(out, field.struct, struct_class_of)})")
    else:
        element = out.fresh("v")
        scalar = Field(field.name, field.wire, False, False, None, None)
        run = _Run(out)
        length = _emit_length(out, run, schema, scalar)
        _emit_sized(out, schema, scalar, element, length, struct_class_of)
        out(f"{items}.append({element})")
    if out.is_slow:
        out("turn += 1")
        out(f"if turn % {wire.TURN_ELEMENTS} == 0:")
        out("    yield")
    out.depth -= 1


def _emit_tags(out: _Source, schema: Schema, variable: str, struct_class_of: StructClassOf) -> None:
    """Emit the tagged part: known tags are read, unknown ones skipped (KIP-482)."""
    for field in schema.tagged:
        _emit_tag_default(out, field, f"{variable}.{field.name}", struct_class_of)
    count = out.fresh("n")
    out(f"{count} = buf[pos]")
    out("pos += 1")
    out(f"if {count}:")
    out.depth += 1
    if not schema.tagged:
        out(f"pos = skip_tags(buf, pos, end, {count})")
        out.depth -= 1
        return
    out(f"if {count} > 127:")
    out(f"    {count}, pos = read_varint(buf, pos, {count})")
    out(f"if {count} > {wire.TAGS_MAX}:")
    out(f"    too_many_tags({count})")
    out(f"if {count} * 2 > end - pos:")
    out(f"    short({count} * 2, end - pos)")
    tag, stop = out.fresh("tag"), out.fresh("stop")
    out(f"for _ in range({count}):")
    out.depth += 1
    _emit_varint(out, tag)
    _emit_varint(out, stop)
    out(f"if {stop} > end - pos:")
    out(f"    short({stop}, end - pos)")
    out(f"{stop} += pos")
    for word, field in zip(["if"] + ["elif"] * len(schema.tagged), schema.tagged, strict=False):
        out(f"{word} {tag} == {field.tag}:")
        out.depth += 1
        _emit_tagged(out, schema, field, f"{variable}.{field.name}", struct_class_of)
        out(f"if pos != {stop}:")
        out(f"    bad_tag({tag})")
        out.depth -= 1
    out("else:")
    out(f"    pos = {stop}")
    out.depth -= 2


def _emit_tag_default(
    out: _Source, field: Field, target: str, struct_class_of: StructClassOf
) -> None:
    if field.array:
        out(f"{target} = []")
    elif field.struct is None:
        out(f"{target} = {field.default!r}")
    else:
        cls = out.bind("Class", struct_class_of(field.struct.path))
        out(f"{target} = new({cls})")
        for inner in field.struct.all_fields:
            _emit_tag_default(out, inner, f"{target}.{inner.name}", struct_class_of)


def _emit_tagged(
    out: _Source, schema: Schema, field: Field, target: str, struct_class_of: StructClassOf
) -> None:
    run = _Run(out)
    if field.is_fixed:
        _add_fixed(run, field, target)
        run.flush()
    elif not field.array and field.struct is not None:
        assert not field.nullable, "no schema has a nullable tagged struct"
        _emit_nested(out, field, target, struct_class_of)
    else:
        length = _emit_length(out, run, schema, field)
        _emit_sized(out, schema, field, target, length, struct_class_of)
