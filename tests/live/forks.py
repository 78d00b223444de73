"""Nodes forked from one process that has imported everything, as `raftmq dev` forks its own.

Importing a broker takes a second of a core, and the live tests start some two hundred of them. The
parent runs no thread and no loop; a child is `raftmq start` with its own words, environment, output
and process group, and ends as any interpreter does. Everything dies with the tests' process. That
`raftmq start` works from nothing is a matter for `test_start.py` and `tests/cli`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 1 << 20
MODULES = (
    "raftmq.cli.main",
    "raftmq.cli.start",
    "raftmq.node",
    "raftmq.node.leaders_page",
    "raftmq.node.metrics.exposition",
    "raftmq.node.nodes_page",
    "raftmq.server.admin_http",
)
"""What a node imports, at its start and once it is ready."""


class Child:
    """A process that the parent forked; pid, `poll` and `wait` as those of `subprocess.Popen`."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None
        self._end = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal; None while it runs."""
        if self._code is None and select.select([self._end], [], [], 0)[0]:
            self._reap()
        return self._code

    def wait(self, timeout_s: float) -> int:
        """Wait for its end.

        Raises:
            TimeoutError: it did not come in time.
        """
        if self._code is None:
            if not select.select([self._end], [], [], timeout_s)[0]:
                raise TimeoutError(f"process {self.pid} runs on after {timeout_s} s")
            self._reap()
        assert self._code is not None
        return self._code

    def _reap(self) -> None:
        self._code = self._parent.ask({"reap": self.pid})
        os.close(self._end)


class Parent:
    """The process that forks, as the tests see it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.live.forks", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
        """Run `raftmq` with these words; what it prints is added to the log."""
        order = {"words": list(words), "log": str(log), "environment": dict(environment)}
        return Child(self, self.ask(order))

    def ask(self, order: Mapping[str, object]) -> int:
        with self._lock:
            self._sock.sendall(json.dumps(order).encode())
            return int(self._sock.recv(ORDER_BYTES_MAX))

    def close(self) -> None:
        """End it, and with it what it forked."""
        self._sock.close()
        self._process.wait(10)


@cache
def parent() -> Parent:
    """The only one of this process."""
    made = Parent()
    atexit.register(made.close)
    return made


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _serve(sock: socket.socket) -> list[str] | None:
    """Fork what is asked for; gives its words in a child, and None once nobody asks any more."""
    while data := sock.recv(ORDER_BYTES_MAX):
        order = json.loads(data)
        if "reap" in order:
            _, status = os.waitpid(order["reap"], 0)
            sock.sendall(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            sock.close()
            # Not a session of its own: Linux schedules sessions against each other (autogroup).
            os.setpgid(0, 0)
            _die_with(me)
            log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            os.environ.clear()
            os.environ.update(order["environment"])
            words: list[str] = order["words"]
            return words
        sock.sendall(b"%d" % pid)
    return None


def main() -> None:
    """The parent's life, and that of each child."""
    _die_with(int(sys.argv[2]))
    for name in MODULES:
        import_module(name)
    assert threading.active_count() == 1, "a thread is not forked with its process"
    gc.collect()
    gc.freeze()  # objects made so far stay on pages that all share
    words = _serve(socket.socket(fileno=int(sys.argv[1])))
    if words is not None:
        sys.argv = ["raftmq", *words]
        sys.modules[MODULES[0]].run(words)


if __name__ == "__main__":
    main()
