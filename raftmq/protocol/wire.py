"""Frames and headers of Kafka's wire, and small pieces that several decoders and encoders share.

Owns varints, UUIDs, the words in which malformed bytes are refused, and the two tagged parts in
which Produce (v10+) and Fetch (v12+, endpoints v16+) say who leads now and where that node listens
(KIP-951), so that a client goes on without a Metadata round trip. Never allocates by a length that
it has not compared with the bytes left. All that is wrong with bytes from outside is a
RemoteProtocolError; compiled code may also let IndexError, struct.error and UnicodeDecodeError
escape, which its caller turns into one (`MALFORMED`).

A frame is four bytes of size, then that many bytes. Request header v1 (v2 with tagged fields where
the body is flexible), response header v0 (v1 where flexible, but never for ApiVersions, whose
client does not know yet what the broker speaks). `client_id` has the old two-byte length in both
versions.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn
from uuid import UUID, SafeUUID

from attrs import frozen

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey, is_flexible
from raftmq.types import Buffer

MALFORMED: Final = (IndexError, struct.error, UnicodeDecodeError)
"""What running over the end of a buffer, or undecodable text, looks like in Python."""

ELEMENTS_MAX: Final = 100_000
"""Default limit of array elements in one message, all arrays together."""
TAGS_MAX: Final = 10_000
"""Most tagged fields of one part, as in Kafka since 4.4."""
TURN_ELEMENTS: Final = 256
"""A slow decoder or encoder lets others have a turn after so many array elements."""

_new = object.__new__
_set = object.__setattr__
_ZERO_UUID: Final = bytes(16)
_SAFE: Final = SafeUUID.unknown
_unpack_int32 = struct.Struct(">i").unpack_from


def short(wanted: int, left: int) -> NoReturn:
    """Refuse a length or count that the bytes left cannot hold."""
    raise RemoteProtocolError(f"a field claims {wanted} bytes, {left} are left")


def too_many() -> NoReturn:
    """Refuse a message with more array elements than the limit."""
    raise RemoteProtocolError("too many array elements in one message")


def too_many_tags(count: int) -> NoReturn:
    """Refuse a part with more tagged fields than Kafka takes."""
    raise RemoteProtocolError(f"{count} tagged fields; at most {TAGS_MAX} are taken")


def bad_length(field: str, length: int) -> NoReturn:
    """Refuse a negative or otherwise impossible length, or null where null is not allowed."""
    raise RemoteProtocolError(f"{field} has the impossible length {length}")


def bad_tag(tag: int) -> NoReturn:
    """Refuse a known tagged field whose content is not of its announced size."""
    raise RemoteProtocolError(f"tagged field {tag} differs from its announced size")


def read_varint(buffer: Buffer, position: int, first: int) -> tuple[int, int]:
    """The rest of an unsigned varint whose first byte, above 127, is already read.

    Raises:
        RemoteProtocolError: it does not end within five bytes or exceeds 32 bits.
    """
    value = first & 0x7F
    for shift in (7, 14, 21, 28):
        byte = buffer[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 128:
            if value > 0xFFFFFFFF:
                break
            return value, position
    raise RemoteProtocolError("a varint does not fit 32 bits")


def skip_tags(buffer: Buffer, position: int, end: int, count: int) -> int:
    """The position after `count` unknown tagged fields (KIP-482)."""
    if count > 127:
        count, position = read_varint(buffer, position, count)
    if count > TAGS_MAX:
        too_many_tags(count)
    if count * 2 > end - position:
        short(count * 2, end - position)
    for _ in range(count):
        tag = buffer[position]
        position += 1
        if tag > 127:
            _, position = read_varint(buffer, position, tag)
        size = buffer[position]
        position += 1
        if size > 127:
            size, position = read_varint(buffer, position, size)
        if size > end - position:
            short(size, end - position)
        position += size
    return position


def to_uuid(raw: bytes) -> UUID | None:
    """A UUID from its 16 bytes; zero, Kafka's "none", is None.

    Built without UUID's constructor, which costs five times as much and checks nothing more here.
    """
    if raw == _ZERO_UUID:
        return None
    uuid = _new(UUID)
    _set(uuid, "int", int.from_bytes(raw, "big"))
    _set(uuid, "is_safe", _SAFE)
    return uuid


def from_uuid(uuid: UUID | None) -> bytes:
    """The 16 bytes of a UUID; None is zero."""
    return _ZERO_UUID if uuid is None else uuid.bytes


def long_varint(value: int) -> bytes:
    """An unsigned varint of any size."""
    out = bytearray()
    while value > 127:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


VARINTS: Final = tuple(long_varint(value) for value in range(1024))
"""Encoded unsigned varints of the lengths that are usual."""


def varint(value: int) -> bytes:
    """An unsigned varint."""
    return VARINTS[value] if value < 1024 else long_varint(value)


def read_compact_string(buffer: memoryview, position: int, end: int) -> tuple[str | None, int]:
    """A nullable compact string and the position after it.

    Raises:
        RemoteProtocolError: longer than the bytes left, or than Kafka allows.
    """
    length = buffer[position]
    position += 1
    if length > 127:
        length, position = read_varint(buffer, position, length)
    if not length:
        return None, position
    stop = position + length - 1
    if stop > end:
        short(length - 1, end - position)
    if length > 0x8000:
        bad_length("a string", length - 1)
    return str(buffer[position:stop], "utf-8"), stop


def read_string(buffer: memoryview, position: int, end: int) -> tuple[str | None, int]:
    """A nullable string with a two-byte length, and the position after it.

    Raises:
        RemoteProtocolError: longer than the bytes left.
    """
    length = (buffer[position] << 8) | buffer[position + 1]
    position += 2
    if length > 0x7FFF:
        return None, position
    stop = position + length
    if stop > end:
        short(length, end - position)
    return str(buffer[position:stop], "utf-8"), stop


def read_compact_count(buffer: memoryview, position: int, end: int, least: int) -> tuple[int, int]:
    """A compact array's count (-1 for null), checked against `least` bytes for each element.

    Raises:
        RemoteProtocolError: more elements than the bytes left can hold.
    """
    count = buffer[position]
    position += 1
    if count > 127:
        count, position = read_varint(buffer, position, count)
    count -= 1
    if count * least > end - position:
        short(count * least, end - position)
    return count, position


def read_count(buffer: memoryview, position: int, end: int, least: int) -> tuple[int, int]:
    """An array's four-byte count (-1 for null), checked against `least` bytes for each element.

    Raises:
        RemoteProtocolError: more elements than the bytes left can hold.
    """
    (count,) = _unpack_int32(buffer, position)
    position += 4
    if count * least > end - position:
        short(count * least, end - position)
    return max(count, -1), position


def compact_string(value: str | None) -> bytes:
    """A nullable string in its compact form.

    Raises:
        TypeError: longer than Kafka allows.
    """
    if value is None:
        return b"\x00"
    data = value.encode()
    length = len(data)
    if length > 0x7FFF:
        raise TypeError(f"a string of {length} bytes; Kafka allows 32767")
    return VARINTS[length + 1] + data if length < 1023 else long_varint(length + 1) + data


def plain_string(value: str | None) -> bytes:
    """A nullable string with a two-byte length.

    Raises:
        TypeError: longer than Kafka allows.
    """
    if value is None:
        return b"\xff\xff"
    data = value.encode()
    length = len(data)
    if length > 0x7FFF:
        raise TypeError(f"a string of {length} bytes; Kafka allows 32767")
    return length.to_bytes(2, "big") + data


_LEADER: Final = struct.Struct(">iiB")
_NODE: Final = struct.Struct(">i")
_PORT: Final = struct.Struct(">i")


@frozen
class CurrentLeader:
    """The leader of a partition, as far as the answering node knows; -1 where it does not."""

    leader_id: int = -1
    leader_epoch: int = -1


@frozen
class NodeEndpoint:
    """Where a node named by a CurrentLeader listens for clients."""

    node_id: int
    host: str
    port: int
    rack: str | None = None


NO_LEADER: Final = CurrentLeader()


def current_leader_bytes(leader: CurrentLeader) -> bytes:
    """The content of the tagged field."""
    return _LEADER.pack(leader.leader_id, leader.leader_epoch, 0)


def node_endpoints_bytes(endpoints: Sequence[NodeEndpoint]) -> bytes:
    """The content of the tagged field."""
    out = bytearray(varint(len(endpoints) + 1))
    for endpoint in endpoints:
        out += _NODE.pack(endpoint.node_id)
        out += compact_string(endpoint.host)
        out += _PORT.pack(endpoint.port)
        out += compact_string(endpoint.rack)
        out += b"\x00"
    return bytes(out)


def tagged(*fields: tuple[int, bytes]) -> bytes:
    """A tagged part of these fields, which ascend by tag."""
    out = bytearray(varint(len(fields)))
    for tag, content in fields:
        out += varint(tag)
        out += varint(len(content))
        out += content
    return bytes(out)


def current_leader_of(part: Any) -> CurrentLeader | None:
    """The leader in a decoded partition; None where the answer names none."""
    leader = getattr(part, "current_leader", None)
    if leader is None or (leader.leader_id == -1 and leader.leader_epoch == -1):
        return None
    return CurrentLeader(leader.leader_id, leader.leader_epoch)


def node_endpoints_of(message: Any) -> list[NodeEndpoint]:
    """The endpoints in a decoded answer."""
    return [
        NodeEndpoint(node.node_id, node.host, node.port, node.rack)
        for node in getattr(message, "node_endpoints", ())
    ]


_SIZE: Final = struct.Struct(">i")
SIZE_BYTES: Final = 4


def check_frame_size(size: int, size_max: int) -> int:
    """The size, if it is within the limit.

    Raises:
        RemoteProtocolError: negative or above the limit.
    """
    if not 0 <= size <= size_max:
        raise RemoteProtocolError(f"a frame of {size} bytes; the limit is {size_max}")
    return size


def frame(*parts: Buffer) -> bytes:
    """One frame of these parts, its size first."""
    return b"".join((_SIZE.pack(sum(len(part) for part in parts)), *parts))


class Framer:
    """Bytes in, frames out, for clients and tests. After an error the stream is lost: close it.

    It holds never more than one incomplete frame plus what arrived with it. A server reads each
    size itself and receives into a buffer of it.
    """

    def __init__(self, *, size_max: int = 100 << 20) -> None:
        self._size_max = size_max
        self._pending = bytearray()

    def feed(self, data: Buffer) -> None:
        """Add received bytes."""
        self._pending += data

    def frames(self) -> Iterator[bytes]:
        """Yield the complete frames, without their sizes.

        Raises:
            RemoteProtocolError: a size is negative or above the limit.
        """
        pending = self._pending
        start = 0
        try:
            while len(pending) - start >= SIZE_BYTES:
                size = check_frame_size(_SIZE.unpack_from(pending, start)[0], self._size_max)
                end = start + SIZE_BYTES + size
                if len(pending) < end:
                    break
                with memoryview(pending) as view:
                    found = bytes(view[start + SIZE_BYTES : end])
                start = end
                yield found
        finally:
            del pending[:start]

    @property
    def pending_bytes(self) -> int:
        """Bytes received and not yet handed out."""
        return len(self._pending)


_FIXED: Final = struct.Struct(">hhih")
_CORRELATION: Final = struct.Struct(">i")
_unpack = _FIXED.unpack_from


@frozen
class RequestHeader:
    """The header of a request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


