"""Clusters of three nodes to measure: raftmq through `raftmq dev`, Apache Kafka from its jars.

Both stand in a folder of their own on 127.0.0.1, end with this process and are ended by the pids
that were started here, never by name. Kafka's jars come from $KAFKA_LIBS, or are fetched once with
Maven; Java 17 or newer is needed for it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from confluent_kafka import KafkaException

from benchmarks.clients import admin, wait_until
from benchmarks.errors import BenchmarkError
from benchmarks.secured import KafkaSecurity, admit_user, let_in
from benchmarks.targets import Target, read_cluster_file
from raftmq.runtime.throw_away import USER, ThrowAwaySecurity

HOST: Final = "127.0.0.1"
ENGINES: Final = ("raftmq", "kafka")
KAFKA_VERSION: Final = "4.1.1"
NODES: Final = 3
_PORTS: Final = 10_000, 30_000
_READY_S: Final = 90.0
_HEAP: Final = ("-Xmx1G", "-Xms1G", "-XX:+UseG1GC")

_POM: Final = f"""\
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>raftmq</groupId><artifactId>kafka-libs</artifactId><version>1</version>
<dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>{KAFKA_VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId>
<version>{KAFKA_VERSION}</version></dependency>
<dependency><groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId>
<version>1.7.36</version></dependency>
</dependencies></project>
"""

_KAFKA_PROPERTIES: Final = """\
process.roles=broker,controller
node.id={node}
controller.quorum.voters={voters}
log.dirs={data}
offsets.topic.replication.factor=3
offsets.topic.num.partitions=3
transaction.state.log.replication.factor=3
transaction.state.log.num.partitions=3
group.initial.rebalance.delay.ms=0
auto.create.topics.enable=true
num.partitions=1
default.replication.factor=3
"""

_KAFKA_LISTENERS: Final = """\
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
inter.broker.listener.name=PLAINTEXT
"""


def free_base(count: int) -> int:
    """The first of so many free ports in a row, below those of outgoing connections.

    Raises:
        BenchmarkError: none were found.
    """
    for _ in range(100):
        base = random.randrange(_PORTS[0], _PORTS[1] - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for port in range(base, base + count):
                held.enter_context(socket.create_server((HOST, port)))
            return base
    raise BenchmarkError(f"no {count} free ports in a row")


def _spawn(
    command: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends with this one, out of reach of its Ctrl-C.

    It stays in this session: Linux gives each session the same share of the cores (autogroup), so
    three nodes with a session each would get three times what three get that have one together.
    """
    setpriv = shutil.which("setpriv")
    guard = [setpriv, "--pdeathsig", "TERM"] if setpriv else []
    with output.open("ab") as log:
        return subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
            env={**os.environ, **(environment or {})},
        )


def _end(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float = 20.0) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


