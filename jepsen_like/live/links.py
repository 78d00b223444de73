"""Links between clients and nodes and between nodes, and how a nemesis breaks them.

`Links` is what nemeses see: a table of ordered pairs, each whole, blocked, delayed or limited,
which is replaced as a whole. `ProxyLinks` carries it out in a process of ours, which every machine
can run; `namespaces.NamespaceLinks` does it in the kernel where that is permitted.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Collection, Iterable
from typing import Any, Final, Protocol

from attrs import asdict, frozen

from jepsen_like.live.proxy import CLIENTS

Pair = tuple[int, int]
HOST: Final = "127.0.0.1"


@frozen
class Weather:
    """How a link is while it is not whole."""

    is_blocked: bool = False
    delay_ms: float = 0.0
    bytes_per_s: float = 0.0


BLOCKED: Final = Weather(is_blocked=True)


@frozen
class Places:
    """Where a node listens, and where others are told to find it."""

    host: str
    client_port: int
    peer_port: int
    admin_port: int
    advertised_client: str
    advertised_peer: str
    prefix: tuple[str, ...] = ()
    """Words before the node's command."""


class Links(Protocol):
    """What nemeses may do to the network."""

    name: str
    can_spoil: bool
    """Links can be slow and connections reset, too."""

    def place(self, node: int, ports: tuple[int, int, int]) -> Places:
        """Make room for a node."""

    def set(self, weather: dict[Pair, Weather]) -> None:
        """Make links so; all others are whole."""

    def reset(self, pairs: Iterable[Pair]) -> int:
        """Reset the connections of these (dialler, node)."""

    def close(self) -> None:
        """Take everything away."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that carry what nodes and clients say."""

    @property
    def client_prefix(self) -> tuple[str, ...]:
        """Words before the command of a client."""


def between(*sides: Collection[int]) -> set[Pair]:
    """All links between ends of different sides, both ways."""
    return {
        (a, b) for mine, theirs in itertools.permutations(sides, 2) for a in mine for b in theirs
    }


class ProxyLinks:
    """Links through a proxy of our own."""

    name = "proxy"
    can_spoil = True
    client_prefix: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jepsen_like.live.proxy"],
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        self._answers = self._control.makefile("rb")

    @property
    def pids(self) -> tuple[int, ...]:
        """The proxy."""
        return (self._process.pid,)

    def place(self, node: int, ports: tuple[int, int, int]) -> Places:
        """Make two listeners that stand for the node's."""
        client, peer, admin = ports
        proxied = [
            self._ask({"listen": node, "is_peer": is_peer, "host": HOST, "port": port})
            for is_peer, port in ((False, client), (True, peer))
        ]
        near_client, near_peer = (f"{HOST}:{port}" for port in proxied)
        return Places(HOST, client, peer, admin, near_client, near_peer)

    def set(self, weather: dict[Pair, Weather]) -> None:
        """Make links so; all others are whole."""
        self._ask({"links": [{"from": a, "to": b, **asdict(w)} for (a, b), w in weather.items()]})

    def reset(self, pairs: Iterable[Pair]) -> int:
        """Reset the connections of these (dialler, node)."""
        return self._ask({"reset": [list(pair) for pair in pairs]})

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._control.close()
        self._process.wait(10)

    def _ask(self, command: dict[str, Any]) -> int:
        self._control.sendall(json.dumps(command).encode() + b"\n")
        answer = self._answers.readline()
        if not answer:
            raise RuntimeError(f"the proxy ended with {self._process.wait(10)}")
        return int(json.loads(answer))


__all__ = ["BLOCKED", "CLIENTS", "HOST", "Links", "Pair", "Places", "ProxyLinks", "Weather"]
