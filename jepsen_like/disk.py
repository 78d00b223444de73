"""A disk that forgets: `ports.Disk` in memory, with page cache and device kept apart.

A write changes the cached content; only `fdatasync` of that file moves it to the device. A created,
renamed or removed name is on the device only after `sync_directory`. `crash()` is a power loss:
every unsynced change is kept, lost or torn, as the given random source decides. Faults are planted
by hand: full disk, failing fsync, flipped bits, stale sectors, a crash at the k-th operation.
Everything is a function of the arguments, so one seed replays one history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from attrs import define

from jepsen_like.inode import SECTOR, Inode, sectors
from raftmq.ports import DiskError, DiskFullError, File
from raftmq.types import Buffer


class SimCrash(BaseException):
    """The machine stops here. No code under test may catch it, so it is not an `Exception`."""


@define(slots=True, frozen=True)
class CrashOdds:
    """How likely each fate of a file's unsynced bytes is; the rest keeps all of them.

    `torn` cuts at any byte; `sectors` keeps and loses sectors independently, so that later bytes
    may survive earlier ones; `names` is the chance that an unsynced name change is lost.
    """

    lose: float = 0.35
    prefix: float = 0.25
    torn: float = 0.15
    sectors: float = 0.05
    names: float = 0.5


@define(slots=True)
class Counters:
    """What the disk was asked to do."""

    reads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    fdatasyncs: int = 0
    directory_syncs: int = 0
    renames: int = 0
    removes: int = 0
    crashes: int = 0
    bytes_lost: int = 0
    refused: int = 0
    """Writes for which there was not enough space."""


class SimFile:
    """An open handle on an inode."""

    __slots__ = ("_disk", "_generation", "_inode", "_is_closed", "path")

    def __init__(self, disk: SimDisk, path: str, inode: Inode) -> None:
        self._disk = disk
        self._inode = inode
        self._generation = disk.counters.crashes
        self._is_closed = False
        self.path = path
        disk.open_files += 1

    def _check(self) -> None:
        assert not self._is_closed, f"{self.path} is closed"
        if self._generation != self._disk.counters.crashes:
            raise SimCrash(f"{self.path} was open before the crash")

    def pread(self, size: int, position: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        self._check()
        return self._disk.read(self._inode, self.path, size, position)

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of `data`."""
        self._check()
        self._disk.write(self._inode, self.path, data, position)

    def pwritev(self, pieces: Sequence[Buffer], position: int) -> None:
        """Write all pieces one after the other, as one operation."""
        self._check()
        self._disk.write(self._inode, self.path, b"".join(pieces), position)

    def size(self) -> int:
        """Bytes in the file."""
        self._check()
        return len(self._inode.cached)

    def truncate(self, size: int) -> None:
        """Cut or extend the file."""
        self._check()
        self._disk.truncate(self._inode, self.path, size)

    def allocate(self, size: int) -> None:
        """Reserve up to `size` bytes; the new ones read as zeros."""
        self._check()
        if size > len(self._inode.cached):
            self._disk.truncate(self._inode, self.path, size, reserve=True)

    def fdatasync(self) -> None:
        """Move the cached content to the device."""
        self._check()
        self._disk.fdatasync(self._inode, self.path)

    def is_cached(self, position: int, size: int) -> bool:
        """True when these bytes are in memory."""
        self._check()
        inode = self._inode
        end = min(position + size, len(inode.cached))
        return inode.warm is None or inode.warm.issuperset(sectors(position, end))

    def fileno(self) -> int:
        """No descriptor here."""
        return -1

    def close(self) -> None:
        """Twice is harmless."""
        if not self._is_closed:
            self._is_closed = True
            self._disk.open_files -= 1

    def __del__(self) -> None:
        self.close()


