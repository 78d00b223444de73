"""The compression codecs of record batches, bounded.

It never trusts a size field: every decoder stops at `output_max` bytes *while* it decompresses, and
everything that is wrong with the input (truncated, trailing bytes, too large, unknown codec) is one
error, `CorruptBatchError`.

Clients really send: snappy as xerial blocks (Java) and as one raw block (librdkafka); lz4
frames with and without a content size; zstd frames with and without a content size (streaming
encoders leave it out). Snappy is written as xerial blocks, which every client reads.
"""

from __future__ import annotations

import zlib
from enum import IntEnum
from typing import Any, Final

import cramjam
import lz4.frame
import zstandard

from raftmq.errors import CorruptBatchError, ErrorCode
from raftmq.types import Buffer

OUTPUT_MAX: Final = 256 << 20
"""No reader decompresses a batch beyond this: what a broker takes is far below."""
PRODUCED_OUTPUT_MAX: Final = 64 << 20
"""A broker decompresses at most so many bytes of a produced batch, whatever the ratio: log lines
that repeat shrink to a two hundredth."""

_CHUNK: Final = 1 << 18
_GZIP_WINDOW: Final = 31  # zlib's "gzip container, 32 KiB window"

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK: Final = 32 << 10
_SNAPPY_RATIO_MAX: Final = 32  # a copy element of 3 bytes yields at most 64

_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE: Final = b"\x2a\x4d\x18"
_ZSTD_LEVEL: Final = 3
_spare_encoders: Final[list[zstandard.ZstdCompressor]] = []  # of that level
_spare_decoders: Final[list[zstandard.ZstdDecompressor]] = []
"""Zstd's working memory, which takes ten times as long to make as a small batch to compress. One in
use is out of its list, so no two threads ever use the same. None that has read a stream is kept: it
may hold a window of a hundred megabytes."""


class OutputTooLargeError(CorruptBatchError):
    """More bytes than the reader may hold (MESSAGE_TOO_LARGE)."""

    code = ErrorCode.MESSAGE_TOO_LARGE


class Codec(IntEnum):
    """The three lowest bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def output_limit(message_bytes_max: int) -> int:
    """How far a produced batch may decompress under a topic's `max.message.bytes`: up to
    `PRODUCED_OUTPUT_MAX`, or as far as uncompressed batches may be larger than that."""
    return max(PRODUCED_OUTPUT_MAX, min(message_bytes_max, OUTPUT_MAX))


def compress(codec: Codec, data: Buffer, level: int | None = None) -> Buffer:
    """Compress `data`; `level` is the codec's own scale, None its default."""
    if codec is Codec.NONE:
        return data
    if codec is Codec.GZIP:
        encoder = zlib.compressobj(-1 if level is None else level, zlib.DEFLATED, _GZIP_WINDOW)
        return encoder.compress(data) + encoder.flush()
    if codec is Codec.SNAPPY:
        return _compress_xerial(data)
    if codec is Codec.LZ4:
        frame: bytes = lz4.frame.compress(
            data,
            compression_level=0 if level is None else level,
            block_size=lz4.frame.BLOCKSIZE_MAX64KB,
            block_linked=False,  # Java reads no other
            store_size=False,
        )
        return frame
    assert codec is Codec.ZSTD
    return _compress_zstd(data, _ZSTD_LEVEL if level is None else level)


def decompress(
    codec: int, data: Buffer, *, output_max: int, for_all_clients: bool = False
) -> Buffer:
    """Decompress `data` into at most `output_max` bytes.

    Args:
        codec: its number.
        data: all of it.
        output_max: in bytes.
        for_all_clients: take only forms that every client of Kafka reads. Java's LZ4 reads a single
            frame whose blocks are independent.

    Raises:
        OutputTooLargeError: larger than `output_max`.
        CorruptBatchError: malformed, truncated or followed by other bytes, or not one of Kafka's
            codecs.
    """
    if codec == Codec.NONE:
        if len(data) > output_max:
            raise _too_large(output_max)
        return data
    if codec == Codec.GZIP:
        return _decompress_gzip(data, output_max)
    if codec == Codec.SNAPPY:
        return _decompress_snappy(data, output_max)
    if codec == Codec.LZ4:
        if for_all_clients:
            _check_lz4_frame(data)
        return _decompress_lz4(data, output_max, for_all_clients)
    if codec == Codec.ZSTD:
        return _decompress_zstd(data, output_max)
    raise CorruptBatchError(f"unknown compression codec {codec}")


