"""Entries that are due later, packed in arrays: 20 bytes each, 46 where it has a key.

A `Run` is made once from entries in their order. It shrinks from its start as entries are taken
out, from its end where it is cut, and within as keys are cancelled; only a merge of two runs gives
back what is gone within. It never grows.

Invariant: `live` entries from the first one on are pending; those that are gone stay out for good.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from struct import Struct
from sys import byteorder
from typing import Any, Final, NamedTuple, TypeAlias

DIGEST_BYTES: Final = 16
_NO_KEY: Final = bytes(DIGEST_BYTES)
_DIGEST: Final = Struct(f"{DIGEST_BYTES}s")
_HASH_BYTES: Final = 8
_GONE: Final = -2

Fields: TypeAlias = tuple[int, int, int, bytes | None]
"""Those of an `Entry`."""


class Place(NamedTuple):
    """Where an entry stands in the order of deliveries."""

    due_ms: int
    offset: int


class Entry(NamedTuple):
    """One pending record; entries are in the order of their places. `key` is a digest of
    `DIGEST_BYTES`, `position` that of the record in its batch, -1 where it is not known."""

    due_ms: int
    offset: int
    position: int
    key: bytes | None

    @property
    def place(self) -> Place:
        """Where it stands."""
        return Place(self.due_ms, self.offset)


class Run:
    """Some entries, in order.

    Attributes:
        live: how many are pending.
    """

    __slots__ = (
        *("_by_hash", "_digests", "_due", "_first", "_hashes", "_next", "_offsets", "_positions"),
        "live",
    )

    def __init__(self, entries: Sequence[Fields]) -> None:
        """`entries` are sorted, 65,536 at most."""
        columns: Iterable[tuple[Any, ...]] = zip(*entries, strict=True) if entries else ((),) * 4
        due, offsets, positions, keys = columns
        self._due: array[int] = array("q", due)
        self._offsets: array[int] = array("q", offsets)
        self._positions: array[int] = array("i", positions)
        self._next = 0
        self._first = -1
        self.live = len(entries)
        self._digests = b"".join([key or _NO_KEY for key in keys]) if any(keys) else b""
        hashes = array("Q", self._digests)[:: DIGEST_BYTES // _HASH_BYTES]
        keyed = sorted(
            [pair for pair in zip(hashes, range(len(keys)), strict=False) if keys[pair[1]]]
        )
        self._hashes = array("Q", [one for one, _ in keyed])
        self._by_hash = array("H", [index for _, index in keyed])
        assert not keyed or len(self._digests) == len(entries) * DIGEST_BYTES, "keys are digests"

    @property
    def head(self) -> Place | None:
        """The place of the first entry; None: all are gone."""
        index, positions = self._next, self._positions
        end = len(positions)
        while index < end and positions[index] == _GONE:
            index += 1
        self._next = index
        return Place(self._due[index], self._offsets[index]) if index < end else None

    @property
    def first_offset(self) -> int:
        """The least offset of an entry; there has to be one."""
        assert self.live, "a run of nothing is thrown away"
        if self._first < self._next or self._positions[self._first] == _GONE:
            self._first = min(self._indexes(), key=self._offsets.__getitem__)
        return self._offsets[self._first]

    def pop(self) -> Entry:
        """Take out the entry at the head, which was looked at."""
        index = self._next
        assert self._positions[index] != _GONE, "the head was looked at"
        self._next += 1
        self.live -= 1
        return self._entry(index)

    def entries(self) -> list[Fields]:
        """All of them, in order."""
        start = self._next
        keys: Iterable[bytes | None] = repeat(None)
        if self._digests:
            digests = memoryview(self._digests)[start * DIGEST_BYTES :]
            keys = [None if key == _NO_KEY else key for (key,) in _DIGEST.iter_unpack(digests)]
        columns = self._due[start:], self._offsets[start:], self._positions[start:]
        return [row for row in zip(*columns, keys, strict=False) if row[2] != _GONE]

    def places(self, step: int) -> Iterator[Place]:
        """Some of them: those among every so many."""
        for index in range(self._next, len(self._due), step):
            if self._positions[index] != _GONE:
                yield Place(self._due[index], self._offsets[index])

    def cancel(self, key: bytes) -> int:
        """Take out all entries of a key; how many there were."""
        wanted, hashes = _hash(key), self._hashes
        at, count = bisect_left(hashes, wanted), 0
        while at < len(hashes) and hashes[at] == wanted:
            index = self._by_hash[at]
            at += 1
            if not self._next <= index < len(self._due) or self._positions[index] == _GONE:
                continue
            if self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] == key:
                self._positions[index] = _GONE
                count += 1
        self.live -= count
        return count

    def drop_up_to(self, place: Place) -> int:
        """Take out all entries up to a place, itself included; how many there were."""
        end = self._index_of(Place(place.due_ms, place.offset + 1))
        gone = end - self._next - self._positions[self._next : end].count(_GONE)
        self._next = end
        self.live -= gone
        return gone

    def cut(self, place: Place) -> tuple[int, int]:
        """Take out all entries from a place on; how many there were, and an offset that is not
        above any of theirs, -1 for none."""
        end = self._index_of(place)
        gone = len(self._due) - end - self._positions[end:].count(_GONE)
        if not gone:
            return 0, -1
        first = min(self._offsets[end:])
        del self._due[end:], self._offsets[end:], self._positions[end:]
        self._digests = self._digests[: end * DIGEST_BYTES]
        if self._first >= end:
            self._first = -1
        self.live -= gone
        return gone, first

    def _index_of(self, place: Place) -> int:
        """The index of the first entry at or after a place."""
        index, end = bisect_left(self._due, place.due_ms, self._next), len(self._due)
        # Those due at the same time are in the order of their offsets.
        same_end = bisect_left(self._due, place.due_ms + 1, index, end)
        return bisect_left(self._offsets, place.offset, index, same_end)

    def _indexes(self) -> Iterator[int]:
        positions = self._positions
        return (n for n in range(self._next, len(positions)) if positions[n] != _GONE)

    def _entry(self, index: int) -> Entry:
        key = self._digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        return Entry(
            self._due[index],
            self._offsets[index],
            self._positions[index],
            key if key and key != _NO_KEY else None,
        )


def merged(runs: Iterable[Run]) -> Run:
    """One run of the entries of several."""
    return Run(sorted([entry for run in runs for entry in run.entries()]))


def _hash(key: bytes) -> int:
    return int.from_bytes(key[:_HASH_BYTES], byteorder)
