"""Where nodes keep their data: a plain folder, a small tmpfs, or a disk that can lose its power.

A `PowerDisk` is an XFS filesystem in a file on a loop device: `xfs_io -x -c shutdown` without a log
flush ends it as a power cut would, and after a remount only what was synced is there. Both it and
the tmpfs have a size of their own, so they can be full without hurting anybody else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final, Protocol

SYSTEM_FOLDERS: Final = "/usr/sbin:/sbin"
POWER_DISK_BYTES: Final = 640 << 20
TMPFS_BYTES: Final = 256 << 20
_FILLER: Final = "filler"
_COMMAND_S: Final = 60
_CLONE_NEWNS: Final = 0x00020000


class LackError(Exception):
    """This machine cannot do that; the message says what is missing."""


def tool(name: str) -> str:
    """The path of a system command.

    Raises:
        LackError: it is not installed.
    """
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":" + SYSTEM_FOLDERS)
    if path is None:
        raise LackError(f"needs the command {name}")
    return path


def command(name: str, *words: str) -> str:
    """Run a system command; its output.

    Raises:
        LackError: it is missing or not permitted.
    """
    done = subprocess.run(
        [tool(name), *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        raise LackError(f"{name} {' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def mount_privately() -> None:
    """Let the mounts of this process and its children end with them, whatever ends them.

    Raises:
        LackError: it is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise LackError(f"unshare: {os.strerror(ctypes.get_errno())}")
    command("mount", "--make-rprivate", "/")


class Disk(Protocol):
    """One node's disk."""

    name: str
    folder: Path
    can_be_full: bool
    can_lose_power: bool

    def fill(self) -> None:
        """Take all free space."""

    def free(self) -> None:
        """Give it back."""

    def lose_power(self) -> None:
        """Forget what was not synced; nothing works until `repower`."""

    def repower(self) -> None:
        """Mount it again; whoever had files open must be gone."""

    def close(self) -> None:
        """Unmount."""


class PlainDisk:
    """A folder of somebody else's filesystem."""

    name = "folder"
    can_be_full = False
    can_lose_power = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def fill(self) -> None:
        """It is not ours to fill."""
        raise LackError("the disk is shared with others")

    def free(self) -> None:
        """Nothing was taken."""

    def lose_power(self) -> None:
        """It has no power of its own."""
        raise LackError("the disk is shared with others")

    def repower(self) -> None:
        """It never lost any."""

    def close(self) -> None:
        """The folder stays for whoever wants to look."""


def fill_up(folder: Path) -> None:
    """Take a filesystem's last bytes."""
    with (folder / _FILLER).open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):  # it need not support this, and may lack room for it
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(folder).free - (1 << 20)))
        file.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):  # full: what was wanted
            while True:
                file.write(bytes(16 << 10))


class TmpfsDisk:
    """A small filesystem in memory."""

    name = "tmpfs"
    can_be_full = True
    can_lose_power = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        command("mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder))

    def fill(self) -> None:
        """Take all free space."""
        fill_up(self.folder)

    def free(self) -> None:
        """Give it back."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    def lose_power(self) -> None:
        """Memory would keep nothing, which is another fault: a lost disk."""
        raise LackError("memory keeps nothing")

    def repower(self) -> None:
        """It never lost any."""

    def close(self) -> None:
        """Unmount; what was in it is gone."""
        command("umount", "--lazy", str(self.folder))


class PowerDisk:
    """An XFS filesystem in a file, which can lose its power."""

    name = "xfs"
    can_be_full = True
    can_lose_power = True

    def __init__(self, folder: Path, size_bytes: int = POWER_DISK_BYTES) -> None:
        """Raises:
        LackError: it cannot be made or mounted here.
        """
        self.folder = folder
        self._image = folder.with_suffix(".img")
        folder.mkdir(parents=True, exist_ok=True)
        with self._image.open("wb") as file:
            file.truncate(size_bytes)
        command("mkfs.xfs", "-q", str(self._image))
        self._is_mounted = False  # a filesystem without power cannot even be asked
        self.repower()

    def fill(self) -> None:
        """Take all free space."""
        fill_up(self.folder)

    def free(self) -> None:
        """Give it back."""
        (self.folder / _FILLER).unlink(missing_ok=True)

    def lose_power(self) -> None:
        """Forget what was not synced; nothing works until `repower`."""
        command("xfs_io", "-x", "-c", "shutdown", str(self.folder))

    def repower(self) -> None:
        """Mount it, again if it was; whoever had files open must be gone."""
        if self._is_mounted:
            command("umount", str(self.folder))
        command("mount", "-o", "loop", str(self._image), str(self.folder))
        self._is_mounted = True

    def close(self) -> None:
        """Unmount; the image stays for whoever wants to look."""
        if self._is_mounted:
            command("umount", "--lazy", str(self.folder))
            self._is_mounted = False


def best_disk(folder: Path) -> Disk:
    """The disk that can suffer most on this machine."""
    if os.geteuid() == 0:
        for kind in (PowerDisk, TmpfsDisk):
            with contextlib.suppress(LackError):  # a container's root may not be allowed to mount
                return kind(folder)
    return PlainDisk(folder)
