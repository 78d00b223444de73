"""Record batches made by hand, each field as one likes it: what no encoder of ours would write."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Sequence
from typing import Final

import lz4.frame
import zstandard
from crc32c import crc32c

from raftmq.codec import Codec, compress
from raftmq.records import HEADER_SIZE, encode_varint

_HEADER: Final = struct.Struct(">qiibIhiqqqhii")
INT_MAX: Final = (1 << 31) - 1
INT_MIN: Final = -(1 << 31)
LONG_MAX: Final = (1 << 63) - 1
LONG_MIN: Final = -(1 << 63)


def raw_varint(code: int) -> bytes:
    """Seven bits a byte, without the zigzag."""
    out = bytearray()
    while code >= 0x80:
        out.append(code & 0x7F | 0x80)
        code >>= 7
    out.append(code)
    return bytes(out)


def long_form(value: int, size: int) -> bytes:
    """A varint of so many bytes, more than it needs."""
    code = value << 1 if value >= 0 else (-value << 1) - 1
    pieces = [code >> 7 * number & 0x7F | 0x80 for number in range(size)]
    pieces[-1] &= 0x7F
    return bytes(pieces)


def field(content: bytes | None, size: int | bytes | None = None) -> bytes:
    """A length and bytes; with a `size` of its own, or the varint itself."""
    if isinstance(size, bytes):
        return size + (content or b"")
    if size is None:
        size = -1 if content is None else len(content)
    return encode_varint(size) + (content or b"")


def header(
    name: bytes | None = b"h",
    value: bytes | None = b"x",
    *,
    name_size: int | None = None,
    value_size: int | None = None,
) -> bytes:
    """A record header."""
    return field(name, name_size) + field(value, value_size)


def record(
    delta: int = 0,
    *,
    time: int | bytes = 0,
    key: bytes | None = b"k",
    value: bytes | None = b"value",
    key_size: int | bytes | None = None,
    value_size: int | bytes | None = None,
    offset: bytes | None = None,
    attributes: int = 0,
    headers: Sequence[bytes] = (),
    header_count: int | bytes | None = None,
    size: int | bytes | None = None,
    size_off: int = 0,
    tail: bytes = b"",
    cut: int = 0,
) -> bytes:
    """A record; `time` is its timestamp delta, `size` its length, `cut` takes its last bytes."""
    count = len(headers) if header_count is None else header_count
    body = b"".join(
        (
            bytes((attributes,)),
            time if isinstance(time, bytes) else encode_varint(time),
            encode_varint(delta) if offset is None else offset,
            field(key, key_size),
            field(value, value_size),
            count if isinstance(count, bytes) else encode_varint(count),
            *headers,
            tail,
        )
    )
    body = body[: len(body) - cut]
    if isinstance(size, bytes):
        return size + body
    return encode_varint(len(body) + size_off if size is None else size) + body


def records(count: int = 2) -> bytes:
    """So many sound ones."""
    return b"".join(record(delta) for delta in range(count))


def batch(
    payload: bytes,
    now_ms: int,
    *,
    count: int = 2,
    codec: Codec = Codec.NONE,
    is_packed: bool = False,
    attributes: int | None = None,
    last_delta: int | None = None,
    base_time: int | None = None,
    max_time: int | None = None,
    base_offset: int = 0,
    leader_epoch: int = -1,
    magic: int = 2,
    producer: tuple[int, int, int] = (-1, -1, -1),
    length_off: int = 0,
    length: int | None = None,
    crc_xor: int = 0,
    tail: bytes = b"",
    cut: int = 0,
) -> bytes:
    """A batch around `payload`, compressed unless it `is_packed` already; its sum is right."""
    if codec is not Codec.NONE and not is_packed:
        payload = bytes(compress(codec, payload))
    base = now_ms if base_time is None else base_time
    checked = struct.pack(
        ">hiqqqhii",
        int(codec) if attributes is None else attributes,
        count - 1 if last_delta is None else last_delta,
        base,
        base if max_time is None else max_time,
        *producer,
        count,
    )
    checked += payload
    size = HEADER_SIZE - 12 + len(payload) + length_off if length is None else length
    head = struct.pack(">qiibI", base_offset, size, leader_epoch, magic, crc32c(checked) ^ crc_xor)
    whole = head + checked
    return whole[: len(whole) - cut] + tail


def lz4_linked(data: bytes) -> bytes:
    """A frame whose blocks need those before them, of which there are several."""
    packed: bytes = lz4.frame.compress(
        data, block_linked=True, block_size=lz4.frame.BLOCKSIZE_MAX64KB
    )
    return packed


def lz4_with(data: bytes, **options: bool) -> bytes:
    """A frame with checksums or a content size."""
    packed: bytes = lz4.frame.compress(data, block_linked=False, **options)
    return packed


def gzip_named(data: bytes) -> bytes:
    """A member with a file name and a comment's flag off."""
    plain = gzip.compress(data, mtime=0)
    return plain[:3] + b"\x08" + plain[4:10] + b"name\0" + plain[10:]


def zstd_streamed(data: bytes, window_log: int = 0) -> bytes:
    """A frame that does not say its content's size, as streaming encoders write it."""
    if window_log:
        parameters = zstandard.ZstdCompressionParameters(
            window_log=window_log, write_content_size=False
        )
        encoder = zstandard.ZstdCompressor(compression_params=parameters)
    else:
        encoder = zstandard.ZstdCompressor()
    stream = encoder.compressobj()
    return stream.compress(data) + stream.flush()


def zstd_many_headers(count: int) -> bytes:
    """One record with so many empty headers, compressed: kilobytes that hold millions of them."""
    body = b"\0\0\0" + b"\x01\x01" + encode_varint(count) + bytes(2 * count)
    return bytes(compress(Codec.ZSTD, encode_varint(len(body)) + body))
