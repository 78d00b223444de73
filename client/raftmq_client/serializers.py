"""Values to bytes and back: by name, by a function, or by an object with both directions.

Names are those of Kafka's own serializers and write the same bytes: `int` is 64 bits and `float`
a double, both big-endian, `uuid` its text. None stays None: a record without value is a tombstone.
Whatever fails names the topic; a consumer's error also names partition and offset.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeAlias
from uuid import UUID

import msgspec

from raftmq_client.errors import SerializationError, UsageError

if TYPE_CHECKING:  # a type checker knows defaults of type variables (PEP 696) before Python does
    from typing_extensions import TypeVar

    K = TypeVar("K", default=Any)
    V = TypeVar("V", default=Any)
else:
    from typing import TypeVar

    K = TypeVar("K")
    V = TypeVar("V")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

_TIMESTAMPS: Final = 1 << 63


class Serde(Protocol):
    """Both directions for one type."""

    def encode(self, value: Any) -> bytes:
        """The bytes of a value."""
        ...

    def decode(self, data: bytes) -> Any:
        """The value of some bytes."""
        ...


class _Plain:
    """A pair of functions."""

    def __init__(self, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> None:
        self.encode = encode
        self.decode = decode


class Encoder(Protocol[T_contra]):
    """What makes bytes of values of one type."""

    def encode(self, value: T_contra, /) -> bytes:
        """The bytes of a value."""
        ...


class Decoder(Protocol[T_co]):
    """What makes values of one type of their bytes."""

    def decode(self, data: bytes, /) -> T_co:
        """The value of some bytes."""
        ...


class Typed(Generic[T]):
    """Objects of one type (a `msgspec.Struct`, dataclass, attrs class, ...), checked when read.

    `Typed(Order)` writes JSON, `Typed(Order, "msgpack")` MessagePack.
    """

    def __init__(self, type_: type[T], encoding: Literal["json", "msgpack"] = "json") -> None:
        if encoding not in ("json", "msgpack"):
            raise UsageError(f"encoding is json or msgpack, not {encoding!r}")
        module = msgspec.json if encoding == "json" else msgspec.msgpack
        self._type = type_
        self._encoder = module.Encoder()
        self._decoder = module.Decoder(type_)

    def encode(self, value: T) -> bytes:
        """The bytes of an object."""
        if isinstance(self._type, type) and not isinstance(value, self._type):
            raise TypeError(f"{type(value).__name__} is no {self._type.__name__}")
        encoded: bytes = self._encoder.encode(value)
        return encoded

    def decode(self, data: bytes) -> T:
        """The object of some bytes."""
        decoded: T = self._decoder.decode(data)
        return decoded


def _pack(form: struct.Struct, kinds: tuple[type, ...]) -> _Plain:
    def encode(value: Any) -> bytes:
        if not isinstance(value, kinds):
            raise TypeError(f"{type(value).__name__} is no {kinds[0].__name__}")
        return form.pack(value)

    def decode(data: bytes) -> Any:
        return form.unpack(data)[0]

    return _Plain(encode, decode)


def _encode_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        raise TypeError("str is no bytes; pick the serializer 'str'")
    return bytes(memoryview(value))


def _encode_uuid(value: Any) -> bytes:
    if not isinstance(value, UUID):
        raise TypeError(f"{type(value).__name__} is no UUID")
    return str(value).encode()


def _encode_str(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} is no str")
    return value.encode()


SERDES: Final[dict[str, Serde]] = {
    "bytes": _Plain(_encode_bytes, bytes),
    "str": _Plain(_encode_str, lambda data: bytes(data).decode()),
    "int": _pack(struct.Struct(">q"), (int,)),
    "float": _pack(struct.Struct(">d"), (float, int)),
    "uuid": _Plain(_encode_uuid, lambda data: UUID(bytes(data).decode())),
    "json": _Plain(msgspec.json.encode, msgspec.json.decode),
}
"""By name."""

SerdeName: TypeAlias = Literal["bytes", "str", "int", "float", "uuid", "json"]
Serializer: TypeAlias = SerdeName | Encoder[T] | Callable[[T], bytes]
Deserializer: TypeAlias = SerdeName | Decoder[T] | Callable[[bytes], T]


def read_serializer(chosen: Serializer[Any] | None) -> Callable[[Any], bytes] | None:
    """The function of a choice; None leaves bytes as they are.

    Raises:
        UsageError: there is none of that name.
    """
    if chosen is None or chosen == "bytes":
        return None
    if isinstance(chosen, str):
        return _named(chosen).encode
    encode = getattr(chosen, "encode", chosen)
    if not callable(encode):
        raise UsageError(f"{chosen!r} is no serializer: a name, a function, or an object")
    return encode


def read_deserializer(chosen: Deserializer[Any] | None) -> Callable[[bytes], Any] | None:
    """The function of a choice; None leaves bytes as they are.

    Raises:
        UsageError: there is none of that name.
    """
    if chosen is None or chosen == "bytes":
        return None
    if isinstance(chosen, str):
        return _named(chosen).decode
    decode = getattr(chosen, "decode", chosen)
    if not callable(decode):
        raise UsageError(f"{chosen!r} is no deserializer: a name, a function, or an object")
    return decode


def _named(name: str) -> Serde:
    if name not in SERDES:
        raise UsageError(f"unknown serializer {name!r}; one of {', '.join(SERDES)}")
    return SERDES[name]


def serialize(encode: Callable[[Any], bytes] | None, value: Any, what: str, topic: str) -> Any:
    """A key or value as bytes; without a serializer it has to be bytes already.

    Raises:
        SerializationError: it cannot be.
    """
    if value is None:
        return None
    try:
        encoded: Any = _encode_bytes(value) if encode is None else encode(value)
    except Exception as error:
        raise SerializationError(f"{what} of a record for {topic!r}: {error}") from error
    if type(encoded) is bytes or encoded is None:
        return encoded
    if isinstance(encoded, bytes | bytearray | memoryview):
        return bytes(encoded)
    kind = type(encoded).__name__
    raise SerializationError(f"{what} of a record for {topic!r}: its serializer gave {kind}")


def check_extras(
    headers: Sequence[Any], timestamp: Any, topic: str
) -> tuple[tuple[str, bytes | None], ...]:
    """The headers as they are written; a batch of many is no place to find out that they cannot be.

    Raises:
        SerializationError: headers or timestamp cannot be written.
    """
    if timestamp is not None and not (
        isinstance(timestamp, int)
        and not isinstance(timestamp, bool)
        and 0 <= timestamp < _TIMESTAMPS
    ):
        raise SerializationError(
            f"timestamp of a record for {topic!r}: {timestamp!r} is no number of milliseconds"
        )
    checked: list[tuple[str, bytes | None]] = []
    for header in headers:
        try:
            name, content = header
            _encode_str(name)
            checked.append((name, None if content is None else _encode_bytes(content)))
        except Exception as error:
            raise SerializationError(
                f"header {header!r} of a record for {topic!r}: {error}"
            ) from error
    return tuple(checked)
