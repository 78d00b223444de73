"""Codecs: round trips, other encoders' forms, truncation, and limits on output."""

from __future__ import annotations

import contextlib
import gzip
import io
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from raftmq.codec import OUTPUT_MAX, PRODUCED_OUTPUT_MAX, Codec, compress, decompress, output_limit
from raftmq.errors import CorruptBatchError, ErrorCode

COMPRESSING = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
ROOM = 1 << 24
TEXT = b"the quick brown fox jumps over the lazy dog, " * 3000
NOISE = random.Random(7).randbytes(150_000)


def streaming_zstd(data: bytes) -> bytes:
    encoder = zstandard.ZstdCompressor().compressobj()
    return encoder.compress(data) + encoder.flush()


def several_zstd_frames(data: bytes) -> bytes:
    half = len(data) // 2
    first = zstandard.ZstdCompressor().compress(data[:half])
    skippable = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
    return first + skippable + streaming_zstd(data[half:])


def checked_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def java_snappy_glued(data: bytes) -> bytes:
    half = len(data) // 2
    return bytes(compress(Codec.SNAPPY, data[:half])) + bytes(compress(Codec.SNAPPY, data[half:]))


def several_gzip_members(data: bytes) -> bytes:
    half = len(data) // 2
    return gzip.compress(data[:half]) + gzip.compress(data[half:])


FORMS = [
    pytest.param(Codec.GZIP, gzip.compress, id="gzip"),
    pytest.param(Codec.GZIP, several_gzip_members, id="gzip members"),
    pytest.param(Codec.SNAPPY, lambda d: bytes(cramjam.snappy.compress_raw(d)), id="snappy raw"),
    pytest.param(Codec.SNAPPY, java_snappy_glued, id="snappy xerial streams"),
    pytest.param(Codec.LZ4, lz4.frame.compress, id="lz4 with content size"),
    pytest.param(Codec.LZ4, lambda d: lz4.frame.compress(d, store_size=False), id="lz4 without"),
    pytest.param(
        Codec.LZ4,
        lambda d: lz4.frame.compress(d, content_checksum=True, block_linked=False),
        id="lz4 checksum",
    ),
    pytest.param(Codec.ZSTD, zstandard.compress, id="zstd with content size"),
    pytest.param(Codec.ZSTD, streaming_zstd, id="zstd streaming"),
    pytest.param(Codec.ZSTD, checked_zstd, id="zstd checksum"),
    pytest.param(Codec.ZSTD, several_zstd_frames, id="zstd frames"),
]


@given(data=st.binary(max_size=3000), codec=st.sampled_from(Codec))
def test_round_trip(data: bytes, codec: Codec) -> None:
    assert bytes(decompress(codec, compress(codec, data), output_max=len(data))) == data


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE], ids=["empty", "one", "text", "noise"])
def test_round_trip_of_large_data(codec: Codec, data: bytes) -> None:
    compressed = memoryview(compress(codec, data))
    assert bytes(decompress(codec, compressed, output_max=ROOM)) == data


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_levels(codec: Codec) -> None:
    for level in (1, 9):
        compressed = compress(codec, TEXT, level)
        assert bytes(decompress(codec, compressed, output_max=ROOM)) == TEXT


@pytest.mark.parametrize(("codec", "encode"), FORMS)
@pytest.mark.parametrize("data", [b"x", TEXT, NOISE], ids=["one", "text", "noise"])
def test_forms_that_clients_send(codec: Codec, encode, data: bytes) -> None:  # type: ignore[no-untyped-def]
    compressed = encode(data)
    assert bytes(decompress(codec, compressed, output_max=len(data))) == data
    assert bytes(decompress(codec, bytearray(compressed), output_max=ROOM)) == data


@pytest.mark.parametrize(("codec", "encode"), FORMS)
def test_limit_is_exact(codec: Codec, encode) -> None:  # type: ignore[no-untyped-def]
    compressed = encode(TEXT)
    with pytest.raises(CorruptBatchError) as caught:
        decompress(codec, compressed, output_max=len(TEXT) - 1)
    assert caught.value.code is ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize(("codec", "encode"), FORMS)
def test_truncated_or_continued_input_is_refused(codec: Codec, encode) -> None:  # type: ignore[no-untyped-def]
    compressed = encode(TEXT[:4000])
    # A cut between two gzip members or two xerial blocks leaves a whole, shorter stream.
    for cut in range(1, len(compressed)):
        try:
            got = decompress(codec, compressed[:cut], output_max=ROOM)
        except CorruptBatchError:
            continue
        assert len(got) in (0, 2000)
    with pytest.raises(CorruptBatchError):
        decompress(codec, compressed + b"\x00\x01\x02\x03\x04", output_max=ROOM)


@settings(max_examples=200)
@given(codec=st.sampled_from(Codec), data=st.binary(max_size=200))
def test_noise_is_refused_or_bounded(codec: Codec, data: bytes) -> None:
    with contextlib.suppress(CorruptBatchError):
        assert len(decompress(codec, data, output_max=1000)) <= 1000


