"""The table: kinds of batches, most of which say of themselves what is not so.

Each is built for a time of the broker's clock and produced to a topic of one partition. What Apache
Kafka answers stands in `kafka.json`, recorded by `test_kafka.py`; what raftmq answers is the same,
but for the kinds in `DIFFERENT`, which say why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import zstandard
from attrs import frozen

from raftmq.codec import Codec, compress
from tests.poison.bytes_of import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    batch,
    gzip_named,
    header,
    long_form,
    lz4_linked,
    lz4_with,
    raw_varint,
    record,
    records,
    zstd_many_headers,
    zstd_streamed,
)

HOUR_MS: Final = 3_600_000
TOPICS: Final = {
    "plain": {},
    "compacted": {"cleanup.policy": "compact"},
    "stamped": {"message.timestamp.type": "LogAppendTime"},
    "zstd": {"compression.type": "zstd"},
    "recent": {"message.timestamp.before.max.ms": str(HOUR_MS)},
}
PACKED: Final = (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD)


@frozen
class Kind:
    """One kind: what is produced, and where."""

    name: str
    build: Callable[[int], bytes]
    topic: str = "plain"


def _sound() -> Iterator[Kind]:
    yield Kind("sound", lambda now: batch(records(), now))
    for codec in PACKED:
        yield Kind(
            f"sound {codec.name.lower()}",
            lambda now, codec=codec: batch(records(), now, codec=codec),
        )
    yield Kind("sound, many equal", lambda now: batch(records(9_000), now, count=9_000))
    yield Kind("null key", lambda now: batch(record(key=None), now, count=1))
    yield Kind("null value", lambda now: batch(record(value=None), now, count=1))
    yield Kind("null key and value", lambda now: batch(record(key=None, value=None), now, count=1))
    yield Kind("empty key and value", lambda now: batch(record(key=b"", value=b""), now, count=1))
    yield Kind("headers", lambda now: batch(record(headers=[header()] * 3), now, count=1))
    yield Kind(
        "null header value", lambda now: batch(record(headers=[header(value=None)]), now, count=1)
    )
    yield Kind("empty header name", lambda now: batch(record(headers=[header(b"")]), now, count=1))
    yield Kind("earlier than the first", lambda now: batch(record() + record(1, time=-50), now))
    yield Kind("without timestamps", lambda now: batch(records(), now, base_time=-1))
    yield Kind("a record's attributes", lambda now: batch(record(attributes=0x7F), now, count=1))


def _headers() -> Iterator[Kind]:
    for offset in (7, -1, LONG_MAX, LONG_MIN):
        yield Kind(
            f"base offset {offset}",
            lambda now, offset=offset: batch(records(), now, base_offset=offset),
        )
    yield Kind("leader epoch 9", lambda now: batch(records(), now, leader_epoch=9))
    for magic in (0, 1, 3, -1):
        yield Kind(f"magic {magic}", lambda now, magic=magic: batch(records(), now, magic=magic))
    yield Kind("checksum", lambda now: batch(records(), now, crc_xor=1))
    yield Kind("last byte cut", lambda now: batch(records(), now, cut=1))
    yield Kind("cut in its header", lambda now: batch(records(), now)[:40])
    yield Kind("cut before its magic", lambda now: batch(records(), now)[:14])
    for length in (INT_MIN, -1, 0, 13, 48, INT_MAX):
        yield Kind(
            f"batch length {length}",
            lambda now, length=length: batch(records(), now, length=length),
        )
    yield Kind("batch length one less", lambda now: batch(records(), now, length_off=-1))
    yield Kind("batch length one more", lambda now: batch(records(), now, length_off=1))
    yield Kind("bytes behind the batch", lambda now: batch(records(), now, tail=b"abcde"))
    yield Kind("zeros behind the batch", lambda now: batch(records(), now, tail=bytes(61)))
    yield Kind("two batches", lambda now: batch(records(), now) * 2)
    yield Kind("no batch", lambda now: b"")
    yield Kind("no records", lambda now: batch(b"", now, count=0, last_delta=-1))
    yield Kind("no records over an offset", lambda now: batch(b"", now, count=0, last_delta=0))
    yield Kind("records counted, none there", lambda now: batch(b"", now, count=1))
    for codec in (5, 6, 7):
        yield Kind(
            f"codec {codec}", lambda now, codec=codec: batch(records(), now, attributes=codec)
        )
    yield Kind("stamped by its producer", lambda now: batch(records(), now, attributes=8))
    yield Kind("transactional without id", lambda now: batch(records(), now, attributes=0x10))
    yield Kind("control batch", lambda now: batch(records(), now, attributes=0x20))
    yield Kind(
        "control batch of a marker",
        lambda now: batch(
            record(key=b"\0\0\0\0", value=bytes(6)),
            now,
            count=1,
            attributes=0x30,
            producer=(7, 0, -1),
        ),
    )
    yield Kind("delete horizon", lambda now: batch(records(), now, attributes=0x40))
    yield Kind("unused attributes", lambda now: batch(records(), now, attributes=0x7F00))
    for delta in (INT_MIN, -1, 0, 2, 5, INT_MAX):
        yield Kind(
            f"last offset delta {delta} of 2",
            lambda now, delta=delta: batch(records(), now, last_delta=delta),
        )
    for count in (INT_MIN, -1, 0, 1, 3, INT_MAX):
        yield Kind(
            f"count {count} of 2",
            lambda now, count=count: batch(records(), now, count=count, last_delta=1),
        )
    yield Kind("one record told of two", lambda now: batch(records(), now, count=1))
    yield Kind("three records told of two", lambda now: batch(records(), now, count=3))
    yield Kind("most records told of two", lambda now: batch(records(), now, count=INT_MAX))


def _producers() -> Iterator[Kind]:
    yield Kind("id without sequence", lambda now: batch(records(), now, producer=(5, 0, -1)))
    yield Kind("id with sequence -9", lambda now: batch(records(), now, producer=(5, 0, -9)))
    yield Kind("id -2", lambda now: batch(records(), now, producer=(-2, 0, 0)))
    yield Kind("sequence without id", lambda now: batch(records(), now, producer=(-1, -1, 5)))
    yield Kind("id with epoch -1", lambda now: batch(records(), now, producer=(6, -1, 0)))
    yield Kind("id with epoch -5", lambda now: batch(records(), now, producer=(8, -5, 0)))
    yield Kind("id, first batch", lambda now: batch(records(), now, producer=(9, 0, 0)))


def _times() -> Iterator[Kind]:
    for time in (LONG_MIN, -9, -1, 0, LONG_MAX):
        yield Kind(
            f"greatest timestamp {time}",
            lambda now, time=time: batch(records(), now, max_time=time),
        )
    yield Kind("greatest timestamp one less", lambda now: batch(records(), now, max_time=now - 1))
    yield Kind(
        "greatest timestamp an hour more",
        lambda now: batch(records(), now, max_time=now + 2 * HOUR_MS),
    )
    yield Kind(
        "two hours ahead, told of now",
        lambda now: batch(record() + record(1, time=2 * HOUR_MS), now),
    )
    yield Kind("two hours ahead", lambda now: batch(records(), now, base_time=now + 2 * HOUR_MS))
    for time in (LONG_MIN, -9, LONG_MAX):
        yield Kind(
            f"timestamp {time}", lambda now, time=time: batch(records(), now, base_time=time)
        )
    yield Kind(
        "timestamp beyond 64 bits",
        lambda now: batch(record(time=LONG_MAX) + record(1), now),
    )
    yield Kind(
        "timestamp below 64 bits",
        lambda now: batch(record(time=LONG_MIN) + record(1), now, base_time=-5, max_time=-5),
    )
    yield Kind(
        "timestamp delta of 11 bytes",
        lambda now: batch(record(time=b"\x80" * 10 + b"\0") + record(1), now),
    )
    yield Kind(
        "timestamp delta of 10 full bytes",
        lambda now: batch(record(time=b"\xff" * 9 + b"\x7f") + record(1), now),
    )
    yield Kind(
        "timestamp delta in long form",
        lambda now: batch(record(time=long_form(3, 4)) + record(1), now),
    )
    old = "two hours old"
    yield Kind(old, lambda now: batch(records(), now, base_time=now - 2 * HOUR_MS), "recent")
    yield Kind(
        f"second {old}", lambda now: batch(record() + record(1, time=-2 * HOUR_MS), now), "recent"
    )
    yield Kind(
        f"third {old}, packed",
        lambda now: batch(records() + record(2, time=-2 * HOUR_MS), now, count=3, codec=Codec.LZ4),
        "recent",
    )


def _one(name: str, codec: Codec, payload: bytes, count: int) -> Kind:
    where = "" if codec is Codec.NONE else f", {codec.name.lower()}"
    return Kind(name + where, lambda now: batch(payload, now, count=count, codec=codec))


def _records(codec: Codec) -> Iterator[Kind]:
    """Lies within, each in the second of two records, or in the only one."""

    def two(name: str, second: bytes) -> Kind:
        return _one(name, codec, record() + second, 2)

    yield two("record one byte longer than it says", record(1, size_off=-1))
    yield two("record one byte shorter than it says", record(1, size_off=1))
    for size in (0, -1, INT_MIN, INT_MAX, 1_000):
        yield two(f"record length {size}", record(1, size=size))
    yield _one("first record length 0", codec, record(size=0), 1)
    yield two("record length in long form", record(1, size=long_form(len(record(1)) - 1, 3)))
    yield two("record length of 6 bytes", record(1, size=long_form(len(record(1)) - 1, 6)))
    yield two("record cut in its length", b"\x80")
    yield two("record cut in its value", record(1)[:-4])
    yield two("bytes at a record's end", record(1, tail=b"\0\0"))
    yield two("record ends before its header count", record(1, cut=1))
    yield two("bytes behind the last record", record(1) + b"\0\0\0")
    yield two("zeros behind the last record", record(1) + bytes(40))
    yield two("a third record behind two", record(1) + record(2))
    yield two("offset delta again", record(0))
    yield two("offset delta with a gap", record(5))
    yield two("offset delta -1", record(-1))
    yield two("greatest offset delta", record(INT_MAX))
    yield _one("offset deltas begin at 1", codec, record(1) + record(2), 2)
    yield _one("offset deltas go down", codec, record(1) + record(0), 2)
    yield two("offset delta in long form", record(offset=long_form(1, 3)))
    yield two("offset delta of 33 bits", record(offset=raw_varint(1 << 33)))
    for what in ("key", "value"):
        for size in (-2, INT_MIN, INT_MAX, 30, 4):
            lie = {f"{what}_size": size}
            yield two(f"{what} length {size}", record(1, **lie))  # type: ignore[arg-type]
        lie = {f"{what}_size": long_form(5, 2), what: b"12345"}
        yield two(f"{what} length in long form", record(1, **lie))  # type: ignore[arg-type]
    for count in (-1, INT_MIN, INT_MAX, 1, 5):
        yield two(f"header count {count} of none", record(1, header_count=count))
    yield two("fewer headers than there are", record(1, headers=[header()] * 3, header_count=2))
    yield two("more headers than there are", record(1, headers=[header()] * 3, header_count=4))
    yield two("null header name", record(1, headers=[header(None)]))
    yield two("header name length -2", record(1, headers=[header(name_size=-2)]))
    yield two("header name longer than its record", record(1, headers=[header(name_size=90)]))
    yield two("header name not UTF-8", record(1, headers=[header(b"\xff\xfe")]))
    yield two("header value length -2", record(1, headers=[header(value_size=-2)]))
    yield two("header value longer than its record", record(1, headers=[header(value_size=90)]))
    yield two("no key in one of two", record(1, key=None))


def _packed(codec: Codec) -> Iterator[Kind]:
    """A payload that is not what its codec says."""
    name = codec.name.lower()
    whole = bytes(compress(codec, records(200)))

    def kind(what: str, payload: bytes, count: int = 200) -> Kind:
        return Kind(
            f"{name}: {what}",
            lambda now: batch(payload, now, count=count, codec=codec, is_packed=True),
        )

    yield kind("empty", b"")
    yield kind("garbage", b"these are not the bytes of any codec")
    yield kind("not packed at all", records(200))
    yield kind("one byte cut", whole[:-1])
    yield kind("half cut", whole[: len(whole) // 2])
    yield kind("bytes behind", whole + b"abc")
    yield kind("zeros behind", whole + bytes(16))
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes((whole[middle] ^ 0x55,)) + whole[middle + 1 :]
    yield kind("a byte flipped", flipped)
    yield kind("nothing inside", bytes(compress(codec, b"")), 1)
    half = records(200)
    cut = 100 * len(half) // 200
    two = bytes(compress(codec, half[:cut])) + bytes(compress(codec, half[cut:]))
    yield kind("two frames", two)
    yield kind("none inside packed", bytes(compress(codec, bytes(compress(codec, half)))))


def _codecs() -> Iterator[Kind]:
    for codec in PACKED:
        yield from _packed(codec)

    def kind(name: str, codec: Codec, payload: bytes, count: int = 200) -> Kind:
        return Kind(name, lambda now: batch(payload, now, count=count, codec=codec, is_packed=True))

    data = records(200)
    yield kind("plain records said to be gzip", Codec.GZIP, data)
    yield Kind(
        "gzip said to be plain",
        lambda now: batch(bytes(compress(Codec.GZIP, data)), now, count=200),
    )
    yield kind("gzip with a name", Codec.GZIP, gzip_named(data))
    yield kind("gzip said to be zstd", Codec.ZSTD, bytes(compress(Codec.GZIP, data)))
    yield kind(
        "lz4 with sums and size",
        Codec.LZ4,
        lz4_with(data, content_checksum=True, block_checksum=True, store_size=True),
    )
    sums = lz4_with(data, content_checksum=True, block_checksum=False)
    yield kind("lz4 with a wrong sum", Codec.LZ4, sums[:-1] + bytes((sums[-1] ^ 1,)))
    linked = records(9_000)
    yield kind("lz4 of linked blocks", Codec.LZ4, lz4_linked(linked), 9_000)
    plain = lz4_with(data)
    yield kind(
        "lz4 with a wrong header sum", Codec.LZ4, plain[:6] + bytes((plain[6] ^ 1,)) + plain[7:]
    )
    import cramjam

    raw = bytes(cramjam.snappy.compress_raw(data))
    yield kind("snappy as one block", Codec.SNAPPY, raw)
    yield kind("snappy that claims more", Codec.SNAPPY, raw_varint(1 << 30) + raw[2:])
    yield kind("zstd without its size", Codec.ZSTD, zstd_streamed(data))
    yield kind("zstd with a window of 8 MiB", Codec.ZSTD, zstd_streamed(data, 23))
    yield kind("zstd with a window of 256 MiB", Codec.ZSTD, zstd_streamed(data, 28))
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    yield kind(
        "zstd with a frame to skip", Codec.ZSTD, skippable + bytes(compress(Codec.ZSTD, data))
    )
    yield kind(
        "zstd with a sum", Codec.ZSTD, zstandard.ZstdCompressor(write_checksum=True).compress(data)
    )


def _bombs() -> Iterator[Kind]:
    many = zstd_many_headers(7_000_000)
    yield Kind(
        "seven million headers, packed",
        lambda now: batch(many, now, count=1, codec=Codec.ZSTD, is_packed=True, max_time=now - 1),
    )
    yield Kind(
        "300,000 headers, packed",
        lambda now: batch(
            zstd_many_headers(300_000), now, count=1, codec=Codec.ZSTD, is_packed=True
        ),
    )
    large = record(value=bytes(32 << 20))
    for codec in (Codec.GZIP, Codec.ZSTD):
        yield Kind(
            f"32 MiB in one record, {codec.name.lower()}",
            lambda now, codec=codec: batch(large, now, count=1, codec=codec),
        )


def _topics() -> Iterator[Kind]:
    yield Kind("compacted: keys", lambda now: batch(records(), now), "compacted")
    yield Kind("compacted: no key", lambda now: batch(record(key=None), now, count=1), "compacted")
    for codec in (Codec.NONE, Codec.GZIP):
        payload = record() + record(1, key=None) + record(2, key=None)
        yield Kind(
            f"compacted: one key of three, {codec.name.lower()}",
            lambda now, payload=payload, codec=codec: batch(payload, now, count=3, codec=codec),
            "compacted",
        )
    yield Kind(
        "stamped: by its producer", lambda now: batch(records(), now, attributes=8), "stamped"
    )
    yield Kind(
        "stamped: any time", lambda now: batch(records(), now, base_time=LONG_MAX), "stamped"
    )
    yield Kind(
        "stamped: null header name",
        lambda now: batch(record(headers=[header(None)]), now, count=1),
        "stamped",
    )
    for name, payload in (
        ("sound", records()),
        ("offset delta again", record() * 2),
        ("null header name", record() + record(1, headers=[header(None)])),
        ("bytes behind", records() + b"\0\0"),
        ("key length -2", record() + record(1, key_size=-2)),
    ):
        for codec in (Codec.NONE, Codec.LZ4):
            yield Kind(
                f"zstd topic: {name}, {codec.name.lower()}",
                lambda now, payload=payload, codec=codec: batch(payload, now, codec=codec),
                "zstd",
            )


def _all() -> Iterator[Kind]:
    yield from _sound()
    yield from _headers()
    yield from _producers()
    yield from _times()
    for codec in (Codec.NONE, Codec.GZIP):
        yield from _records(codec)
    yield from _codecs()
    yield from _bombs()
    yield from _topics()


KINDS: Final = {kind.name: kind for kind in _all()}


@frozen
class Different:
    """What raftmq answers instead, and why."""

    code: str
    why: str


def _differences() -> Iterator[tuple[str, Different]]:
    final = "INVALID_RECORD"
    numbered = Different(final, "consumers would be told offsets twice, or of another batch")
    gzip_fails = Different(final, "Kafka cannot number packed records anew; consumers, see above")
    for name in (
        "offset delta again",
        "offset delta with a gap",
        "offset delta -1",
        "greatest offset delta",
        "offset deltas begin at 1",
        "offset deltas go down",
        "offset delta of 33 bits",
    ):
        yield name, numbered
        yield f"{name}, gzip", gzip_fails
    rebuilt = Different(final, "Kafka numbers them anew; a producer that cannot count is told so")
    yield "zstd topic: offset delta again, none", rebuilt
    yield "zstd topic: offset delta again, lz4", rebuilt
    unread = Different(final, "Kafka does not look at it where records are packed; consumers do")
    for name in (
        "record one byte longer than it says",
        "record one byte shorter than it says",
        *(f"record length {size}" for size in (0, -1, INT_MIN, INT_MAX, 1_000)),
        "first record length 0",
    ):
        yield f"{name}, gzip", unread
    text = Different(final, "it is text (KIP-82), and clients in Python stop where it is not")
    yield "header name not UTF-8", text
    yield "header name not UTF-8, gzip", text
    behind = Different(final, "Kafka stores bytes behind the frame, at which other decoders stop")
    for name in ("gzip", "snappy", "lz4"):
        yield f"{name}: bytes behind", behind
    yield "gzip: zeros behind", behind
    yield "lz4: zeros behind", behind
    yield "lz4 with a wrong sum", Different(final, "Java does not look at it; librdkafka does")
    yield "bytes behind the batch", Different(final, "Kafka drops them without a word")
    yield "timestamp delta of 10 full bytes", Different(final, "70 bits are no timestamp")
    yield "snappy that claims more", Different("MESSAGE_TOO_LARGE", "its claim is not believed")
    yield (
        "seven million headers, packed",
        Different("MESSAGE_TOO_LARGE", "a batch has a million record headers at most"),
    )
    for name in ("transactional without id", "control batch of a marker"):
        yield name, Different(final, "there are no transactions yet to be authorized for")
    yield "id with epoch -1", Different("INVALID_PRODUCER_EPOCH", "an id goes with an epoch")


DIFFERENT: Final = dict(_differences())
"""Beside these, where Kafka answers UNKNOWN_SERVER_ERROR raftmq answers INVALID_RECORD: the fault
is not the broker's. To clients both are final."""