class LocalCluster(ABC):
    """Three nodes started here. A context manager: started on entry, gone after."""

    name: str

    def __init__(self, folder: Path | None = None) -> None:
        self._base = folder
        self.folder = Path()
        self.target = Target(self.name, "")
        self.launched_at = 0.0
        """When the first process was started, by the performance counter."""

    def open(self) -> None:
        """Make the folder and what must stand in it before the processes start."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"bench-{self.name}-", dir=self._base))
        self.prepare()

    def __enter__(self) -> LocalCluster:
        try:
            self.open()
            self.launch()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def prepare(self) -> None:
        """Configurations and formatted folders; sets `target` as far as it is known."""

    @abstractmethod
    def launch_only(self) -> None:
        """Start the processes and wait for nothing."""

    def launch(self) -> None:
        """Start the processes; clients may still have to wait for them."""
        self.launch_only()

    @abstractmethod
    def restart(self, node_id: int) -> int:
        """Start a dead node again."""

    @abstractmethod
    def end(self) -> None:
        """End the processes."""

    def stop(self) -> None:
        """End the processes and throw the data away."""
        self.end()
        if self.folder != Path():
            shutil.rmtree(self.folder, ignore_errors=True)

    def wait_ready(self) -> LocalCluster:
        """Return once all nodes are known to clients and there is a controller."""

        def is_ready() -> bool:
            try:
                told = admin(self.target).list_topics(timeout=2)
            except KafkaException:
                return False
            return len(told.brokers) == NODES and told.controller_id >= 0

        wait_until(f"{self.name} ready", _READY_S, is_ready)
        return self


class RaftmqCluster(LocalCluster):
    """Three raftmq nodes, forked by `raftmq dev`."""

    name = "raftmq"

    def __init__(
        self,
        folder: Path | None = None,
        *,
        settings: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        is_secured: bool = False,
    ) -> None:
        super().__init__(folder)
        self._settings = settings
        self._is_secured = is_secured
        self._environment = {**(environment or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._port = 0
        self._command = str(Path(sys.executable).parent / "raftmq")

    def launch(self) -> None:
        """Start `raftmq dev` and wait for its cluster.json, which it writes when all serve."""
        self.launch_only()
        file = self.folder / "cluster.json"
        # The last file that it writes: users have their rights then.
        last = self.folder / "security" / f"{USER}.toml" if self._is_secured else file

        def is_written() -> bool:
            self._fail_if_ended()
            return last.exists()

        wait_until(f"{last.name} of raftmq dev", _READY_S, is_written)
        self._adopt(read_cluster_file(file))
        if self._is_secured:
            made = ThrowAwaySecurity.of(self.folder / "security")
            assert made is not None
            let_in(self.target, made)

    def prepare(self) -> None:
        """Choose the ports; `raftmq dev` makes the rest."""
        self._port = free_base(4)
        ports = range(self._port, self._port + NODES)
        self._adopt(Target(self.name, ",".join(f"{HOST}:{port}" for port in ports)))

    def launch_only(self) -> None:
        """Start `raftmq dev`."""
        words = [word for setting in self._settings for word in ("--set", setting)]
        command = [self._command, "dev", "--nodes", str(NODES), "--port", str(self._port)]
        command += ["--data", str(self.folder), *words]
        if self._is_secured:
            command.append("--secure")
        self.launched_at = time.perf_counter()
        self._processes.append(_spawn(command, self.folder / "dev.log", self._environment))

    def restart(self, node_id: int) -> int:
        """Run a node again in a process of its own."""
        command = [self._command, "dev", "--node", str(node_id), "--data", str(self.folder)]
        process = _spawn(command, self.folder / "dev.log", self._environment)
        self._processes.append(process)
        return process.pid

    def end(self) -> None:
        """End the nodes with their parent, and those started again."""
        _end(list(reversed(self._processes)))
        self._processes.clear()

    def _adopt(self, target: Target) -> None:
        target.restarter = self
        self.target = target

    def _fail_if_ended(self) -> None:
        code = self._processes[0].poll()
        if code is not None:
            tail = (self.folder / "dev.log").read_text()[-2000:]
            raise BenchmarkError(f"raftmq dev ended with status {code}:\n{tail}")


class KafkaCluster(LocalCluster):
    """Three Apache Kafka nodes in KRaft mode, heaps of 1 GB, each a broker and a controller."""

    name = "kafka"

    def __init__(
        self, folder: Path | None = None, *, fsync: bool = True, is_secured: bool = False
    ) -> None:
        super().__init__(folder)
        self._fsync = fsync
        self._is_secured = is_secured
        self._security: KafkaSecurity | None = None
        self._libs = kafka_libs()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._ended: list[subprocess.Popen[bytes]] = []

    def prepare(self) -> None:
        """Write configurations and format the data folders: Kafka wants that before its start."""
        base = free_base(3 * NODES)
        nodes = range(1, NODES + 1)
        security = None
        if self._is_secured:
            security = self._security = KafkaSecurity.make(self.folder / "security", nodes)
        voters = ",".join(f"{node}@{HOST}:{base + NODES + node - 1}" for node in nodes)
        cluster_id = self._java("kafka.tools.StorageTool", "random-uuid").strip().splitlines()[-1]
        for node in nodes:
            file = self.folder / f"node-{node}.properties"
            port, controller_port, peer_port = (base + at * NODES + node - 1 for at in range(3))
            if security is None:
                listeners = _KAFKA_LISTENERS.format(port=port, controller_port=controller_port)
            else:
                listeners = security.listeners(node, port, peer_port, controller_port)
            data = self.folder / f"data-{node}"
            common = _KAFKA_PROPERTIES.format(node=node, voters=voters, data=data)
            file.write_text(common + listeners)
            users = security.users if security is not None else []
            words = ["format", "-t", cluster_id, "-c", str(file), *users]
            self._java("kafka.tools.StorageTool", *words)
        self.target = Target(
            self.name,
            ",".join(f"{HOST}:{base + node - 1}" for node in nodes),
            topic_config={"flush.messages": "1"} if self._fsync else {},
            restarter=self,
        )
        if security is not None:
            let_in(self.target, security.made)

    def wait_ready(self) -> LocalCluster:
        """As for all; then the user that load comes in as has its rules."""
        super().wait_ready()
        if self._security is not None:
            admit_user(self.target)
        return self

    def launch_only(self) -> None:
        """Start three processes."""
        self.launched_at = time.perf_counter()
        for node in range(1, NODES + 1):
            self.target.pids[node] = self.restart(node)

    def restart(self, node_id: int) -> int:
        """Start one node."""
        previous = self._processes.get(node_id)
        if previous is not None:
            self._ended.append(previous)
        process = _spawn(
            [
                "java",
                *_HEAP,
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                "-cp",
                f"{self._libs}/*",
                "kafka.Kafka",
                str(self.folder / f"node-{node_id}.properties"),
            ],
            self.folder / f"node-{node_id}.log",
        )
        self._processes[node_id] = process
        return process.pid

    def end(self) -> None:
        """End the three processes; data is thrown away, so a slow goodbye is cut short."""
        _end([*self._ended, *self._processes.values()], timeout_s=5.0)
        self._processes.clear()

    def _java(self, *arguments: str) -> str:
        done = subprocess.run(
            ["java", "-cp", f"{self._libs}/*", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BenchmarkError(
                f"java {' '.join(arguments)}: {(done.stdout + done.stderr)[-800:]}"
            )
        return done.stdout


def kafka_libs() -> Path:
    """The folder of Kafka's jars, fetched with Maven at first use.

    Raises:
        BenchmarkError: no Java, no Maven, or nothing to be fetched.
    """
    if shutil.which("java") is None:
        raise BenchmarkError("Apache Kafka needs java 17 or newer on the PATH")
    default = Path(tempfile.gettempdir()) / "kafka-libs" / "libs"
    libs = Path(os.environ.get("KAFKA_LIBS", default))
    if any(libs.glob("kafka-server-4*.jar")):
        return libs
    if shutil.which("mvn") is None:
        raise BenchmarkError(f"no Kafka in {libs} and no mvn to fetch it; set KAFKA_LIBS")
    libs.mkdir(parents=True, exist_ok=True)
    (libs.parent / "pom.xml").write_text(_POM)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", f"-DoutputDirectory={libs}"]
    done = subprocess.run(command, cwd=libs.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"mvn could not fetch Kafka: {(done.stdout + done.stderr)[-800:]}")
    return libs


def kafka_version() -> str:
    """The version that the jars carry in their names; empty where there are none."""
    default = Path(tempfile.gettempdir()) / "kafka-libs" / "libs"
    libs = Path(os.environ.get("KAFKA_LIBS", default))
    for jar in libs.glob("kafka-server-[0-9]*.jar"):
        found = re.fullmatch(r"kafka-server-([\d.]+)\.jar", jar.name)
        if found:
            return found[1]
    return ""


def make(
    engine: str,
    folder: Path | None = None,
    *,
    settings: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    kafka_fsync: bool = True,
    is_secured: bool = False,
) -> RaftmqCluster | KafkaCluster:
    """A cluster of that engine, not started yet; a secured one speaks TLS and knows users.

    Raises:
        BenchmarkError: no such engine.
    """
    if engine == "raftmq":
        return RaftmqCluster(
            folder, settings=settings, environment=environment, is_secured=is_secured
        )
    if engine == "kafka":
        return KafkaCluster(folder, fsync=kafka_fsync, is_secured=is_secured)
    raise BenchmarkError(f"no engine {engine!r}; one of {', '.join(ENGINES)}")