@settings(max_examples=200)
@given(st.data())
def test_damage_is_refused_or_bounded(data: st.DataObject) -> None:
    codec, encode = data.draw(st.sampled_from([tuple(form.values) for form in FORMS]))
    compressed = bytearray(encode(TEXT[:2000]))
    position = data.draw(st.integers(0, len(compressed) - 1))
    compressed[position] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CorruptBatchError):
        assert len(decompress(codec, compressed, output_max=5000)) <= 5000


def bomb(codec: Codec) -> bytes:
    zeros = bytes(64 << 20)
    if codec is Codec.ZSTD:
        return streaming_zstd(zeros)
    if codec is Codec.LZ4:
        return lz4.frame.compress(zeros, store_size=False)
    if codec is Codec.GZIP:
        out = io.BytesIO()
        encoder = zlib.compressobj(1, zlib.DEFLATED, 31)
        out.write(encoder.compress(zeros) + encoder.flush())
        return out.getvalue()
    return bytes(cramjam.snappy.compress_raw(zeros))


@pytest.mark.slow
@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_bomb_stops_at_the_limit(codec: Codec) -> None:
    compressed = bomb(codec)
    with pytest.raises(CorruptBatchError, match="exceed"):
        decompress(codec, compressed, output_max=1 << 20)


def test_claims_are_not_believed() -> None:
    # Snappy's preamble claims 200 MB over a handful of bytes: refused before anything is allocated.
    claim = bytes([0x80, 0x84, 0xAF, 0x5F]) + b"\x00a"
    with pytest.raises(CorruptBatchError, match="claims"):
        decompress(Codec.SNAPPY, claim, output_max=OUTPUT_MAX)
    # A zstd frame that says 8 GB.
    frame = b"\x28\xb5\x2f\xfd\xe0" + (8 << 30).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(CorruptBatchError):
        decompress(Codec.ZSTD, frame, output_max=OUTPUT_MAX)
    # An lz4 frame whose content size is wrong.
    honest = lz4.frame.compress(b"abc", store_size=True)
    with pytest.raises(CorruptBatchError):
        decompress(Codec.LZ4, honest[:6] + b"\xff" * 8 + honest[14:], output_max=OUTPUT_MAX)


def test_xerial_bounds() -> None:
    header = bytes(compress(Codec.SNAPPY, b""))
    assert len(header) == 16
    for broken in (header[:12], header + b"\x00\x00", header + b"\x00\x00\x10\x00abc"):
        with pytest.raises(CorruptBatchError):
            decompress(Codec.SNAPPY, broken, output_max=ROOM)


def test_unknown_codec() -> None:
    with pytest.raises(CorruptBatchError, match="codec 5"):
        decompress(5, b"", output_max=10)


def test_uncompressed_obeys_the_limit_too() -> None:
    with pytest.raises(CorruptBatchError):
        decompress(Codec.NONE, b"12345", output_max=4)


def test_output_limit() -> None:
    assert output_limit(1000) == PRODUCED_OUTPUT_MAX
    assert output_limit(100 << 20) == 100 << 20
    assert output_limit(1 << 30) == OUTPUT_MAX, "what is stored can be read"


@pytest.mark.parametrize(
    "frame",
    [
        lz4.frame.compress(TEXT * 100, block_linked=True, block_size=lz4.frame.BLOCKSIZE_MAX64KB),
        2 * lz4.frame.compress(TEXT, block_linked=False),
        lz4.frame.compress(TEXT, block_linked=False) + b"abc",
        b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
        b"",
    ],
    ids=["linked blocks", "two frames", "bytes behind", "a frame to skip", "nothing"],
)
def test_lz4_that_java_cannot_read(frame: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        decompress(Codec.LZ4, frame, output_max=200 * len(TEXT), for_all_clients=True)
    sound = lz4.frame.compress(TEXT, block_linked=False)
    assert decompress(Codec.LZ4, sound, output_max=len(TEXT), for_all_clients=True) == TEXT


def test_lz4_blocks_stand_alone() -> None:
    """Java's client refuses frames whose blocks depend on each other, which are lz4's default."""
    frame = compress(Codec.LZ4, bytes(range(256)) * 1024)
    assert frame[4] & 0x20, "FLG: block independence"


def test_zstd_in_many_threads_side_by_side() -> None:
    """Working memory is kept for the next batch, and no two threads may use the same at a time."""

    def there_and_back(seed: int) -> None:
        data = random.Random(seed).randbytes(30_000) * 3
        for _ in range(30):
            packed = compress(Codec.ZSTD, data)
            assert bytes(decompress(Codec.ZSTD, packed, output_max=len(data))) == data
            broken = bytearray(packed)
            broken[len(broken) // 2] ^= 0xFF
            with contextlib.suppress(CorruptBatchError):
                decompress(Codec.ZSTD, broken, output_max=len(data))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(there_and_back, range(8))) == list(repeat(None, 8))
