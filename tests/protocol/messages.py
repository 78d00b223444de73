"""Random messages of any (API, version, direction), each as our Struct and as kio's entity.

The shapes are read from kio's dataclasses alone, not from our own schemas, so that comparing both
sides says something. Where the numbers come from is a Chooser: a seeded `random.Random`, or
hypothesis' `draw`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import types
import typing
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from enum import Enum
from functools import cache
from random import Random
from typing import Any, Protocol
from uuid import UUID

from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.static.primitive import TZAware, i32Timedelta, i64Timedelta

from raftmq.protocol import ANNOUNCED, ApiKey, Struct

KIO_FROM = {ApiKey.PRODUCE: 3}
DIRECTIONS = ("request", "response")


class Chooser(Protocol):
    """Where arbitrary values come from."""

    def integer(self, low: int, high: int) -> int: ...
    def text(self) -> str: ...
    def blob(self) -> bytes: ...


class RandomChooser:
    """Values from a seeded generator: fast, repeatable, with a liking for the edges."""

    def __init__(self, random: Random, *, text_max: int = 12) -> None:
        self._random = random
        self._text_max = text_max

    def integer(self, low: int, high: int) -> int:
        edges = [low, high, 0, 1, -1]
        if high - low > 10 and self._random.random() < 0.4:
            edge = self._random.choice(edges)
            if low <= edge <= high:
                return edge
        return self._random.randint(low, high)

    def text(self) -> str:
        size = self._random.randint(0, self._text_max)
        return "".join(self._random.choice("abcé漢🙂-._09") for _ in range(size))

    def blob(self) -> bytes:
        return self._random.randbytes(self._random.randint(0, 4 * self._text_max))


class HypothesisChooser:
    """Values that hypothesis can shrink."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def text(self) -> str:
        return str(self._draw(st.text(max_size=20)))

    def blob(self) -> bytes:
        return bytes(self._draw(st.binary(max_size=40)))


def every_message() -> Iterator[tuple[ApiKey, int, str]]:
    """All (API, version, direction) that have a schema."""
    for api, (low, high) in ANNOUNCED.items():
        for version in range(max(low, KIO_FROM.get(api, low)), high + 1):
            for direction in DIRECTIONS:
                yield api, version, direction


@cache
def kio_class(api: ApiKey, version: int, direction: str) -> Any:
    """kio's class of a whole message."""
    module = importlib.import_module(f"kio.schema.{api.name.lower()}.v{version}.{direction}")
    for candidate in vars(module).values():
        kind = getattr(candidate, "__type__", None)
        if isinstance(candidate, type) and isinstance(kind, Enum) and kind.name == direction:
            return candidate
    raise AssertionError(module.__name__)


def message(
    api: ApiKey, version: int, direction: str, chooser: Chooser, *, items_max: int = 3
) -> tuple[Struct, Any]:
    """One message, as a Struct and as kio's entity."""
    return _part(kio_class(api, version, direction), chooser, items_max)


def random_message(api: ApiKey, version: int, direction: str, seed: int) -> tuple[Struct, Any]:
    """One message that the seed decides."""
    random = Random(f"{int(api)}/{version}/{direction}/{seed}")
    return message(api, version, direction, RandomChooser(random))


def _part(entity: Any, chooser: Chooser, items_max: int) -> tuple[Struct, Any]:
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    for field in _shape(entity):
        ours[field.name], theirs[field.name] = _value(field, chooser, items_max)
    if entity.__name__ == "MetadataResponseTopic" and entity.__flexible__:
        ours |= {"retired_partitions": [], "retired_view": ""}  # raftmq's own
    return Struct(**ours), entity(**theirs)


@dataclasses.dataclass(frozen=True)
class _Field:
    name: str
    kind: Any  # a kio dataclass or a kafka_type
    array: bool
    nullable: bool


@cache
def _shape(entity: Any) -> tuple[_Field, ...]:
    fields = []
    for field in dataclasses.fields(entity):
        kind, nullable = _unwrap(field.type)
        array = typing.get_origin(kind) is tuple
        if array:
            kind, inner_nullable = _unwrap(typing.get_args(kind)[0])
            nullable = nullable or inner_nullable
        if not dataclasses.is_dataclass(kind):
            kind = field.metadata["kafka_type"]
        # kio cannot write null into a tagged field, except as its default.
        if "tag" in field.metadata and field.default is not None:
            nullable = False
        fields.append(_Field(field.name, kind, array, nullable))
    return tuple(fields)


def _unwrap(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        inner = [argument for argument in typing.get_args(kind) if argument is not type(None)]
        return inner[0], True
    return kind, False


def _value(field: _Field, chooser: Chooser, items_max: int) -> tuple[Any, Any]:
    if field.nullable and chooser.integer(0, 3) == 0:
        return (-1 if field.kind == "datetime_i64" else None), None
    if not field.array:
        return _scalar(field.kind, chooser, items_max)
    pairs = [_scalar(field.kind, chooser, items_max) for _ in range(chooser.integer(0, items_max))]
    return [ours for ours, _ in pairs], tuple(theirs for _, theirs in pairs)


_INTEGERS = {
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
_ERROR_CODES = tuple(KioErrorCode)
_SECONDS_MAX = 200_000_000_000


def _scalar(kind: Any, chooser: Chooser, items_max: int) -> tuple[Any, Any]:
    if not isinstance(kind, str):
        return _part(kind, chooser, max(items_max - 1, 1))
    if kind in _INTEGERS:
        number = chooser.integer(*_INTEGERS[kind])
        return number, number
    if kind == "float64":
        fraction = math.ldexp(chooser.integer(-(1 << 53), 1 << 53), chooser.integer(-1074, 970))
        return fraction, fraction
    if kind == "string":
        text = chooser.text()
        return text, text
    if kind in ("bytes", "records"):
        blob = chooser.blob()
        return blob, blob
    if kind == "bool":
        flag = bool(chooser.integer(0, 1))
        return flag, flag
    if kind == "uuid":
        uuid = UUID(int=chooser.integer(1, (1 << 128) - 1))
        return uuid, uuid
    return _dressed(kind, chooser)


def _dressed(kind: str, chooser: Chooser) -> tuple[Any, Any]:
    """What kio dresses up and we leave a number. kio's clocks know whole seconds only."""
    if kind == "error_code":
        code = _ERROR_CODES[chooser.integer(0, len(_ERROR_CODES) - 1)]
        return int(code.value), code
    if kind == "timedelta_i32":
        number = chooser.integer(-(1 << 31), (1 << 31) - 1)
        return number, i32Timedelta.parse(timedelta(milliseconds=number))
    if kind == "timedelta_i64":
        number = chooser.integer(-(10**12), 10**12)
        return number, i64Timedelta.parse(timedelta(milliseconds=number))
    assert kind == "datetime_i64", kind
    seconds = chooser.integer(0, _SECONDS_MAX)
    return seconds * 1000, TZAware.parse(datetime.fromtimestamp(seconds, tz=UTC))
