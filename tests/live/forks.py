"""Nodes and commands forked from processes that have imported everything, as `raftmq dev` does.

Importing a broker takes a second of a core, a command most of one, and the live tests start some
three hundred of them. A parent runs no thread and no loop; a child is `raftmq` with its own words,
environment, files and process group, and ends as any interpreter does. Everything dies with the
tests' process. That `raftmq` works from nothing is a matter for `test_start.py` and `tests/cli`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from importlib import import_module
from pathlib import Path

PR_SET_PDEATHSIG = 1
ORDER_BYTES_MAX = 1 << 20
POLL_S = 0.005
MAIN = "raftmq.cli.main"
MODULES = {
    "nodes": (
        "raftmq.cli.start",
        "raftmq.node",
        "raftmq.node.metrics.exposition",
        "raftmq.server.admin.http",
    ),
    "commands": ("raftmq.cli.app",),
}
"""What nodes import, at their start and once they are ready; and what commands do."""


class Child:
    """A process that the parent forked; pid, `poll` and `wait` as those of `subprocess.Popen`."""

    def __init__(self, parent: Parent, pid: int) -> None:
        self.pid = pid
        self._parent = parent
        self._lock = threading.Lock()
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, minus the number of a signal; None while it runs."""
        with self._lock:
            if self._parent.is_closed and self._code is None:
                self._code = -signal.SIGKILL
            elif self._code is None:
                self._code = self._parent.ask({"reap": self.pid})
            return self._code

    def wait(self, timeout_s: float) -> int:
        """Wait for its end.

        Raises:
            TimeoutError: it did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {self.pid} runs on after {timeout_s} s")
            time.sleep(POLL_S)
        return code


class Parent:
    """A process that forks, as the tests see it."""

    def __init__(self, kind: str) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_closed = False
        self._sock = ours
        self._lock = threading.Lock()
        with theirs:
            words = ["-P", __file__, kind, str(theirs.fileno()), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self, words: Sequence[str], files: Sequence[Path], environment: Mapping[str, str]
    ) -> Child:
        """Run `raftmq` with these words; reads the first file, adds to the other two."""
        files = list(map(str, files))
        order = {"words": list(words), "files": files, "environment": dict(environment)}
        pid = self.ask(order)
        assert pid is not None
        return Child(self, pid)

    def ask(self, order: Mapping[str, object]) -> int | None:
        """A pid for an order to start, an exit code or None for one to reap."""
        with self._lock:
            try:
                self._sock.sendall(json.dumps(order).encode())
                answer: int | None = json.loads(self._sock.recv(ORDER_BYTES_MAX))
            except BaseException:  # a time limit of a test, and the answer would be another's
                self.close()
                raise
            return answer

    def close(self) -> None:
        """End it, and with it what it forked."""
        self.is_closed = True
        self._sock.close()
        self._process.kill()
        self._process.wait()


_parents: dict[str, Parent] = {}


def parent(kind: str) -> Parent:
    """The one of its kind that serves."""
    made = _parents.get(kind)
    if made is None or made.is_closed:
        made = _parents[kind] = Parent(kind)
        atexit.register(made.close)
    return made


def start_node(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Run `raftmq start`; what it prints is added to the log."""
    return parent("nodes").start(words, [Path(os.devnull), log, log], environment)


def run_command(
    words: Sequence[str], *, stdin: str = "", timeout_s: float = 240.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command of raftmq to its end.

    Raises:
        TimeoutError: it did not end; it was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
        files[0].write_text(stdin)
        child = parent("commands").start(words, files, {**os.environ, **environment})
        try:
            code = child.wait(timeout_s)
        except TimeoutError:
            os.kill(child.pid, signal.SIGKILL)
            child.wait(timeout_s)
            raise
        _, stdout, stderr = (path.read_text() for path in files)
        return subprocess.CompletedProcess(["raftmq", *words], code, stdout, stderr)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _serve(sock: socket.socket) -> list[str] | None:
    """Fork what is asked for; gives its words in a child, and None once nobody asks any more."""
    while data := sock.recv(ORDER_BYTES_MAX):
        order = json.loads(data)
        if "reap" in order:
            ended, status = os.waitpid(order["reap"], os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if ended else None
            sock.sendall(json.dumps(code).encode())
            continue
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            sock.close()
            # Not a session of its own: Linux schedules sessions against each other (autogroup).
            os.setpgid(0, 0)
            _die_with(me)
            for descriptor, path in enumerate(order["files"]):
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT if descriptor else os.O_RDONLY
                opened = os.open(path, flags, 0o644)
                os.dup2(opened, descriptor)
                os.close(opened)
            os.environ.clear()
            os.environ.update(order["environment"])
            words: list[str] = order["words"]
            return words
        sock.sendall(b"%d" % pid)
    return None


def _warm_up(kind: str) -> None:
    """Do once what each child would do first, for a third of a second of a core: compile codecs,
    and have typer import what it needs when words come."""
    if kind == "nodes":
        from raftmq.server.kafka.dispatch import warm_up

        warm_up()
        return
    from raftmq_client.core import warm_up as client

    client.warm_up((*client.PRODUCER, *client.MEMBER))
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        suppress(SystemExit),
    ):
        sys.modules[MAIN].run(["config", "check", os.devnull])


def main() -> None:
    """The parent's life, and that of each child."""
    _, kind, descriptor, parent_pid = sys.argv
    _die_with(int(parent_pid))
    for name in (MAIN, *MODULES[kind]):
        import_module(name)
    _warm_up(kind)
    assert threading.active_count() == 1, "a thread is not forked with its process"
    gc.collect()
    gc.freeze()  # objects made so far stay on pages that all share
    words = _serve(socket.socket(fileno=int(descriptor)))
    if words is not None:
        sys.argv = ["raftmq", *words]
        sys.modules[MAIN].run(words)


if __name__ == "__main__":
    main()