class SimDisk:
    """A folder tree whose every fault is drawn from `random` or planted by the test.

    Attributes:
        counters: operations so far.
        capacity_bytes: None, or how much the files may hold together.
        open_files: handles not yet closed.
        operations: changes so far (what `crash_after` counts).
    """

    def __init__(
        self,
        random: Random,
        *,
        capacity_bytes: int | None = None,
        tears: Callable[[], bool] = lambda: True,
    ) -> None:
        """`tears` says whether a crash in the middle of a write leaves a part of it."""
        self._random = random
        self._names: dict[str, Inode] = {}
        self._durable_names: dict[str, Inode] = {}
        # Unsynced name changes in order; each is atomic: {path: inode, or None when removed}.
        self._pending: list[dict[str, Inode | None]] = []
        self._folders: set[str] = {"", "/"}
        self._inodes = 0
        self._crash_at: int | None = None
        self._trap: Callable[[str, str], int | None] | None = None
        self._has_crashed = False
        self._failing: Callable[[str, str], bool] | None = None
        self.spoilt: dict[str, bool] = {}
        """Paths whose bytes went bad at any time, by no fault of who wrote them."""
        self._tears = tears
        self.counters = Counters()
        self.capacity_bytes = capacity_bytes
        self.open_files = 0
        self.operations = 0

    # --- ports.Disk -------------------------------------------------------------------------

    def open(self, path: str, *, create: bool = False) -> File:
        """Open for reading and writing."""
        self._alive()
        inode = self._names.get(path)
        if inode is None:
            if not create:
                raise FileNotFoundError(path)
            if _parent(path) not in self._folders:
                raise DiskError(f"no folder for {path}")
            self._operation("create", path)
            self._inodes += 1
            inode = Inode(self._inodes)
            self._names[path] = inode
            self._pending.append({path: inode})
        return SimFile(self, path, inode)

    def exists(self, path: str) -> bool:
        """True for a file or folder of that name."""
        self._alive()
        return path in self._names or path in self._folders

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted."""
        self._alive()
        prefix = f"{path}/" if path else ""
        begin = len(prefix)
        names = [
            name[begin:]
            for name in self._names
            if name.startswith(prefix) and name.find("/", begin) < 0
        ]
        names += [
            f.rpartition("/")[2] for f in self._folders if f and f != "/" and _parent(f) == path
        ]
        return sorted(names)

    def make_directories(self, path: str) -> None:
        """Create a folder and its parents; durable on return."""
        self._alive()
        while path not in self._folders:
            self._operation("mkdir", path)
            self._folders.add(path)
            path = _parent(path)

    def rename(self, source: str, target: str) -> None:
        """Replace `target` atomically."""
        self._operation("rename", target)
        self.counters.renames += 1
        if source in self._folders:
            self._rename_folder(source, target)
            return
        if source not in self._names:
            raise DiskError(f"cannot rename {source}: absent")
        inode = self._names.pop(source)
        self._names[target] = inode
        self._pending.append({source: None, target: inode})

    def _rename_folder(self, source: str, target: str) -> None:
        change: dict[str, Inode | None] = {}
        for path in sorted(p for p in self._names if p.startswith(f"{source}/")):
            inode = self._names.pop(path)
            moved = target + path[len(source) :]
            self._names[moved] = inode
            change[path] = None
            change[moved] = inode
        moved_folders = [f for f in self._folders if f == source or f.startswith(f"{source}/")]
        for folder in moved_folders:
            self._folders.discard(folder)
            self._folders.add(target + folder[len(source) :])
        self._forget_pending(source)
        self._settle(change)  # folders are as durable as `make_directories` makes them

    def remove(self, path: str) -> None:
        """Unlink a file that may be absent."""
        self._operation("remove", path)
        if self._names.pop(path, None) is not None:
            self.counters.removes += 1
            self._pending.append({path: None})

    def remove_tree(self, path: str) -> None:
        """Remove a folder and all in it, durably."""
        self._operation("remove", path)
        change: dict[str, Inode | None] = {}
        for name in [p for p in self._names if p.startswith(f"{path}/")]:
            del self._names[name]
            change[name] = None
        self._forget_pending(path)
        self._settle(change)
        self._folders = {f for f in self._folders if f != path and not f.startswith(f"{path}/")}

    def sync_directory(self, path: str) -> None:
        """Make the names in a folder durable."""
        self._operation("sync directory", path)
        self.counters.directory_syncs += 1
        kept: list[dict[str, Inode | None]] = []
        for change in self._pending:
            if any(_parent(name) == path for name in change):
                self._settle(change)
            else:
                kept.append(change)
        self._pending = kept

    # --- inodes -----------------------------------------------------------------------------

    def read(self, inode: Inode, path: str, size: int, position: int) -> bytes:
        """What a handle's `pread` does."""
        self._alive()
        if self._failing is not None and self._failing("read", path):
            raise DiskError(f"cannot read {path}: I/O error")
        self.counters.reads += 1
        data = bytes(inode.cached[position : position + size])
        self.counters.bytes_read += len(data)
        if inode.warm is not None:
            inode.warm.update(sectors(position, position + len(data)))
        return data

    def write(self, inode: Inode, path: str, data: Buffer, position: int) -> None:
        """What a handle's `pwrite` does; a crash or a full disk leaves a part of it."""
        if self._has_crashed:
            self._alive()
        room = None
        if self.capacity_bytes is not None:
            room = self._room(max(0, position + len(data) - len(inode.cached)))
        if room is not None:
            whole = max(0, len(inode.cached) - position) + room
            self._store(inode, bytes(data[:whole]), position)
            raise DiskFullError(f"cannot write {path}: no space left")
        is_last = self._crash_at is not None and self.operations + 1 >= self._crash_at
        if is_last and self._tears():
            self._store(inode, bytes(data[: self._random.randrange(0, len(data) + 1)]), position)
        self._operation("write", path)
        self._store(inode, data, position)

    def _store(self, inode: Inode, data: Buffer, position: int) -> None:
        size = len(data)
        if not size:
            return
        end, cached, dirty = position + size, inode.cached, inode.dirty
        if inode.warm is not None:
            inode.warm.update(sectors(position, end))
        if end > (have := len(cached)):
            inode.size_is_dirty = True
            if position > have:
                cached.extend(bytes(position - have))
        cached[position:end] = data
        if dirty and dirty[-1][1] == position:
            dirty[-1] = (dirty[-1][0], end)
        else:
            dirty.append((position, end))
        counters = self.counters
        counters.writes += 1
        counters.bytes_written += size

    def truncate(self, inode: Inode, path: str, size: int, *, reserve: bool = False) -> None:
        """What a handle's `truncate` and `allocate` do."""
        self._alive()
        have = len(inode.cached)
        if reserve and self._room(size - have) is not None:
            raise DiskFullError(f"cannot allocate {path}: no space left")
        self._operation("truncate", path)
        if size < have:
            del inode.cached[size:]
            inode.reserved = min(inode.reserved, size)
            inode.cut_size = size if inode.cut_size is None else min(inode.cut_size, size)
        else:
            inode.cached.extend(bytes(size - have))
            inode.reserved = size
        inode.size_is_dirty = True

    def fdatasync(self, inode: Inode, path: str) -> None:
        """What a handle's `fdatasync` does. After a failure the bytes count as written back."""
        self._operation("fdatasync", path)
        self.counters.fdatasyncs += 1
        if self._failing is not None and self._failing("fdatasync", path):
            inode.is_lying = True
            inode.dirty.clear()  # Linux marks the pages clean: a second fdatasync would lie
            inode.size_is_dirty = False
            inode.cut_size = None
            raise DiskError(f"cannot sync {path}: I/O error")
        self._write_back(inode)

    def _write_back(self, inode: Inode) -> None:
        cached, durable, previous = inode.cached, inode.durable, inode.previous
        size = len(cached)
        if inode.cut_size is not None:
            del durable[inode.cut_size :]
        if inode.size_is_dirty:
            if len(durable) > size:
                del durable[size:]
            else:
                durable.extend(bytes(size - len(durable)))
        for start, end in inode.dirty:
            end = min(end, size)
            if start >= end:
                continue
            if end > len(durable):
                # Written again after a failed sync: bytes that reach the device bring their size.
                durable.extend(bytes(end - len(durable)))
            for sector in range(start // SECTOR, (end - 1) // SECTOR + 1):
                at = sector * SECTOR
                previous[sector] = bytes(durable[at : at + SECTOR])
            durable[start:end] = cached[start:end]
        inode.dirty.clear()
        inode.size_is_dirty = False
        inode.cut_size = None

    def copy(self, random: Random) -> SimDisk:
        """Another device with the same files, all of them synced."""
        other = SimDisk(random)
        other._folders = set(self._folders)
        for number, (path, inode) in enumerate(sorted(self._names.items()), 1):
            content = bytes(inode.cached)
            other._names[path] = Inode(number, bytearray(content), bytearray(content))
        other._durable_names = dict(other._names)
        other._inodes = len(other._names)
        return other

    # --- faults -----------------------------------------------------------------------------

    def crash(self, random: Random | None = None, odds: CrashOdds | None = None) -> None:
        """Lose power and come back: unsynced bytes and names are kept, lost or torn at random.

        Handles opened before are dead; the disk can be used again at once.
        """
        random = random or self._random
        odds = odds or CrashOdds()
        for change in self._pending:
            if random.random() >= odds.names:
                for path, inode in change.items():
                    _apply(self._durable_names, path, inode)
        self._pending.clear()
        self._names = dict(self._durable_names)
        for _, inode in sorted(self._names.items()):
            if inode.is_lying:
                inode.cached = bytearray(inode.durable)
                inode.is_lying = False
                inode.dirty.clear()
            elif inode.dirty or inode.size_is_dirty:
                self._lose(inode, random, odds)
        self.drop_cache()
        self.counters.crashes += 1
        self._has_crashed = False
        self._crash_at = None
        self._trap = None

    def drop_cache(self) -> None:
        """Memory is short, or the machine just came up: what is to be read comes from the device,
        but for what is not there yet."""
        for inode in self._names.values():
            inode.warm = set()
            for start, end in inode.dirty:
                inode.warm.update(sectors(start, end))

    def end_process(self) -> None:
        """The process ends and the machine goes on: handles are dead, the page cache stays."""
        self.counters.crashes += 1
        self._has_crashed = False
        self._crash_at = None
        self._trap = None

    def _lose(self, inode: Inode, random: Random, odds: CrashOdds) -> None:
        cached = bytes(inode.cached)
        before = bytes(inode.durable)
        draw = random.random()
        if draw < odds.lose:
            content = before
        elif draw < odds.lose + odds.prefix + odds.torn:
            is_torn = draw >= odds.lose + odds.prefix
            content = _keep_prefix(inode, cached, before, random, is_torn=is_torn)
        elif draw < odds.lose + odds.prefix + odds.torn + odds.sectors:
            content = _keep_sectors(inode, cached, before, random)
        else:
            content = cached
        self.counters.bytes_lost += sum(end - start for start, end in inode.dirty)
        inode.cached = bytearray(content)
        inode.durable = bytearray(content)
        inode.dirty.clear()
        inode.size_is_dirty = False
        inode.cut_size = None

    def crash_after(self, operations: int | None) -> None:
        """Raise `SimCrash` in the middle of the given coming change (1 = the next one)."""
        self._crash_at = None if operations is None else self.operations + operations

    def crash_when(self, trap: Callable[[str, str], int | None] | None) -> None:
        """Set a trap: what it gives for a change (a verb and a path) is how many changes later the
        power goes, 0 for right before that one; None for not yet."""
        self._trap = trap

    def fail_when(self, predicate: Callable[[str, str], bool] | None) -> None:
        """Fail an operation ("fdatasync", "read") of a path with an I/O error when it says so."""
        self._failing = predicate

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Flip one bit, on the device and in the cache."""
        inode = self._names[path]
        self.spoilt[path] = True
        inode.cached[position] ^= 1 << bit
        if position < len(inode.durable):
            inode.durable[position] ^= 1 << bit

    def lose(self, path: str) -> None:
        """A file is gone, on the device and in the cache."""
        self.spoilt[path] = True
        del self._names[path]
        self._durable_names.pop(path, None)

    def end_faults(self) -> None:
        """Nothing is planted any more."""
        self.capacity_bytes = self._crash_at = self._trap = self._failing = None

    def make_stale(self, path: str, sector: int, within: tuple[int, int]) -> bool:
        """Bring back what a sector held before its last write-back, as if the device had lost that
        write; False when nothing would change, or anything outside of `within`."""
        inode = self._names[path]
        before = inode.previous.get(sector)
        if before is None:
            return False
        at = sector * SECTOR
        end = min(at + SECTOR, len(inode.durable), len(inode.cached))
        stale = before.ljust(SECTOR, b"\0")[: max(0, end - at)]
        changed = [n for n, byte in enumerate(stale, at) if byte != inode.cached[n]]
        if not changed or changed[0] < within[0] or changed[-1] >= within[1]:
            return False
        self.spoilt[path] = True
        inode.durable[at:end] = stale
        inode.cached[at:end] = stale
        return True

    def used_bytes(self) -> int:
        """Bytes in all files that have a name."""
        return sum(len(inode.cached) for inode in self._names.values())

    def files(self, folder: str = "") -> dict[str, int]:
        """Path to size of every file below a folder."""
        prefix = f"{folder}/" if folder else ""
        return {p: len(i.cached) for p, i in sorted(self._names.items()) if p.startswith(prefix)}

    def content(self, path: str) -> bytes:
        """What a file holds now."""
        return bytes(self._names[path].cached)

    def overwrite(self, path: str, content: bytes) -> None:
        """Put other content in place, on the device and in the cache."""
        inode = self._names[path]
        self.spoilt[path] = True
        inode.cached[:] = content
        inode.durable[:] = content
        inode.dirty.clear()

    # --- helpers ----------------------------------------------------------------------------

    def _alive(self) -> None:
        if self._has_crashed:
            raise SimCrash("the machine is down")

    def _operation(self, verb: str, path: str) -> None:
        if self._has_crashed:
            self._alive()
        self.operations += 1
        if self._trap is not None and (later := self._trap(verb, path)) is not None:
            self._trap, self._crash_at = None, self.operations + later
        if self._crash_at is not None and self.operations >= self._crash_at:
            self._has_crashed = True
            raise SimCrash(f"crash at operation {self.operations}: {verb} {path}")

    def _room(self, growth: int) -> int | None:
        """None when there is room for `growth` more bytes, else the bytes that still fit."""
        if self.capacity_bytes is None or growth <= 0:
            return None
        room = self.capacity_bytes - self.used_bytes()
        if growth <= room:
            return None
        self.counters.refused += 1
        return max(0, room)

    def _settle(self, change: dict[str, Inode | None]) -> None:
        for path, inode in change.items():
            _apply(self._durable_names, path, inode)

    def _forget_pending(self, folder: str) -> None:
        """What a folder that is gone was to have: a later one of that name is another."""
        kept = (
            {path: inode for path, inode in change.items() if not path.startswith(f"{folder}/")}
            for change in self._pending
        )
        self._pending = [change for change in kept if change]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _apply(names: dict[str, Inode], path: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


def _keep_prefix(
    inode: Inode, cached: bytes, before: bytes, random: Random, *, is_torn: bool
) -> bytes:
    """The device got the writes in order, up to some sector (or, torn, some byte) of the last."""
    content = bytearray(before)
    if inode.cut_size is not None:
        del content[inode.cut_size :]
    left = random.randrange(0, sum(end - start for start, end in inode.dirty) + 1)
    for start, end in inode.dirty:
        stop = min(end, start + left)
        if stop < end and not is_torn:
            stop = max(start, stop // SECTOR * SECTOR)
        left -= end - start
        stop = min(stop, len(cached))
        if stop > start:
            content.extend(bytes(max(0, start - len(content))))
            content[start:stop] = cached[start:stop]
        if left <= 0:
            break
    if len(content) < inode.reserved and random.random() < 0.5:
        content.extend(bytes(inode.reserved - len(content)))
    return bytes(content)


def _keep_sectors(inode: Inode, cached: bytes, before: bytes, random: Random) -> bytes:
    """Each sector is the new or the old one; the size is the new one."""
    content = bytearray(cached)
    old = before.ljust(len(cached), b"\0")
    for start, end in inode.dirty:
        for sector in range(start // SECTOR, (min(end, len(cached)) + SECTOR - 1) // SECTOR):
            if random.random() < 0.5:
                at, to = sector * SECTOR, min((sector + 1) * SECTOR, len(cached))
                content[at:to] = old[at:to]
    return bytes(content)