def decode_request_header(frame: Buffer) -> tuple[RequestHeader, int]:
    """The header of a request and the position of its body.

    An API or version that is not announced is not refused here (its tagged fields are read as
    that API's newest versions have them): ask `is_announced`.

    Raises:
        RemoteProtocolError: malformed.
    """
    try:
        api_key, version, correlation_id, length = _unpack(frame, 0)
        position = 10
        client_id = None
        if length >= 0:
            position += length
            if position > len(frame):
                raise RemoteProtocolError(f"the client id claims {length} bytes")
            client_id = str(frame[10:position], "utf-8")
        if is_flexible(api_key, version):
            tags = frame[position]
            position += 1
            if tags:
                position = skip_tags(frame, position, len(frame), tags)
    except MALFORMED as error:
        raise RemoteProtocolError("a request header is malformed") from error
    return RequestHeader(api_key, version, correlation_id, client_id), position


def encode_request_header(
    api_key: int, version: int, correlation_id: int, client_id: str | None
) -> bytes:
    """A request's header; the body follows."""
    name = b"" if client_id is None else client_id.encode()
    length = -1 if client_id is None else len(name)
    header = _FIXED.pack(api_key, version, correlation_id, length) + name
    return header + b"\x00" if is_flexible(api_key, version) else header


