"""A node's data folder: its node and cluster, and the cluster formation that it is part of.

`node.json` holds cluster id, node id, storage id and format version. It is written once, when the
journal of hard states is there (so a folder with `node.json` and no journal has lost promises), and
only checked afterwards. `formation.json` holds what `metadata/formation.py` must not forget. A lock
keeps a second process out. Both files are replaced atomically, synced, and sealed with a checksum:
one flipped digit of a storage id would be the identity of another replica.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from crc32c import crc32c

from raftmq.errors import AheadError, RaftmqError
from raftmq.metadata.formation import FormationState
from raftmq.ports import Disk, replace_file
from raftmq.types import NodeId, StorageId

FORMAT_VERSION: Final = 1
_T = TypeVar("_T", bound=msgspec.Struct)


class DataFolderError(RaftmqError):
    """The folder cannot serve this node; the message says why and what to do."""


class NewerFolderError(DataFolderError, AheadError):
    """A newer raftmq made it."""


class NodeFile(msgspec.Struct, frozen=True):
    """Contents of `node.json`."""

    format_version: int
    cluster_id: str
    node_id: int
    storage_id: str


class _Sealed(msgspec.Struct, frozen=True):
    """What a file of this folder holds: its content, and the checksum of exactly these bytes."""

    crc32c: str
    content: msgspec.Raw


class DataFolder:
    """The opened, locked folder of this node.

    Attributes:
        is_new: nothing was promised under this folder's storage id yet.
    """

    def __init__(self, disk: Disk, path: str, node: NodeFile, *, is_new: bool) -> None:
        self.is_new = is_new
        self._disk = disk
        self._lock_fd: int | None = None
        self.path = path
        self.node = node
        self.storage_id = StorageId(int(node.storage_id, 16))

    @classmethod
    def open(cls, disk: Disk, data: Path, *, cluster_id: str, node_id: NodeId) -> DataFolder:
        """Open the folder, making it at first start; `take` it before anything is promised.

        Raises:
            DataFolderError: it belongs to another node or cluster, to a newer format, to a running
                process, or cannot be written.
        """
        root = str(data.absolute())
        try:
            disk.make_directories(root)
            lock_fd = os.open(f"{root}/lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DataFolderError(f"cannot use data folder {root}: {error.strerror}") from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock_fd)
            raise DataFolderError(f"data folder {root} is in use by another process") from None
        try:
            draw = int.from_bytes(os.urandom(8))
            folder = cls.unlocked(disk, root, cluster_id=cluster_id, node_id=node_id, draw=draw)
        except BaseException:
            os.close(lock_fd)
            raise
        folder._lock_fd = lock_fd
        return folder

    @classmethod
    def unlocked(
        cls, disk: Disk, root: str, *, cluster_id: str, node_id: NodeId, draw: int
    ) -> DataFolder:
        """As `open`, for a folder that exists and that no other process can use; a new one's
        storage id is made of `draw`.

        Raises:
            DataFolderError: as `open`.
        """
        path = f"{root}/node.json"
        is_new = not disk.exists(path)
        if is_new:
            storage_id = draw | 1  # never 0: that means unbound
            node = NodeFile(FORMAT_VERSION, cluster_id, node_id, f"{storage_id:016x}")
        else:
            node = _read(disk, path, NodeFile)
            _check(root, node, cluster_id, node_id)
            # What is read here is acted upon. A process that was killed may have renamed files to
            # these names, or made folders, that a power loss would take back.
            disk.sync_directory(root)
        return cls(disk, root, node, is_new=is_new)

    @classmethod
    def open_known(cls, disk: Disk, data: Path) -> DataFolder:
        """Open a folder that any node has used before.

        Raises:
            DataFolderError: it is no data folder, is damaged, or its node runs.
        """
        path = f"{data.absolute()}/node.json"
        if not disk.exists(path):
            raise DataFolderError(f"{data} is no node's data folder: it has no node.json")
        node = _read(disk, path, NodeFile)
        return cls.open(disk, data, cluster_id=node.cluster_id, node_id=NodeId(node.node_id))

    def take(self) -> None:
        """Make a new folder this node's own, durably; the journal of hard states is durable."""
        if self.is_new:
            _replace(self._disk, self.path, "node.json", self.node)

    def load_formation(self) -> FormationState:
        """The promises that this node made, and what it learned, while the cluster formed."""
        path = f"{self.path}/formation.json"
        if not self._disk.exists(path):
            return FormationState()
        return _read(self._disk, path, FormationState)

    def check_recovered(self) -> None:
        """Refuse to go on where a recovery was begun and not finished.

        Raises:
            DataFolderError: such a recovery; the message says what to do.
        """
        survivors = self.load_formation().recovering
        if survivors:
            raise DataFolderError(
                f"a recovery of {self.path} was begun and not finished: run `raftmq recover "
                f"--unsafe --data {self.path} --survivors {survivors}` again"
            )

    def save_formation(self, state: FormationState) -> None:
        """Replace what `load_formation` gives; durable on return."""
        _replace(self._disk, self.path, "formation.json", state)

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)


def _check(root: str, node: NodeFile, cluster_id: str, node_id: NodeId) -> None:
    if node.format_version > FORMAT_VERSION:
        raise NewerFolderError(
            f"{root} has format version {node.format_version}; this raftmq knows up to "
            f"{FORMAT_VERSION}: start a newer raftmq"
        )
    if node.cluster_id != cluster_id:
        raise DataFolderError(
            f"{root} belongs to cluster {node.cluster_id!r}, the config says {cluster_id!r}"
        )
    if node.node_id != node_id:
        raise DataFolderError(f"{root} belongs to node {node.node_id}, the config says {node_id}")


def _read(disk: Disk, path: str, kind: type[_T]) -> _T:
    file = disk.open(path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if _checksum(sealed.content) != sealed.crc32c:
            raise msgspec.DecodeError("its checksum is wrong")
        return msgspec.json.decode(sealed.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataFolderError(
            f"{path} is damaged ({error}). Move the data folder away and start again: the node "
            "fetches its data from the others"
        ) from error


def _checksum(content: bytes | msgspec.Raw) -> str:
    return f"{crc32c(bytes(content)):08x}"


def _replace(disk: Disk, root: str, name: str, content: msgspec.Struct) -> None:
    raw = msgspec.json.encode(content)
    data = msgspec.json.encode(_Sealed(_checksum(raw), msgspec.Raw(raw))) + b"\n"
    replace_file(disk, f"{root}/{name}", data, temporary=f"{root}/{name}.new")
