"""A disk that can lose its power: XFS in a file, mounted through a loop device.

`xfs_io -x -c shutdown` without a log flush ends the filesystem as a power cut would: after the next
mount only what was synced is there. The mount is made in a mount namespace of this process, so that
it goes with the last process that uses it, however that one ends. Needs root; for the keeper alone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from raftmq.testing.cluster import LackError

DISK_BYTES: Final = 640 << 20
"""Of a file with holes; XFS wants 300 MB at least."""
_CLONE_NEWNS: Final = 0x20000
_SYSTEM_FOLDERS: Final = "/usr/sbin:/sbin"
_COMMAND_S: Final = 60.0


class PowerDisk:
    """All nodes' disk."""

    def __init__(self, folder: Path) -> None:
        """Make and mount it.

        Raises:
            LackError: no root, no XFS tools, or no loop devices.
        """
        if os.geteuid() != 0:
            raise LackError("losing power needs root, for a loop device with XFS")
        for name in ("mkfs.xfs", "xfs_io", "mount", "umount"):
            _tool(name)
        _leave_mount_namespace()
        self.folder = folder / "disk"
        self._image = folder / "disk.img"
        self.folder.mkdir()
        with self._image.open("wb") as file:
            file.truncate(DISK_BYTES)
        _command("mkfs.xfs", "-q", str(self._image))
        self._mount()

    def lose_power(self) -> None:
        """Forget what was not synced; nothing works until `repower`."""
        _command("xfs_io", "-x", "-c", "shutdown", str(self.folder))

    def repower(self) -> None:
        """Mount it again; whoever had files open is gone."""
        self.close()
        self._mount()

    def close(self) -> None:
        """Unmount it."""
        _command("umount", str(self.folder))

    def _mount(self) -> None:
        _command("mount", "-o", "loop", str(self._image), str(self.folder))


def _tool(name: str) -> str:
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":" + _SYSTEM_FOLDERS)
    if path is None:
        raise LackError(f"losing power needs the command {name} (Debian: xfsprogs, mount)")
    return path


def _command(name: str, *words: str) -> None:
    done = subprocess.run(
        [_tool(name), *words], capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    if done.returncode:
        what = (done.stderr or done.stdout).strip()
        raise LackError(f"losing power is not possible here: {name}: {what}")


def _leave_mount_namespace() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        reason = os.strerror(ctypes.get_errno())
        raise LackError(f"losing power needs a mount namespace of its own: {reason}")
    _command("mount", "--make-rprivate", "/")
