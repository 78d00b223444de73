"""Writes the source of an encoder for one schema, and compiles it.

Owns the shape of generated encoders: one function per message that appends pieces to a list.
An absent attribute takes the schema's default; an attribute that no version of the schema knows,
a value of the wrong type and a number that does not fit are errors of our own, found in a second,
slow walk (`explain`) that names the field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from typing import Any
from uuid import UUID

from raftmq.protocol import wire
from raftmq.protocol.schema import FIXED, STRING_BYTES_MAX, Field, Schema, Struct

Encoder = Callable[[Any], bytes]
SlowEncoder = Callable[[Any], Generator[None, None, bytes]]
CheckNames = Callable[[str, Mapping[str, Any]], None]
"""(path, attributes): refuses names that no version of the schema has."""

# "B" for bool: it takes True, False, 1 and 0 and refuses None and text, unlike "?".
_LETTERS = {**FIXED, "bool": "B"}


class _Source:
    """Lines of Python in the making, and the open run of constant-width values."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.is_slow = is_slow
        self.lines: list[str] = []
        self.depth = 1
        self.names: dict[str, Any] = {}
        self._counter = 0
        self._letters = ""
        self._values: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def fresh(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def bind(self, prefix: str, value: Any) -> str:
        name = self.fresh(prefix)
        self.names[name] = value
        return name

    def constant(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | str | float):
            return repr(value)
        return "()" if value == () else self.bind("constant", value)

    def pack(self, letter: str, value: str) -> None:
        self._letters += letter
        self._values.append(value)

    def flush(self) -> None:
        if self._letters:
            pack = self.bind("pack", struct.Struct(">" + self._letters).pack)
            self(f"write({pack}({', '.join(self._values)}))")
            self._letters, self._values = "", []


def build_encoder(
    schema: Schema, title: str, names_of: Callable[[str], set[str]], check_names: CheckNames
) -> Encoder:
    """Compile the encoder of one message.

    `names_of(path)` is the set, shared and growing, of attribute names known to be valid there.
    """
    encoder: Encoder = _compile(_Source(), schema, title, names_of, check_names)
    return encoder


def build_slow_encoder(
    schema: Schema, title: str, names_of: Callable[[str], set[str]], check_names: CheckNames
) -> SlowEncoder:
    """As `build_encoder`, of a generator that yields after every so many array elements."""
    encoder: SlowEncoder = _compile(_Source(is_slow=True), schema, title, names_of, check_names)
    return encoder


def _compile(
    out: _Source,
    schema: Schema,
    title: str,
    names_of: Callable[[str], set[str]],
    check_names: CheckNames,
) -> Any:
    out.names.update(
        names_of=names_of,
        check_names=check_names,
        attributes=attributes,
        Struct=Struct,
        varint=wire.varint,
        VARINTS=wire.VARINTS,
        from_uuid=wire.from_uuid,
        pack_dynamic=struct.pack,
        refuse=_refuse,
    )
    out("pieces = []")
    out("write = pieces.append")
    if out.is_slow:
        out("turn = 0")
        out("whole = []")  # joined so far: to join a million pieces at once takes too long
        out("if turn:")
        out("    yield")  # a generator, also where there is no array
    _emit_struct(out, schema, "message")
    out.flush()
    out("return b''.join(whole + pieces)" if out.is_slow else "return b''.join(pieces)")
    source = "def encode(message):\n" + "\n".join(out.lines) + "\n"
    exec(compile(source, f"<encoder of {title}>", "exec"), out.names)
    return out.names["encode"]


def attributes(value: Any) -> Mapping[str, Any]:
    """The attributes of a Struct, or a mapping itself."""
    if isinstance(value, Struct):
        return value.__dict__
    if isinstance(value, dict) or isinstance(value, Mapping):  # noqa: SIM101  # an ABC asks long
        return value
    raise TypeError(f"expected a Struct or a mapping, got {type(value).__name__}")


def _refuse(what: str) -> None:
    raise TypeError(what)


def _emit_struct(out: _Source, schema: Schema, value: str) -> None:
    """Emit the writing of one part that is in the variable `value`."""
    bag = out.fresh("d")
    names = out.bind("NAMES", out.names["names_of"](schema.path))
    out(f"{bag} = {value}.__dict__ if isinstance({value}, Struct) else attributes({value})")
    out(f"if not {names}.issuperset({bag}):")
    out(f"    check_names({schema.path!r}, {bag})")
    get = out.fresh("get")
    out(f"{get} = {bag}.get")
    for field in schema.fields:
        default = out.constant(() if field.array and field.default == () else field.default)
        # No announced schema requires a struct outside its tagged part.
        assert field.struct is None or field.array or field.nullable
        _emit_value(out, schema, field, f"{get}({field.name!r}, {default})")
    if schema.flexible:
        _emit_tags(out, schema, get)


def _emit_value(out: _Source, schema: Schema, field: Field, expression: str) -> None:
    """Emit the writing of one untagged field's value."""
    if field.array:
        _emit_array(out, schema, field, expression)
    elif field.wire == "uuid":
        out.pack("16s", f"from_uuid({expression})")
    elif field.wire in FIXED:
        out.pack(_LETTERS[field.wire], expression)
    elif field.struct is not None:
        _emit_nested(out, field, expression)
    else:
        value = out.fresh("v")
        out(f"{value} = {expression}")
        _emit_bytes(out, schema.flexible, field, value)


def _emit_nested(out: _Source, field: Field, expression: str) -> None:
    assert field.struct is not None
    out.flush()
    value = out.fresh("v")
    out(f"{value} = {expression}")
    if not field.nullable:
        _emit_struct(out, field.struct, value)
        return
    out(f"if {value} is None:")
    out("    write(b'\\xff')")
    out("else:")
    out.depth += 1
    out("write(b'\\x01')")
    _emit_struct(out, field.struct, value)
    out.flush()
    out.depth -= 1


def _emit_bytes(out: _Source, flexible: bool, field: Field, value: str) -> None:
    """Emit a string, bytes or records in the variable `value`; null is length -1."""
    length = out.fresh("n")
    if field.nullable:
        out(f"if {value} is None:")
        out(f"    {value} = b''")
        out(f"    {length} = -1")
        out("else:")
        out.depth += 1
    if field.wire == "string":
        out(f"{value} = {value}.encode()")
    out(f"{length} = len({value})")
    if field.nullable:
        out.depth -= 1
    if field.wire == "string" and flexible:
        out(f"if {length} > {STRING_BYTES_MAX}:")
        out(f"    refuse('{field.name} is longer than {STRING_BYTES_MAX} bytes')")
    _emit_length(out, flexible, length, "h" if field.wire == "string" else "i")
    out(f"write({value})")


def _emit_length(out: _Source, flexible: bool, length: str, letter: str) -> None:
    if flexible:
        out.flush()
        out(f"write(VARINTS[{length} + 1] if {length} < 1023 else varint({length} + 1))")
    else:
        out.pack(letter, length)
        out.flush()


def _emit_array(out: _Source, schema: Schema, field: Field, expression: str) -> None:
    out.flush()
    items = out.fresh("items")
    out(f"{items} = {expression}")
    if field.nullable:
        out(f"if {items} is None:")
        null = b"\x00" if schema.flexible else b"\xff\xff\xff\xff"
        out(f"    write({null!r})")
        out("else:")
        out.depth += 1
    count = out.fresh("n")
    out(f"{count} = len({items})")
    _emit_length(out, schema.flexible, count, "i")
    assert field.wire != "uuid", "no announced schema has an array of UUIDs"
    if field.wire in FIXED:
        letter = _LETTERS[field.wire]
        out(f"write(pack_dynamic(f'>{{{count}}}{letter}', *{items}))")
    else:
        if field.wire == "string":  # whose letters would pass for strings
            out(f"if isinstance({items}, str):")
            out(f"    refuse('{field.name}: expected a list or tuple, got str')")
        item = out.fresh("item")
        out(f"for {item} in {items}:")
        out.depth += 1
        if field.struct is not None:
            _emit_struct(out, field.struct, item)
        else:
            scalar = Field(field.name, field.wire, False, False, None, None)
            _emit_value(out, schema, scalar, item)
        out.flush()
        if out.is_slow:
            out("turn += 1")
            out(f"if turn % {wire.TURN_ELEMENTS} == 0:")
            out("    whole.append(b''.join(pieces))")
            out("    pieces.clear()")
            out("    yield")
        out.depth -= 1
    if field.nullable:
        out.depth -= 1


def _emit_tags(out: _Source, schema: Schema, get: str) -> None:
    """Emit the tagged part: ascending tags, those that equal their default left out (KIP-482)."""
    out.flush()
    if not schema.tagged:
        out("write(b'\\x00')")
        return
    count, tags = out.fresh("n"), out.fresh("tags")
    out(f"{count} = 0")
    out(f"{tags} = []")
    for field in schema.tagged:
        default = out.constant(_default_value(field))
        value, saved, body = out.fresh("v"), out.fresh("write"), out.fresh("body")
        out(f"{value} = {get}({field.name!r}, {default})")
        test = f"{value}" if field.array else f"{value} != {default}"
        out(f"if {test}:")
        out.depth += 1
        out(f"{saved} = write")
        out(f"{body} = []")
        out(f"write = {body}.append")
        present = Field(
            field.name, field.wire, field.array, False, None, field.default, field.struct
        )
        _emit_value(out, schema, present, value)
        out.flush()
        out(f"write = {saved}")
        out(f"{body} = b''.join({body})")
        _emit_write_tag(out, schema, field, count, tags, body)
        out.depth -= 1
    out(f"write(varint({count}))")
    out(f"pieces.extend({tags})" if schema.path == "" else f"write(b''.join({tags}))")


def _emit_write_tag(
    out: _Source, schema: Schema, field: Field, count: str, tags: str, body: str
) -> None:
    assert field.tag is not None
    lines = [f"{count} += 1", f"{tags} += (varint({field.tag}), varint(len({body})), {body})"]
    if field.struct is not None and not field.array:
        # A struct is compared with its default by its bytes: it may be a Struct or a mapping,
        # with some attributes absent.
        blank = build_encoder(field.struct, "default", lambda _: set(), lambda *_: None)({})
        lines = [f"if {body} != {out.bind('blank', blank)}:", *("    " + line for line in lines)]
    for line in lines:
        out(line)


def _default_value(field: Field) -> Any:
    return None if field.struct is not None and not field.array else field.default


_RANGES = {
    "bool": (0, 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}


def explain(schema: Schema, message: Any) -> str | None:
    """The first thing in `message` that the schema cannot carry, in words; None if all is well."""
    return next(_faults(schema, message, ""), None)


def _faults(schema: Schema, message: Any, where: str) -> Iterator[str]:
    known = isinstance(message, Struct | Mapping)
    if not known:
        kind = type(message).__name__
        yield f"{where or 'message'}: expected a Struct or a mapping, got {kind}"
    bag = attributes(message) if known else {}
    for field in schema.all_fields:
        if field.name not in bag:
            continue
        value = bag[field.name]
        place = f"{where}.{field.name}".lstrip(".")
        if value is None:
            if not field.nullable and field.wire != "uuid":
                yield f"{place}: is None, and not nullable"
        elif not field.array:
            yield from _value_faults(field, value, place)
        elif not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
            yield f"{place}: expected a list or tuple, got {type(value).__name__}"
        else:
            for number, item in enumerate(value):
                yield from _value_faults(field, item, f"{place}[{number}]")


def _value_faults(field: Field, value: Any, place: str) -> Iterator[str]:
    if field.struct is not None:
        yield from _faults(field.struct, value, place)
        return
    expected: Any = {
        "string": str,
        "bytes": bytes | bytearray | memoryview,
        "records": bytes | bytearray | memoryview,
        "uuid": UUID,
    }.get(field.wire, int)
    if not isinstance(value, expected):
        yield f"{place}: expected {getattr(expected, '__name__', expected)}, got {value!r:.80}"
    elif field.wire in _RANGES:
        low, high = _RANGES[field.wire]
        if not low <= value <= high:
            yield f"{place}: {value} is outside {field.wire}"
    elif field.wire == "string":
        try:
            if len(value.encode()) > STRING_BYTES_MAX:
                yield f"{place}: longer than {STRING_BYTES_MAX} bytes"
        except UnicodeEncodeError:
            yield f"{place}: has a lone surrogate"