def _too_large(output_max: int) -> OutputTooLargeError:
    return OutputTooLargeError(f"compressed records exceed {output_max} bytes")


def _decompress_gzip(data: Buffer, output_max: int) -> Buffer:
    pieces: list[bytes] = []
    left = output_max
    rest: Buffer = data
    try:
        while True:  # gzip members may follow each other (RFC 1952 §2.2)
            decoder = zlib.decompressobj(_GZIP_WINDOW)
            piece = decoder.decompress(rest, left + 1)
            if len(piece) > left:
                raise _too_large(output_max)
            pieces.append(piece)
            left -= len(piece)
            if not decoder.eof:
                raise CorruptBatchError("gzip: truncated")
            rest = decoder.unused_data
            if not rest:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except zlib.error as error:
        raise CorruptBatchError(f"gzip: {error}") from error


def _compress_xerial(data: Buffer) -> bytes:
    view = memoryview(data)
    pieces: list[Buffer] = [_XERIAL_HEADER]
    for start in range(0, len(view), _XERIAL_BLOCK):
        block = bytes(cramjam.snappy.compress_raw(view[start : start + _XERIAL_BLOCK]))
        pieces.append(len(block).to_bytes(4, "big"))
        pieces.append(block)
    return b"".join(pieces)


def _decompress_snappy(data: Buffer, output_max: int) -> Buffer:
    view = memoryview(data)
    if bytes(view[:8]) != _XERIAL_MAGIC:
        return _decompress_snappy_block(view, output_max)
    if len(view) < len(_XERIAL_HEADER):
        raise CorruptBatchError("snappy: truncated xerial header")
    pieces: list[Buffer] = []
    left = output_max
    position = len(_XERIAL_HEADER)
    while position < len(view):
        if bytes(view[position : position + 8]) == _XERIAL_MAGIC:  # streams glued together
            position += len(_XERIAL_HEADER)
            continue
        start = position + 4
        size = int.from_bytes(view[position:start], "big")
        if start + size > len(view) or start > len(view):
            raise CorruptBatchError("snappy: truncated xerial block")
        piece = _decompress_snappy_block(view[start : start + size], left)
        left -= len(piece)
        pieces.append(piece)
        position = start + size
    return b"".join(pieces)


def _decompress_snappy_block(block: memoryview, output_max: int) -> Buffer:
    try:
        size: int = cramjam.snappy.decompress_raw_len(block)
        if size > output_max:
            raise _too_large(output_max)
        if size > _SNAPPY_RATIO_MAX * len(block):
            raise CorruptBatchError("snappy: claims more than its bytes can hold")
        output = bytearray(size)
        written: int = cramjam.snappy.decompress_raw_into(block, output)
    except (cramjam.DecompressionError, cramjam.CompressionError) as error:
        raise CorruptBatchError(f"snappy: {error}") from error
    if written != size:
        raise CorruptBatchError("snappy: shorter than it claims")
    return output


def _check_lz4_frame(data: Buffer) -> None:
    try:
        about: dict[str, Any] = lz4.frame.get_frame_info(data)
    except RuntimeError as error:
        raise CorruptBatchError(f"lz4: {error}") from error
    if about["block_linked"] or about["skippable"]:
        raise CorruptBatchError("lz4: a frame that is skipped, or whose blocks are linked")


