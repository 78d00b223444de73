"""A file of the disk that forgets (`disk.py`): its bytes as programs see them, and as they last."""

from __future__ import annotations

from typing import Final

from attrs import Factory, define

SECTOR: Final = 512


def sectors(start: int, end: int) -> range:
    """The sectors that bytes `[start, end)` lie in."""
    return range(start // SECTOR, -(-end // SECTOR))


@define(slots=True, eq=False)
class Inode:
    """A file's content: as programs see it, and as the device holds it."""

    number: int
    cached: bytearray = Factory(bytearray)
    durable: bytearray = Factory(bytearray)
    dirty: list[tuple[int, int]] = Factory(list)  # byte ranges written since the last fdatasync
    size_is_dirty: bool = False
    is_lying: bool = False  # a sync failed: the device lacks bytes that no longer count as dirty
    reserved: int = 0  # bytes that `allocate` or an extension made, whether written or not
    cut_size: int | None = None  # the least size since the last fdatasync
    previous: dict[int, bytes] = Factory(dict)  # sector -> what the device held there before
    warm: set[int] | None = None  # sectors in memory; None: all of them
