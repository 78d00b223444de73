"""Message parts: the shape of one (API, version, direction), and the `Struct` that holds one part.

Free of kio: `compile.py` fills the model from kio's metadata, and `decoders.py` and `encoders.py`
write source code from it. Schemas are immutable. Wire types are Kafka's plain ones: what kio
dresses up (error codes, durations, timestamps) is an integer here.

A Struct decoded from the wire belongs to a class made for its place in an API's schema (all
versions share it), so a field that the decoded version does not have yet, or no longer has, reads
as its schema default, and a name that no version knows is an AttributeError. A Struct built by hand
is plain: only what was given can be read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

from attrs import frozen

FIXED: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
"""Wire types of constant width and their `struct` format letters (network order)."""

SIZES: Final = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "int64": 8,
    "float64": 8,
    "uuid": 16,
}

STRING_BYTES_MAX: Final = 0x7FFF
"""Kafka refuses longer strings, also where the compact form could carry them."""


@frozen
class Field:
    """One field of a schema. `wire` is "struct" for nested parts, else a wire type."""

    name: str
    wire: str
    array: bool
    nullable: bool
    tag: int | None
    default: Any  # None, a scalar, or () for an array; for a struct, None or its own defaults
    struct: Schema | None = None

    @property
    def is_fixed(self) -> bool:
        """True for a scalar of constant width that stands in the untagged part."""
        return not self.array and self.wire in FIXED


@frozen
class Schema:
    """One message part: untagged fields in wire order, tagged ones by ascending tag."""

    name: str
    path: str  # "" for the message itself, then "topics.partitions"
    flexible: bool
    fields: tuple[Field, ...]
    tagged: tuple[Field, ...]

    @property
    def all_fields(self) -> tuple[Field, ...]:
        """Untagged, then tagged."""
        return self.fields + self.tagged

    @property
    def size_min(self) -> int:
        """The least number of bytes that one such part takes on the wire."""
        size = 1 if self.flexible else 0
        return size + sum(field_size_min(self, field) for field in self.fields)


def field_size_min(schema: Schema, field: Field) -> int:
    """The least number of bytes that one untagged field takes."""
    if field.array:
        return 1 if schema.flexible else 4
    return value_size_min(schema.flexible, field)


def value_size_min(flexible: bool, field: Field) -> int:
    """The least number of bytes that one value (an element, if the field is an array) takes."""
    if field.wire in SIZES:
        return SIZES[field.wire]
    if field.struct is not None:
        return 1 if field.nullable and not field.array else max(field.struct.size_min, 1)
    if flexible:
        return 1
    return 2 if field.wire == "string" else 4


DefaultOf = Callable[[str], Any]
"""Answers the default of a field by name; raises KeyError where no version has such a field."""


class Struct:
    """An attribute bag: `Struct(topics=[Struct(name="a", partitions=[])])`."""

    default_of: ClassVar[DefaultOf | None] = None

    def __init__(self, **fields: Any) -> None:
        self.__dict__ = fields

    def __getattr__(self, name: str) -> Any:
        # Reached only for names absent from the instance.
        default_of = type(self).default_of
        if default_of is not None and not name.startswith("__"):
            try:
                return default_of(name)
            except KeyError:
                pass
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")

    if TYPE_CHECKING:  # any attribute may be set

        def __setattr__(self, name: str, value: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Struct):
            return NotImplemented
        return self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"