def _decompress_lz4(data: Buffer, output_max: int, is_one_frame: bool) -> Buffer:
    pieces: list[bytes] = []
    left = output_max
    rest: Buffer = data
    try:
        while True:
            decoder = lz4.frame.LZ4FrameDecompressor()
            source: Buffer = rest
            while not decoder.eof:
                # The decoder allocates what it is allowed to return, so allow it a chunk at a time.
                piece: bytes = decoder.decompress(source, max_length=min(left + 1, _CHUNK))
                source = b""
                if len(piece) > left:
                    raise _too_large(output_max)
                if not piece and not decoder.eof and decoder.needs_input:
                    raise CorruptBatchError("lz4: truncated")
                pieces.append(piece)
                left -= len(piece)
            rest = decoder.unused_data or b""
            if not rest:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if is_one_frame:
                raise CorruptBatchError("lz4: bytes behind the frame")
    except RuntimeError as error:
        raise CorruptBatchError(f"lz4: {error}") from error


def _compress_zstd(data: Buffer, level: int) -> bytes:
    if level != _ZSTD_LEVEL:
        return zstandard.ZstdCompressor(level=level).compress(data)
    try:
        encoder = _spare_encoders.pop()
    except IndexError:
        encoder = zstandard.ZstdCompressor(level=level)
    compressed = encoder.compress(data)
    _spare_encoders.append(encoder)
    return compressed


def _decompress_zstd_frame(view: memoryview) -> bytes:
    """One frame that says its size."""
    try:
        decoder = _spare_decoders.pop()
    except IndexError:
        decoder = zstandard.ZstdDecompressor()
    content = decoder.decompress(view, allow_extra_data=False)
    _spare_decoders.append(decoder)
    return content


def _decompress_zstd(data: Buffer, output_max: int) -> Buffer:
    view = memoryview(data)
    _check_zstd_frames(view)
    try:
        claimed = zstandard.frame_content_size(view)
        if claimed > output_max:
            raise _too_large(output_max)
        if claimed > 0 and claimed <= len(view) * 64:
            try:
                # `max_output_size` would be ignored, so the claim was judged above.
                return _decompress_zstd_frame(view)
            except zstandard.ZstdError:
                pass  # several frames, or damage: the streaming reader below decides
        pieces: list[bytes] = []
        left = output_max
        decoder = zstandard.ZstdDecompressor()
        with decoder.stream_reader(view, read_across_frames=True) as reader:
            while piece := reader.read(min(left + 1, _CHUNK)):
                if len(piece) > left:
                    raise _too_large(output_max)
                pieces.append(piece)
                left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except zstandard.ZstdError as error:
        raise CorruptBatchError(f"zstd: {error}") from error


def _check_zstd_frames(view: memoryview) -> None:
    """Walk the block headers to the very end: the streaming reader keeps silent about truncation.

    Layout (RFC 8878 §3.1.1): magic 4, descriptor 1, window 0-1, dictionary id 0-4, content size
    0-8, then blocks of a 3-byte little-endian header (last:1, type:2, size:21), then checksum 0-4.
    """
    size = len(view)
    position = 0
    while position < size:
        if bytes(view[position + 1 : position + 4]) == _ZSTD_SKIPPABLE and view[position] >> 4 == 5:
            position += 8 + int.from_bytes(view[position + 4 : position + 8], "little")
            continue
        if bytes(view[position : position + 4]) != _ZSTD_MAGIC or position + 5 > size:
            raise CorruptBatchError("zstd: not a frame")
        descriptor = view[position + 4]
        is_single_segment = descriptor >> 5 & 1
        content_size_bytes = (is_single_segment, 2, 4, 8)[descriptor >> 6]
        dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
        position += 5 + (1 - is_single_segment) + dictionary_bytes + content_size_bytes
        is_last = False
        while not is_last:
            if position + 3 > size:
                raise CorruptBatchError("zstd: truncated")
            block = int.from_bytes(view[position : position + 3], "little")
            is_last = bool(block & 1)
            is_run = block >> 1 & 3 == 1  # one byte, repeated
            position += 3 + (1 if is_run else block >> 3)
        if descriptor >> 2 & 1:
            position += 4
    if position != size or not size:
        raise CorruptBatchError("zstd: truncated")
