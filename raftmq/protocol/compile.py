"""The one door to kio: its schemas become decoders and encoders of our own, at first use.

kio's own reader never sees bytes from the network: it allocates what a length field claims. Only
its dataclass metadata is used, one module per (API, version, direction), imported when first
needed. Compiled code is kept for the life of the process.

What raftmq says beyond Kafka's schemas stands in tagged fields of its own (`_with_own`), which
other clients skip (KIP-482).

Bytes after the last field of a body are ignored, as Kafka's own parser does. Zero UUIDs are None.
Strings, counts and lengths are checked before anything is allocated; whatever is wrong with bytes
from outside is a RemoteProtocolError, whatever is wrong with a message of ours a TypeError.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
import typing
from collections.abc import Generator, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal, get_args, get_origin

from attrs import evolve

from raftmq.errors import RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey
from raftmq.protocol.decoders import Decoder, SlowDecoder, build_decoder, build_slow_decoder
from raftmq.protocol.encoders import (
    Encoder,
    SlowEncoder,
    build_encoder,
    build_slow_encoder,
    explain,
)
from raftmq.protocol.schema import Field, Schema, Struct
from raftmq.protocol.wire import ELEMENTS_MAX, MALFORMED
from raftmq.types import Buffer

Direction = Literal["request", "response"]

KIO_MIN: Final[Mapping[int, int]] = {ApiKey.PRODUCE: 3}
"""Lowest version that kio has a schema for, where that is above the announced one."""

_WIRE: Final = {
    "error_code": "int16",
    "timedelta_i32": "int32",
    "timedelta_i64": "int64",
    "datetime_i64": "int64",
}
_OWN_TAG: Final = 10_000
"""The first tag of raftmq's own fields. Kafka numbers its tags from 0 on, without a gap."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "string": "",
    "bytes": b"",
    "records": None,
    "uuid": None,
    "bool": False,
    "float64": 0.0,
}


class _Family:
    """All versions of one API in one direction: shared Struct classes and known names."""

    def __init__(self, api: ApiKey, direction: Direction) -> None:
        self.api = api
        self.direction = direction
        self.schemas: dict[int, Schema] = {}
        self.names: dict[str, set[str]] = {}
        self._classes: dict[str, type[Struct]] = {}

    def schema(self, version: int) -> Schema:
        if version not in self.schemas:
            low, high = ANNOUNCED[self.api]
            if not max(low, KIO_MIN.get(self.api, low)) <= version <= high:
                raise RemoteProtocolError(
                    f"{self.api.title} v{version} is not a version that is spoken"
                )
            schema = _load(self.api, version, self.direction)
            for path, part in _parts(schema):
                self.names.setdefault(path, set()).update(f.name for f in part.all_fields)
            self.schemas[version] = schema  # last: another thread that finds it needs the names
        return self.schemas[version]

    def struct_class(self, path: str) -> type[Struct]:
        """The class of decoded parts at a path; it answers defaults of other versions' fields."""
        if path not in self._classes:

            def default_of(name: str) -> Any:
                return self._fresh_default(path, name)

            title = f"{self.api.title}{self.direction.capitalize()}"
            self._classes[path] = type(
                ".".join([title, path]) if path else title,
                (Struct,),
                {"default_of": staticmethod(default_of)},
            )
        return self._classes[path]

    def check_names(self, path: str, bag: Mapping[str, Any]) -> None:
        """Accept attributes that another version has; refuse names that none has."""
        for name in bag:
            if name not in self.names[path] and self._find(path, name) is None:
                place = f"{self.api.title} {self.direction}{'.' if path else ''}{path}"
                known = ", ".join(sorted(self.names[path]))
                raise TypeError(f"{place} has no field {name!r}; it has {known}")

    def _fresh_default(self, path: str, name: str) -> Any:
        field = self._find(path, name)
        if field is None:
            raise KeyError(name)
        if field.array:
            return None if field.default is None else []
        if field.struct is None or field.nullable:
            return field.default
        blank = self.struct_class(field.struct.path)()
        for inner in field.struct.all_fields:
            setattr(blank, inner.name, self._fresh_default(field.struct.path, inner.name))
        return blank

    def _find(self, path: str, name: str) -> Field | None:
        """A version's field of that name; its default is the same in all that have it. Versions
        that are loaded are looked at first, since to load one holds up a loop for milliseconds."""
        low, high = ANNOUNCED[self.api]
        versions = range(high, max(low, KIO_MIN.get(self.api, low)) - 1, -1)
        for version in sorted(versions, key=lambda number: number not in self.schemas):
            for part_path, part in _parts(self.schema(version)):
                if part_path == path:
                    for field in part.all_fields:
                        if field.name == name:
                            return field
        return None


