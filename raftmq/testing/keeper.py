"""The process that keeps the nodes of a test cluster: forks, signals, reaps them, and cleans up.

Started by `cluster.py:KeeperLink` before anything is known of the cluster, it imports what nodes
need; then it follows orders, JSON over a socket, one answer each. It has no threads, for it forks.
It ends with nodes, mount and folder when its socket closes or the tests' process is gone, also by
`kill -9`. Nodes get SIGKILL when it is gone itself.

`PowerDisk` is a disk that can lose its power: XFS in a file, mounted through a loop device.
`xfs_io -x -c shutdown` without a log flush ends the filesystem as a power cut would: after the next
mount only what was synced is there. The mount is made in a mount namespace of this process, so that
it goes with the last process that uses it, however that one ends. It needs root.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from raftmq.cli.dev import Signals, start_cluster, wait_ready
from raftmq.cli.dev_cluster import DevCluster, DevError, DevNode
from raftmq.errors import RaftmqError
from raftmq.testing.cluster import ClusterError, LackError

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
        """Mount it again, once no process has files open."""
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


ORDER_BYTES_MAX: Final = 1 << 17
PORTS: Final = range(10_000, 32_000, 200)
"""First ports of the blocks that clusters claim, below those for outgoing connections."""
_CLAIM: Final = "\0raftmq-testing-ports-"


class Watch(Signals):
    """Signals, and the end of the process for which the cluster is there."""

    def __init__(self, parent: int) -> None:
        super().__init__()
        self._parent = os.pidfd_open(parent)
        if os.getppid() != parent:
            self.must_end = True  # it ended before we could look
        os.register_at_fork(after_in_child=lambda: os.close(self._parent))

    def wait(self, timeout_s: float | None, others: Sequence[int] = ()) -> list[int]:
        """Sleep until there is something to do; the descriptors of `others` that are readable."""
        ready = super().wait(timeout_s, [*others, self._parent])
        if self._parent in ready:
            ready.remove(self._parent)
            self.must_end = True
        return ready


def claim_ports() -> tuple[int, socket.socket]:
    """A block of ports that no other test cluster uses while this socket is open.

    Nodes that are down do not hold their ports; the claim (a name that the kernel forgets with the
    process) keeps other clusters of this machine, those of xdist's workers, from taking them.

    Raises:
        DevError: all are claimed.
    """
    for first in random.sample(PORTS, len(PORTS)):
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"{_CLAIM}{first}")
        except OSError:
            claim.close()
        else:
            return first, claim
    raise DevError(f"all {len(PORTS)} blocks of ports are taken by other test clusters")


class Keeper:
    """The nodes of one cluster, its disk and its ports."""

    def __init__(self, folder: Path, sock: socket.socket, watch: Watch) -> None:
        self._folder = folder
        self._sock = sock
        self._watch = watch
        self._cluster: DevCluster | None = None
        self._claim: socket.socket | None = None
        self._disk: PowerDisk | None = None
        self._lack = ""
        self._paused: set[int] = set()
        self._orders: dict[str, Callable[[dict[str, Any]], None]] = {
            "open": self._open,
            "start": self._start,
            "kill": self._kill,
            "stop": self._stop,
            "pause": self._pause,
            "resume": self._resume,
            "lose_power": self._lose_power,
            "show": lambda order: None,
        }

    def serve(self) -> None:
        """Follow orders until the socket closes or the tests' process ends."""
        while not self._watch.must_end:
            starting = {node.ready_fd: node for node in self._nodes if node.ready_fd >= 0}
            for descriptor in self._watch.wait(None, [*starting, self._sock.fileno()]):
                if descriptor in starting:
                    self._hear(starting[descriptor])
                    continue
                # The last of them: what an order closes, this round does not read any more.
                data = self._sock.recv(ORDER_BYTES_MAX)
                if not data:
                    return
                self._sock.sendall(json.dumps(self._answer(json.loads(data))).encode())

    def _answer(self, order: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {"id": order["id"]}
        try:
            self._orders[order["do"]](order)
        except (RaftmqError, OSError) as error:
            kind = "lack" if isinstance(error, LackError) else "error"
            answer |= {kind: str(error) or repr(error)}
        return answer | {"nodes": self._show()}

    def close(self) -> None:
        """End the nodes and unmount their disk."""
        if self._cluster is not None:
            self._cluster.close()
            self._cluster.kill(self._cluster.nodes)
        if self._disk is not None:
            self._disk.close()

    # ---- orders ----

    def _open(self, order: dict[str, Any]) -> None:
        data = None
        if order["power_disk"]:
            try:
                self._disk = PowerDisk(self._folder)
                data = self._disk.folder
            except LackError as error:
                self._lack = str(error)  # all else works; `lose_power` reports it
        while self._cluster is None:
            first, self._claim = claim_ports()
            cluster = DevCluster.plan(
                self._folder,
                nodes=order["nodes"],
                port=first,
                settings=order["settings"],
                defaults=order["defaults"],
                data=data,
                security=order["security"],
            )
            try:
                cluster.bind()
            except DevError:
                continue  # other processes listen in that block; the claim on it ends here
            self._cluster = cluster
        cluster.death_signal = signal.SIGKILL
        start_cluster(cluster, self._watch, order["timeout_s"])

    def _start(self, order: dict[str, Any]) -> None:
        cluster = self._opened
        nodes = self._chosen(order["start"])
        for node in nodes:
            cluster.start(node)
        waiting = [node for node in self._chosen(order["wait"]) if not node.is_ready]
        wait_ready(cluster, waiting, self._watch, order["timeout_s"])

    def _kill(self, order: dict[str, Any]) -> None:
        nodes = self._chosen(order["chosen"])
        self._opened.kill(nodes)
        self._forget(nodes)

    def _stop(self, order: dict[str, Any]) -> None:
        nodes = self._chosen(order["chosen"])
        self._opened.stop(order["timeout_s"], nodes)
        self._forget(nodes)

    def _pause(self, order: dict[str, Any]) -> None:
        for node in self._chosen(order["chosen"]):
            os.kill(node.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, node.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self._paused.add(node.plan.id)

    def _resume(self, order: dict[str, Any]) -> None:
        for node in self._chosen(order["chosen"]):
            os.kill(node.pid, signal.SIGCONT)
            self._paused.discard(node.plan.id)

    def _lose_power(self, _order: dict[str, Any]) -> None:
        if self._lack:
            raise LackError(self._lack)
        if self._disk is None:
            raise ClusterError("only a cluster made with power_disk=True can lose its power")
        self._disk.lose_power()
        self._opened.kill(self._nodes)
        self._forget(self._nodes)
        self._disk.repower()

    # ---- nodes ----

    @property
    def _opened(self) -> DevCluster:
        assert self._cluster is not None, "the first order opens it"
        return self._cluster

    @property
    def _nodes(self) -> list[DevNode]:
        return self._cluster.nodes if self._cluster is not None else []

    def _chosen(self, ids: Sequence[int]) -> list[DevNode]:
        return [node for node in self._nodes if node.plan.id in ids]

    def _hear(self, node: DevNode) -> None:
        self._opened.hear(node)

    def _forget(self, dead: Sequence[DevNode]) -> None:
        for node in dead:
            self._paused.discard(node.plan.id)
            if node.ready_fd >= 0:
                self._hear(node)
            node.is_ready = False

    def _show(self) -> list[dict[str, Any]]:
        if self._cluster is not None:
            self._forget(self._cluster.reap())
        return [
            {
                "id": node.plan.id,
                "port": node.plan.port,
                "admin_port": node.plan.admin_port,
                "pid": node.pid,
                "ended": node.ended,
                "is_ready": node.is_ready,
                "is_paused": node.plan.id in self._paused,
            }
            for node in self._nodes
        ]


def keep(sock: socket.socket, parent: int, folder: Path) -> None:
    """Follow orders for as long as the parent lives; leave nothing behind."""
    keeper = Keeper(folder, sock, Watch(parent))
    try:
        import raftmq.cli.start
        import raftmq.node  # noqa: F401 - what nodes need, once for all
        from raftmq.server.kafka.dispatch import warm_up

        warm_up()
        os.register_at_fork(after_in_child=sock.close)
        keeper.serve()
    finally:
        keeper.close()


def main() -> None:
    """`python -m raftmq.testing.keeper DESCRIPTOR PARENT FOLDER`."""
    descriptor, parent, folder = sys.argv[1:]
    try:
        keep(socket.socket(fileno=int(descriptor)), int(parent), Path(folder))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
