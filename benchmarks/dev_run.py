"""What scripted runs share: a `raftmq dev` cluster of their own, and a connection without back-off.

The connection is one socket, one request at a time, no retries: what a run measures is then the
broker's doing. The cluster is ended with the run; its nodes may be stopped and started on the way.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from attrs import define, field

from raftmq.protocol import (
    ApiKey,
    Struct,
    decode_response,
    decode_response_header,
    encode_request,
    encode_request_header,
)
from raftmq.protocol.produce import (
    ProducePartition,
    ProduceRequest,
    ProduceResponse,
    ProduceTopic,
    decode_produce_response,
    encode_produce_request,
)

RAFTMQ: Final = str(Path(sys.executable).parent / "raftmq")
PORT: Final = 19_092
PRODUCE_VERSION: Final = 11
METADATA_VERSION: Final = 9
TIMEOUT_S: Final = 10.0


class Asker:
    """One connection to one broker."""

    def __init__(self, host: str, port: int, client_id: str = "bench") -> None:
        """Raises:
        OSError: nobody listens there.
        """
        self._sock = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._client_id = client_id
        self._correlation = 0

    def close(self) -> None:
        """Hang up."""
        self._sock.close()

    def ask(self, api: ApiKey, version: int, request: Struct) -> Struct:
        """One request and its answer.

        Raises:
            OSError: the connection ended.
        """
        frame = self._round_trip(api, version, [encode_request(api, version, request)])
        return decode_response(api, version, frame)

    def produce(self, topic: str, partition: int, batch: Any, acks: int = -1) -> ProduceResponse:
        """Append one batch.

        Raises:
            OSError: the connection ended.
        """
        request = ProduceRequest(
            None, acks, 30_000, [ProduceTopic(topic, None, [ProducePartition(partition, batch)])]
        )
        pieces = encode_produce_request(PRODUCE_VERSION, request)
        frame = self._round_trip(ApiKey.PRODUCE, PRODUCE_VERSION, pieces)
        return decode_produce_response(PRODUCE_VERSION, frame)

    def metadata(self, topic: str | None) -> Struct:
        """Brokers, and the leaders of one topic."""
        return self.ask(
            ApiKey.METADATA,
            METADATA_VERSION,
            Struct(
                topics=[] if topic is None else [Struct(name=topic)],
                allow_auto_topic_creation=False,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=False,
            ),
        )

    def _round_trip(self, api: ApiKey, version: int, pieces: list[Any]) -> memoryview:
        self._correlation += 1
        head = encode_request_header(api, version, self._correlation, self._client_id)
        size = len(head) + sum(len(piece) for piece in pieces)
        self._sock.sendall(b"".join([struct.pack(">i", size), head, *pieces]))
        (size,) = struct.unpack(">i", self._receive(4))
        frame = memoryview(self._receive(size))
        _, position = decode_response_header(api, version, frame)
        return frame[position:]

    def _receive(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                raise ConnectionResetError("the broker hung up")
            view = view[count:]
        return data


@define
class DevRun:
    """A cluster of `raftmq dev` in a temporary folder."""

    nodes: int = 3
    settings: Mapping[str, str] = field(factory=dict)
    folder: Path = field(factory=lambda: Path(tempfile.mkdtemp(prefix="raftmq-run-")))
    _supervisor: subprocess.Popen[str] | None = None
    _singles: dict[int, subprocess.Popen[bytes]] = field(factory=dict)

    def __enter__(self) -> Self:
        words = [f"--set={key}={value}" for key, value in self.settings.items()]
        port = PORT + os.getpid() % 500 * 12
        self._supervisor = subprocess.Popen(
            [
                *(RAFTMQ, "dev", f"--nodes={self.nodes}", f"--data={self.folder}"),
                *(f"--port={port}", *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._supervisor.stdout is not None
        line = self._supervisor.stdout.readline()
        if not line.startswith("ready"):
            raise RuntimeError(f"the cluster did not come up: {line!r}; see {self.folder}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in [*self._singles.values(), self._supervisor]:
            if process is not None and process.poll() is None:
                process.terminate()
        for process in [*self._singles.values(), self._supervisor]:
            if process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                if process.poll() is None:
                    process.kill()
                    process.wait()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The nodes as `cluster.json` tells of them."""
        content = json.loads((self.folder / "cluster.json").read_text())
        return list(content["nodes"])

    @property
    def bootstrap(self) -> str:
        """For stock clients."""
        return ",".join(f"{row['host']}:{row['port']}" for row in self.rows)

    def node(self, node_id: int) -> dict[str, Any]:
        """One node's row."""
        return next(row for row in self.rows if row["id"] == node_id)

    def terminate(self, node_id: int, timeout_s: float = 30.0) -> float:
        """SIGTERM, and wait for its end; how long that took, in seconds.

        Raises:
            TimeoutError: it did not end.
        """
        pid = self.node(node_id)["pid"]
        started = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        single = self._singles.pop(node_id, None)
        for _ in polling(timeout_s, f"node {node_id} ended", 0.005):
            if (single is not None and single.poll() is not None) or not _is_alive(pid):
                break
        return time.monotonic() - started

    def kill(self, node_id: int) -> None:
        """End a node at once, as SIGKILL does, and wait until it is gone.

        Raises:
            TimeoutError: it did not end.
        """
        pid = self.node(node_id)["pid"]
        os.kill(pid, signal.SIGKILL)
        single = self._singles.pop(node_id, None)
        if single is not None:
            single.wait()
        for _ in polling(TIMEOUT_S, f"node {node_id} ended", 0.005):
            if not _is_alive(pid):
                return

    def start(self, node_id: int, environment: Mapping[str, str] | None = None) -> None:
        """Run a node again, with more in its environment; use `wait_ready`."""
        with (self.folder / f"again-{node_id}.log").open("ab") as log:
            self._singles[node_id] = subprocess.Popen(
                [RAFTMQ, "dev", "--node", str(node_id), "--data", str(self.folder)],
                env={**os.environ, **(environment or {})},
                stdout=log,
                stderr=log,
            )

    def status(self, node_id: int, path: str = "/status") -> dict[str, Any]:
        """A JSON page of a node's admin port.

        Raises:
            OSError: it is not served.
        """
        row = self.node(node_id)
        url = f"http://{row['host']}:{row['admin_port']}{path}"
        with urllib.request.urlopen(url, timeout=2) as answer:
            page: dict[str, Any] = json.loads(answer.read())
        return page

    def wait_ready(self, node_id: int, timeout_s: float = 30.0) -> None:
        """Return once a node's health is good.

        Raises:
            TimeoutError: it is not.
        """
        for _ in polling(timeout_s, f"node {node_id} ready"):
            with contextlib.suppress(OSError):
                if self.status(node_id, "/health")["status"] == "ok":
                    return

    def rss_bytes(self) -> dict[int, int]:
        """Resident memory of every node that runs."""
        sizes = {}
        for row in self.rows:
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{row['pid']}/statm").read_text().split()[1])
                sizes[int(row["id"])] = pages * os.sysconf("SC_PAGE_SIZE")
        return sizes

    def cpu_s(self) -> float:
        """CPU seconds that all running nodes have used."""
        used = 0
        for row in self.rows:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{row['pid']}/stat").read_text().rpartition(")")[2].split()
                used += int(text[11]) + int(text[12])
        return used / os.sysconf("SC_CLK_TCK")


def polling(timeout_s: float, what: str, every_s: float = 0.02) -> Iterator[None]:
    """Turns of a loop that waits for something.

    Raises:
        TimeoutError: it did not come.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        yield
        time.sleep(every_s)
    raise TimeoutError(f"not within {timeout_s} s: {what}")


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
