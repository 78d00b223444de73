"""Kafka's frames and what stands before a body: sizes, request headers, response headers.

A frame is four bytes of size, then that many bytes. `Framer` cuts a byte stream into frames, for
clients and tests; it holds never more than one incomplete frame plus what arrived with it. A server
reads each size itself and receives into a buffer of it.

Request header v1 (v2 with tagged fields where the body is flexible), response header v0 (v1 where
flexible, but never for ApiVersions, whose client does not know yet what the broker speaks).
`client_id` has the old two-byte length in both versions. Owns the answer to an ApiVersions of an
unknown version, too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from attrs import frozen

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.protocol.api_versions import ANNOUNCED, ApiKey, is_flexible
from raftmq.protocol.wire import MALFORMED, skip_tags
from raftmq.types import Buffer

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
    """Bytes in, frames out. After an error the stream is lost: close it."""

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
