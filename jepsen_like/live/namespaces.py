"""Links in the kernel: each node and the clients in a network namespace of their own.

All are joined by veth pairs to a router, a namespace that this process's main thread enters while
the links live, so the host's network is never touched. A blocked link is a routing rule that drops
its packets without a word: TCP then meets what it meets when a switch dies, retransmissions,
back-off and all. Each namespace lives as long as a process that sleeps in it, and those end with
us. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from jepsen_like.live.links import CLIENTS, Pair, Places, Weather
from jepsen_like.live.storage import LackError, command, tool

_CLONE_NEWNET: Final = 0x40000000
_PREFERENCE: Final = "100"
_OWN: Final = Path("/proc/thread-self/ns/net")


def _enter(fd: int) -> None:
    """Move this thread into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise LackError(f"setns: {os.strerror(number)}")


class _Anchor:
    """A namespace, kept by a process that sleeps in it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [
                *(tool("setpriv"), "--pdeathsig", "KILL"),
                *(tool("unshare"), "--net", "sh", "-c", "echo; exec sleep infinity"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        with self._process.stdout as told:
            if not told.readline():
                self._process.wait()
                raise LackError("this machine permits no network namespaces")
        self.pid = self._process.pid

    @property
    def prefix(self) -> tuple[str, ...]:
        """Words before a command that is to run in it."""
        return (tool("nsenter"), f"--net=/proc/{self.pid}/ns/net")

    def run(self, *words: str) -> None:
        """Run a command in it."""
        command(*self.prefix, *words)

    def end(self) -> None:
        """Let it go, with all interfaces in it."""
        self._process.kill()
        self._process.wait()


def _address(end: int, host: int = 2) -> str:
    return f"10.99.{end}.{host}"


class NamespaceLinks:
    """Links as routes of a namespace."""

    name = "namespaces"
    can_spoil = False
    """Links are whole or blocked; no delays, no resets."""

    def __init__(self) -> None:
        """Raises LackError where this is not permitted."""
        if os.geteuid() != 0:
            raise LackError("network namespaces need root")
        self._blocked: set[Pair] = set()
        self._ends: dict[int, _Anchor] = {}
        self._home = os.open(_OWN, os.O_RDONLY)
        self._router: _Anchor | None = None
        try:
            self._router = _Anchor()
            fd = os.open(f"/proc/{self._router.pid}/ns/net", os.O_RDONLY)
            try:
                _enter(fd)
            finally:
                os.close(fd)
            command("ip", "link", "set", "lo", "up")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            self._join(CLIENTS)
        except BaseException:
            self.close()
            raise

    def _join(self, end: int) -> None:
        """Make the namespace of a node or of the clients, with a cable to the router."""
        anchor = self._ends[end] = _Anchor()
        here, network = f"end{end}", f"{_address(end, 1)}/24"
        command(
            "ip",
            "link",
            "add",
            here,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(anchor.pid),
        )
        command("ip", "address", "add", network, "dev", here)
        command("ip", "link", "set", here, "up")
        anchor.run("ip", "link", "set", "lo", "up")
        anchor.run("ip", "address", "add", f"{_address(end)}/24", "dev", "eth0")
        anchor.run("ip", "link", "set", "eth0", "up")
        anchor.run("ip", "route", "add", "default", "via", _address(end, 1))

    @property
    def pids(self) -> tuple[int, ...]:
        """None: the kernel carries it all."""
        return ()

    @property
    def client_prefix(self) -> tuple[str, ...]:
        """Words before the command of a client."""
        return self._ends[CLIENTS].prefix

    def place(self, node: int, ports: tuple[int, int, int]) -> Places:
        """Make the node's namespace."""
        self._join(node)
        client, peer, admin = ports
        host = _address(node)
        prefix = self._ends[node].prefix
        return Places(host, client, peer, admin, f"{host}:{client}", f"{host}:{peer}", prefix)

    def set(self, weather: dict[Pair, Weather]) -> None:
        """Make links so; all others are whole."""
        wanted = {pair for pair, how in weather.items() if how.is_blocked}
        for verb, pairs in (("add", wanted - self._blocked), ("del", self._blocked - wanted)):
            for a, b in sorted(pairs):
                way = ("from", _address(a), "to", _address(b))
                command("ip", "rule", verb, "pref", _PREFERENCE, *way, "blackhole")
        self._blocked = wanted

    def reset(self, pairs: Iterable[Pair]) -> int:
        """Nothing here resets connections."""
        raise LackError(f"cannot reset {list(pairs)}")

    def close(self) -> None:
        """Go home, and end all namespaces."""
        _enter(self._home)
        os.close(self._home)
        for anchor in [*self._ends.values(), self._router]:
            if anchor is not None:
                with contextlib.suppress(ProcessLookupError):
                    anchor.end()