def encode_response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """A response's header; the body follows."""
    header = _CORRELATION.pack(correlation_id)
    if api_key != ApiKey.API_VERSIONS and is_flexible(api_key, version):
        return header + b"\x00"
    return header


def decode_response_header(api_key: int, version: int, frame: Buffer) -> tuple[int, int]:
    """The correlation id of a response and the position of its body.

    Raises:
        RemoteProtocolError: malformed.
    """
    try:
        (correlation_id,) = _CORRELATION.unpack_from(frame, 0)
        position = 4
        if api_key != ApiKey.API_VERSIONS and is_flexible(api_key, version):
            tags = frame[position]
            position += 1
            if tags:
                position = skip_tags(frame, position, len(frame), tags)
    except MALFORMED as error:
        raise RemoteProtocolError("a response header is malformed") from error
    return correlation_id, position


def encode_unsupported_api_versions(correlation_id: int) -> bytes:
    """The whole answer (header and body, no size) to an ApiVersions of an unknown version.

    A version 0 body with UNSUPPORTED_VERSION and the range of ApiVersions alone, as Kafka sends:
    the client asks again with what it read (KIP-511). The connection stays open.
    """
    low, high = ANNOUNCED[ApiKey.API_VERSIONS]
    return struct.pack(
        ">ihihhh",
        correlation_id,
        ErrorCode.UNSUPPORTED_VERSION,
        1,
        ApiKey.API_VERSIONS,
        low,
        high,
    )
