"""The tests' end of the socket to the keeper: starts it, asks it, ends it.

Calls may come from any thread, one after the other, and may be interrupted (Ctrl-C, a time limit of
a test): an answer that nobody waits for any more is dropped when the next one is read.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

from raftmq.testing.errors import ClusterError, LackError

ANSWER_BYTES_MAX: Final = 1 << 17
_GRACE_S: Final = 30.0
"""How much longer than the order itself an answer may take."""
_LOG_TAIL: Final = 2_000
_NOT_FOR_NODES: Final = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "COVERAGE_PROCESS", "COV_CORE")


class KeeperLink:
    """A keeper, begun at once: it imports what nodes need while others go on."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="raftmq-testing-"))
        self._lock = threading.Lock()
        self._last_id = 0
        self._log = self.folder / "keeper.log"
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(_NOT_FOR_NODES)}
        words = [str(theirs.fileno()), str(os.getpid()), str(self.folder)]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raftmq.testing.keeper", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env={**environment, "RAFTMQ_FAULTS": "1"},
                start_new_session=True,  # Ctrl-C is for the tests, which then close it
            )

    @property
    def pid(self) -> int:
        """The keeper's."""
        return self._process.pid

    def ask(self, do: str, timeout_s: float, **order: object) -> dict[str, Any]:
        """Give an order; its answer.

        Raises:
            ClusterError: the keeper refused, ended, or does not answer.
        """
        with self._lock:
            self._last_id += 1
            content = {"id": self._last_id, "do": do, "timeout_s": timeout_s, **order}
            try:
                self._sock.settimeout(timeout_s + _GRACE_S)
                self._sock.sendall(json.dumps(content).encode())
                answer = self._receive(time.monotonic() + timeout_s + _GRACE_S)
            except OSError as error:
                raise ClusterError(f"the cluster's keeper is gone: {error!r}") from error
        for kind, failure in (("lack", LackError), ("error", ClusterError)):
            if kind in answer:
                raise failure(answer[kind])
        return answer

    def _receive(self, deadline: float) -> dict[str, Any]:
        while True:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = self._sock.recv(ANSWER_BYTES_MAX)
            if not data:
                raise ClusterError(f"the cluster's keeper ended:\n{self._log_tail()}".rstrip())
            answer: dict[str, Any] = json.loads(data)
            if answer["id"] == self._last_id:
                return answer

    def _log_tail(self) -> str:
        try:
            return self._log.read_text(errors="replace")[-_LOG_TAIL:]
        except FileNotFoundError:
            return ""  # it took the folder with it

    def close(self) -> None:
        """End the keeper and the nodes; returns once nothing is left of them."""
        with contextlib.suppress(OSError):  # it is gone already
            self._sock.shutdown(socket.SHUT_RDWR)  # also for copies that forked processes hold
        self._sock.close()
        self._process.terminate()  # it may be waiting for nodes
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # a keeper that was killed left it
