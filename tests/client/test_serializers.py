"""Values travel as bytes and come back; what does not fit is refused with its place."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import msgspec
import pytest

from raftmq_client import SerializationError, Typed, UsageError
from raftmq_client.serializers import read_deserializer, read_serializer, serialize


class Order(msgspec.Struct):
    number: int
    item: str


@pytest.mark.parametrize(
    ("name", "value", "data"),
    [
        ("str", "grüß", "grüß".encode()),
        ("int", -2, b"\xff" * 7 + b"\xfe"),
        ("float", 1.5, b"\x3f\xf8" + b"\0" * 6),
        ("uuid", UUID(int=1), b"00000000-0000-0000-0000-000000000001"),
        ("json", {"a": [1, None]}, b'{"a":[1,null]}'),
        (Typed(Order), Order(1, "x"), b'{"number":1,"item":"x"}'),
        (Typed(Order, "msgpack"), Order(1, "x"), b"\x82\xa6number\x01\xa4item\xa1x"),
        (Typed(list[int]), [1, 2], b"[1,2]"),
    ],
)
def test_what_is_written_is_read(name: Any, value: object, data: bytes) -> None:
    encode, decode = read_serializer(name), read_deserializer(name)
    assert serialize(encode, value, "value", "t") == data
    assert decode is not None
    assert decode(data) == value
    assert serialize(encode, None, "value", "t") is None, "a tombstone stays one"


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x")])
def test_bytes_need_no_serializer(value: object) -> None:
    assert serialize(read_serializer(None), value, "value", "t") == b"x"
    assert read_serializer("bytes") is read_deserializer("bytes") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (None, "text"),
        (None, 5),
        ("str", b"x"),
        ("int", "1"),
        ("int", 1 << 63),
        ("float", "1"),
        ("uuid", "no"),
        ("json", object()),
        (Typed(Order), {"number": 1}),
        (lambda value: 1 / value, 0),
    ],
)
def test_what_does_not_fit_is_refused(name: Any, value: object) -> None:
    with pytest.raises(SerializationError, match="key of a record for 't'"):
        serialize(read_serializer(name), value, "key", "t")


def test_a_function_will_do() -> None:
    assert serialize(read_serializer(str.encode), "x", "value", "t") == b"x"
    assert read_deserializer(bytes.decode)(b"x") == "x"  # type: ignore[misc]


@pytest.mark.parametrize("read", [read_serializer, read_deserializer])
def test_unknown_names_are_refused(read: Any) -> None:
    with pytest.raises(UsageError, match="json"):
        read("yaml")
    with pytest.raises(UsageError):
        read(5)
    with pytest.raises(UsageError, match="msgpack"):
        Typed(Order, "yaml")