_families: dict[tuple[int, str], _Family] = {}
_request_decoders: dict[tuple[int, int], Decoder] = {}
_response_decoders: dict[tuple[int, int], Decoder] = {}
_request_encoders: dict[tuple[int, int], Encoder] = {}
_response_encoders: dict[tuple[int, int], Encoder] = {}
_slow_decoders: dict[tuple[int, int], SlowDecoder] = {}
_slow_encoders: dict[tuple[int, int], SlowEncoder] = {}


def decode_request(
    api_key: int, version: int, body: Buffer, *, elements_max: int = ELEMENTS_MAX
) -> Struct:
    """Decode a request's body (what follows its header).

    Raises:
        RemoteProtocolError: malformed, too many elements, or not an announced version.
    """
    decoder = _request_decoders.get((api_key, version))
    if decoder is None:
        decoder = _make_decoder(_request_decoders, api_key, version, "request")
    try:
        return decoder(_view(body), elements_max)[0]
    except MALFORMED as error:
        raise _malformed(api_key, version, "request", error) from error
    except RemoteProtocolError as error:
        raise _malformed(api_key, version, "request", error) from error


def decode_request_slowly(
    api_key: int, version: int, body: Buffer, *, elements_max: int = ELEMENTS_MAX
) -> Generator[None, None, Struct]:
    """As `decode_request`, as a generator that yields between short turns."""
    decoder = _slow_decoders.get((api_key, version))
    if decoder is None:
        family = _family(api_key, "request")
        title = f"{_title(api_key)} v{version} request, slowly"
        decoder = build_slow_decoder(family.schema(version), title, family.struct_class)
        _slow_decoders[api_key, version] = decoder
    try:
        message, _ = yield from decoder(_view(body), elements_max)
    except MALFORMED as error:
        raise _malformed(api_key, version, "request", error) from error
    except RemoteProtocolError as error:
        raise _malformed(api_key, version, "request", error) from error
    return message


def decode_response(
    api_key: int, version: int, body: Buffer, *, elements_max: int = 16 * ELEMENTS_MAX
) -> Struct:
    """Decode a response's body (what follows its header).

    Raises:
        RemoteProtocolError: malformed, too many elements, or not an announced version.
    """
    decoder = _response_decoders.get((api_key, version))
    if decoder is None:
        decoder = _make_decoder(_response_decoders, api_key, version, "response")
    try:
        return decoder(_view(body), elements_max)[0]
    except MALFORMED as error:
        raise _malformed(api_key, version, "response", error) from error
    except RemoteProtocolError as error:
        raise _malformed(api_key, version, "response", error) from error


def encode_request(api_key: int, version: int, message: Struct | Mapping[str, Any]) -> bytes:
    """Encode a request's body; absent attributes take the schema's defaults.

    Raises:
        TypeError: a value does not fit its field, or a name is in no version of the schema.
    """
    encoder = _request_encoders.get((api_key, version))
    if encoder is None:
        encoder = _make_encoder(_request_encoders, api_key, version, "request")
    try:
        return encoder(message)
    except Exception as error:  # whatever a wrong value raises is explained
        raise _explained(api_key, version, "request", message, error) from error


def encode_response(api_key: int, version: int, message: Struct | Mapping[str, Any]) -> bytes:
    """Encode a response's body; absent attributes take the schema's defaults.

    Raises:
        TypeError: a value does not fit its field, or a name is in no version of the schema.
    """
    encoder = _response_encoders.get((api_key, version))
    if encoder is None:
        encoder = _make_encoder(_response_encoders, api_key, version, "response")
    try:
        return encoder(message)
    except Exception as error:  # whatever a wrong value raises is explained
        raise _explained(api_key, version, "response", message, error) from error


def encode_response_slowly(
    api_key: int, version: int, message: Struct | Mapping[str, Any]
) -> Generator[None, None, bytes]:
    """As `encode_response`, as a generator that yields between short turns."""
    encoder = _slow_encoders.get((api_key, version))
    if encoder is None:
        family = _family(api_key, "response")
        title = f"{_title(api_key)} v{version} response, slowly"
        schema = family.schema(version)
        names = family.names.__getitem__
        encoder = build_slow_encoder(schema, title, names, family.check_names)
        _slow_encoders[api_key, version] = encoder
    try:
        body = yield from encoder(message)
    except Exception as error:  # whatever a wrong value raises is explained
        raise _explained(api_key, version, "response", message, error) from error
    return body


def warm(requests: Iterable[tuple[int, int]]) -> None:
    """Compile the request decoders and response encoders of these (API, version) now.

    A first use costs milliseconds (and the very first the import of kio): a node pays them
    before it is ready, not while its peers wait for a heartbeat.
    """
    for api_key, version in requests:
        if (api_key, version) not in _request_decoders:
            _make_decoder(_request_decoders, api_key, version, "request")
        if (api_key, version) not in _response_encoders:
            _make_encoder(_response_encoders, api_key, version, "response")


def warm_client(requests: Iterable[tuple[int, int]]) -> None:
    """Compile the request encoders and response decoders of these (API, version) now."""
    for api_key, version in requests:
        if (api_key, version) not in _request_encoders:
            _make_encoder(_request_encoders, api_key, version, "request")
        if (api_key, version) not in _response_decoders:
            _make_decoder(_response_decoders, api_key, version, "response")


def schema_of(api_key: int, version: int, direction: Direction) -> Schema:
    """The schema behind a decoder and encoder.

    Raises:
        RemoteProtocolError: not an announced API or version.
    """
    return _family(api_key, direction).schema(version)


def struct_class_of(api_key: int, direction: Direction, path: str = "") -> type[Struct]:
    """The class of decoded Structs at a path ("topics.partitions") of an API's schema."""
    return _family(api_key, direction).struct_class(path)


def _view(body: Buffer) -> memoryview:
    view = memoryview(body)
    return view if view.format == "B" else view.cast("B")


def _malformed(
    api_key: int, version: int, direction: Direction, error: Exception
) -> RemoteProtocolError:
    what = str(error) if isinstance(error, RemoteProtocolError | UnicodeDecodeError) else "cut off"
    return RemoteProtocolError(f"{_title(api_key)} v{version} {direction}: {what}")


def _explained(
    api_key: int, version: int, direction: Direction, message: Any, error: Exception
) -> TypeError:
    what = explain(schema_of(api_key, version, direction), message) or str(error)
    return TypeError(f"{_title(api_key)} v{version} {direction}: {what}")


def _title(api_key: int) -> str:
    return ApiKey(api_key).title if api_key in ANNOUNCED else f"API {api_key}"


def _make_decoder(
    cache: dict[tuple[int, int], Decoder], api_key: int, version: int, direction: Direction
) -> Decoder:
    family = _family(api_key, direction)
    title = f"{_title(api_key)} v{version} {direction}"
    decoder = build_decoder(family.schema(version), title, family.struct_class)
    return cache.setdefault((api_key, version), decoder)


def _make_encoder(
    cache: dict[tuple[int, int], Encoder], api_key: int, version: int, direction: Direction
) -> Encoder:
    family = _family(api_key, direction)
    schema = family.schema(version)
    title = f"{_title(api_key)} v{version} {direction}"
    encoder = build_encoder(schema, title, family.names.__getitem__, family.check_names)
    return cache.setdefault((api_key, version), encoder)


def _family(api_key: int, direction: Direction) -> _Family:
    family = _families.get((api_key, direction))
    if family is None:
        if api_key not in ANNOUNCED:
            raise RemoteProtocolError(f"API {api_key} is not spoken")
        family = _families.setdefault((api_key, direction), _Family(ApiKey(api_key), direction))
    return family


def _parts(schema: Schema) -> Iterable[tuple[str, Schema]]:
    yield schema.path, schema
    for field in schema.all_fields:
        if field.struct is not None:
            yield from _parts(field.struct)


def _load(api: ApiKey, version: int, direction: Direction) -> Schema:
    """Import one kio module and read its top class."""
    _import_kio_without_hypothesis()
    module = importlib.import_module(f"kio.schema.{api.name.lower()}.v{version}.{direction}")
    entity = next(
        candidate
        for candidate in vars(module).values()
        if isinstance(candidate, type)
        and getattr(getattr(candidate, "__type__", None), "name", None) == direction
    )
    schema = _schema(entity, "")
    is_own = (api, direction) == (ApiKey.METADATA, "response")
    return _with_own(schema) if is_own and schema.flexible else schema


def _with_own(schema: Schema) -> Schema:
    """A Metadata answer whose topics also tell of what they list no more: the partitions that can
    be read on under the topic's name, and the view over them. Left out where there is nothing."""
    topics = next(field for field in schema.fields if field.name == "topics")
    assert topics.struct is not None
    listed = next(field for field in topics.struct.fields if field.name == "partitions")
    assert listed.struct is not None
    path = f"{topics.struct.path}.retired_partitions"
    retired = evolve(
        listed,
        name="retired_partitions",
        tag=_OWN_TAG,
        nullable=False,
        default=(),
        struct=evolve(listed.struct, path=path),
    )
    view = Field("retired_view", "string", False, False, _OWN_TAG + 1, "")
    tagged = (*topics.struct.tagged, retired, view)
    told = evolve(topics, struct=evolve(topics.struct, tagged=tagged))
    return evolve(
        schema, fields=tuple(told if field is topics else field for field in schema.fields)
    )


def _import_kio_without_hypothesis() -> None:
    """Keep kio from importing hypothesis where that is installed.

    kio registers strategies with it, which costs half a second of import in a broker.
    """
    if "kio.static._phantom" in sys.modules or "hypothesis" in sys.modules:
        return
    sys.modules["hypothesis"] = None  # type: ignore[assignment]  # "not importable", says Python
    try:
        importlib.import_module("kio.static._phantom")
    finally:
        del sys.modules["hypothesis"]


def _schema(entity: Any, path: str) -> Schema:
    fields = [_field(field, path) for field in dataclasses.fields(entity)]
    return Schema(
        name=entity.__name__,
        path=path,
        flexible=bool(entity.__flexible__),
        fields=tuple(field for field in fields if field.tag is None),
        tagged=tuple(sorted((f for f in fields if f.tag is not None), key=lambda f: f.tag or 0)),
    )


def _field(source: dataclasses.Field[Any], path: str) -> Field:
    kind, nullable = _without_none(source.type)
    array = get_origin(kind) is tuple
    if array:
        kind, element_nullable = _without_none(get_args(kind)[0])
        nullable = nullable or element_nullable
    struct = None
    if dataclasses.is_dataclass(kind):
        struct = _schema(kind, f"{path}.{source.name}".lstrip("."))
        wire = "struct"
    else:
        kafka_type = source.metadata["kafka_type"]
        wire = _WIRE.get(kafka_type, kafka_type)
        # kio reads -1 as no time at all; here it stays a number. A zero UUID is None anyway.
        if wire == "int64" or wire == "uuid":
            nullable = False
    return Field(
        name=source.name,
        wire=wire,
        array=array,
        nullable=nullable,
        tag=source.metadata.get("tag"),
        default=_default(source, wire, array, nullable),
        struct=struct,
    )


def _without_none(kind: Any) -> tuple[Any, bool]:
    if get_origin(kind) in (types.UnionType, typing.Union):
        inner = [argument for argument in get_args(kind) if argument is not type(None)]
        return inner[0], len(inner) < len(get_args(kind))
    return kind, False


def _default(source: dataclasses.Field[Any], wire: str, array: bool, nullable: bool) -> Any:
    """The default as a plain value; where the schema names none, Kafka's: zero, empty, no null.

    One exception: a nullable string without a default is None here, not "".
    """
    value = source.default
    if array:
        return None if value is None and nullable else ()
    if wire == "struct" or value is dataclasses.MISSING:
        return None if nullable or wire == "struct" else _DEFAULTS.get(wire, 0)
    if value is None and wire == "int64":
        return -1
    if isinstance(value, timedelta):
        return value // timedelta(milliseconds=1)
    if isinstance(value, Enum):
        return int(value.value)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return int(value)
