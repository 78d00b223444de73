"""A local cluster: a folder, ports, and one forked process per node.

Owns `DIR/cluster.json`, `DIR/node-ID.toml` and the child processes. Everything is imported once in
a parent without threads, then forked, so that nodes start in milliseconds; each child gets its own
process group, log file and data, and dies with its parent. `raftmq dev`, `raftmq demo` and
`raftmq.testing` start their nodes here. Never used inside a trio run.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from attrs import define, field, frozen

from raftmq.cli.console import note
from raftmq.config import ConfigError, NodeConfig, load_config
from raftmq.errors import RaftmqError
from raftmq.ports import DiskError, replace_file
from raftmq.rights import ANY_HOST, ANY_NAME, Kind, Operation, Pattern, Permission, Rule
from raftmq.runtime.disk import RealDisk
from raftmq.runtime.throw_away import ADMIN, USER, ThrowAwaySecurity, toml_text

if TYPE_CHECKING:
    from raftmq.node import Listeners

HOST: Final = "127.0.0.1"
CLUSTER_FILE: Final = "cluster.json"
SECURITY_FOLDER: Final = "security"
PORT_DEFAULT: Final = 9092
_NODE_FILE: Final = re.compile(r"node-(\d+)\.toml$")
_NODE_FOLDER: Final = re.compile(r"node-(\d+)$")
VOTERS_MAX: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_HEALTH_TIMEOUT_S: Final = 0.25
_HOPELESS: Final = (2, 4)
"""Exit codes after which a node is not started again."""
_LOG_TAIL_BYTES: Final = 2_000


class DevError(RaftmqError):
    """The cluster cannot be started; the message says why and what to do."""


class ClusterFileError(DevError):
    """`cluster.json` is damaged; `find_cluster` writes it anew where the nodes are there."""


@frozen
class NodePlan:
    """One node's identity and addresses."""

    id: int
    port: int
    peer_port: int
    admin_port: int
    data: str


@define
class DevNode:
    """A node of the cluster and its process, if it runs."""

    plan: NodePlan
    pid: int = 0
    started_at: float = 0.0
    listeners: Listeners | None = None
    ready_fd: int = -1
    """Readable once the node serves, or has ended."""
    is_ready: bool = False
    ended: str = ""
    """How it ended, for people; empty while it runs."""
    is_hopeless: bool = False
    """It ended since its configuration is no good or the cluster is ahead of its version: it would
    end again."""

    @property
    def is_running(self) -> bool:
        """True while the child was not reaped."""
        return self.pid > 0 and not self.ended


@define
class DevCluster:
    """All nodes of one folder."""

    folder: Path
    nodes: list[DevNode]
    metadata_engine: str = "raft"
    racks: bool = False
    cluster_id: str = "raftmq-dev"
    settings: Mapping[str, Any] = field(factory=dict)
    """Keys of every node's configuration, beside those that this module decides."""
    defaults: Mapping[str, str] = field(factory=dict)
    """Kafka's broker-wide settings, by their Kafka names."""
    death_signal: int = signal.SIGTERM
    """What nodes get when this process ends before them."""
    security: ThrowAwaySecurity | None = None
    """What keeps strangers out; None: nothing."""

    @classmethod
    def plan(
        cls,
        folder: Path,
        *,
        nodes: int,
        port: int,
        metadata_engine: str = "raft",
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, str] | None = None,
        data: Path | None = None,
        security: str | None = None,
    ) -> DevCluster:
        """Lay a cluster out, or the one that the folder already holds.

        Nodes of a new one keep their data in `data`, by default the folder itself. With `security`
        (`throw_away.MODES`) strangers are kept out; so they are where an earlier start had it so.

        Raises:
            DevError: the folder holds another number of nodes, or runs already.
            RaftmqError: it was secured in another way, or nothing is there that signs certificates.
        """
        folder.mkdir(parents=True, exist_ok=True)
        known = find_cluster(folder)
        if known is not None:
            plans = [_plan_of(node) for node in known["nodes"]]
            if len(plans) != nodes:
                raise DevError(
                    f"{folder} holds a cluster of {len(plans)} nodes, not {nodes}; give "
                    f"--nodes {len(plans)} or another --data"
                )
            _refuse_running(known)
            plans = [_with_port(plan, port + i) for i, plan in enumerate(plans)]
        else:
            plans = _new_plans(data or folder, nodes, port)
        cluster = cls(folder, [DevNode(plan) for plan in plans], metadata_engine)
        cluster.settings = dict(settings or {})
        cluster.defaults = dict(defaults or {})
        cluster.security = ThrowAwaySecurity.of(folder / SECURITY_FOLDER)
        if security is not None:
            ids = [plan.id for plan in plans]
            cluster.security = ThrowAwaySecurity.make(folder / SECURITY_FOLDER, security, ids)
        cluster._write_configs()
        return cluster

    @property
    def bootstrap(self) -> str:
        """The addresses for clients."""
        return _bootstrap(node.plan for node in self.nodes)

    def config(self, node: DevNode) -> NodeConfig:
        """A node's configuration, as its file says."""
        return read_node_file(self.folder, node.plan.id)

    def bind(self) -> None:
        """Bind every node's ports, so that a taken one is told before anything starts.

        Raises:
            DevError: one is taken.
        """
        for node in self.nodes:
            if node.listeners is None:
                self._bind(node)

    def _bind(self, node: DevNode) -> None:
        from raftmq.node import open_listeners
        from raftmq.node.process import ListenError

        try:
            node.listeners = open_listeners(self.config(node))
        except ListenError as error:
            self.close()
            is_ours_to_choose = "client_listener" in str(error)
            advice = "give another --port" if is_ours_to_choose else "wait until it is free"
            raise DevError(
                f"node {node.plan.id}: {error}; stop what listens there or {advice}"
            ) from error

    def close(self) -> None:
        """Close ports that no node has taken over."""
        for node in self.nodes:
            if node.listeners is not None:
                node.listeners.close()
                node.listeners = None

    def start(self, node: DevNode) -> None:
        """Fork a node. Only from a process without other threads.

        Raises:
            DevError: a port is taken.
        """
        if node.listeners is None:
            self._bind(node)
        config = self.config(node)
        gc.freeze()  # objects made so far stay on pages shared with the child
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        node.ready_fd, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            for other in self.nodes:
                if other is not node and other.listeners is not None:
                    other.listeners.close()
            log = self.folder / f"node-{node.plan.id}.log"
            _be_node(config, node.listeners, log, ready, parent, self.death_signal)
        os.close(ready)
        assert node.listeners is not None
        node.listeners.close()
        node.listeners = None
        node.pid = pid
        node.started_at = time.monotonic()
        node.is_ready = False
        node.ended = ""

    def hear(self, node: DevNode) -> None:
        """Read what a node wrote to its pipe: it is ready, or it ended."""
        node.is_ready = os.read(node.ready_fd, 16) != b""
        os.close(node.ready_fd)
        node.ready_fd = -1

    def write_file(self) -> None:
        """Write `cluster.json` anew, atomically."""
        pids = {node.plan.id: node.pid for node in self.nodes}
        write_cluster_file(self.folder, _as_content([node.plan for node in self.nodes], pids))

    def reap(self) -> list[DevNode]:
        """Notice children that ended; gives them."""
        ended = []
        for node in self.nodes:
            if not node.is_running:
                continue
            pid, status = os.waitpid(node.pid, os.WNOHANG)
            if pid:
                node.ended = _explain_status(status)
                node.is_hopeless = os.waitstatus_to_exitcode(status) in _HOPELESS
                ended.append(node)
        return ended

    def log_tail(self, node: DevNode) -> str:
        """The last lines of a node's output."""
        path = self.folder / f"node-{node.plan.id}.log"
        try:
            return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""

    def kill(self, nodes: Iterable[DevNode]) -> None:
        """End nodes as a crash would; returns once they are gone."""
        dying = [node for node in nodes if node.is_running]
        for node in dying:
            _signal(node.pid, signal.SIGKILL)
        for node in dying:
            _, status = os.waitpid(node.pid, 0)
            node.ended = _explain_status(status)

    def stop(self, timeout_s: float = 10.0, nodes: Sequence[DevNode] | None = None) -> None:
        """End nodes, by default all: asked first, killed when they do not follow."""
        chosen = self.nodes if nodes is None else nodes
        ending = [node for node in chosen if node.is_running]
        for node in ending:
            _signal(node.pid, signal.SIGTERM)
            _signal(node.pid, signal.SIGCONT)  # a stopped one could not hear it
        deadline = time.monotonic() + timeout_s
        while any(node.is_running for node in ending):
            self.reap()
            if time.monotonic() > deadline:
                self.kill(ending)
            time.sleep(0.005)

    def _client_lines(self, plan: NodePlan) -> list[str]:
        """How a node is reached by clients, and by whom else."""
        address = f"{HOST}:{plan.port}"
        if self.security is None:
            return [f'client_listener = "{address}"']
        keys = self.security.node_settings(plan.id, address)
        return [f"{k} = {toml_text(v)}" for k, v in keys.items() if k not in self.settings]

    def _write_configs(self) -> None:
        peers = [
            {"id": node.plan.id, "host": HOST, "port": node.plan.peer_port}
            for node in self.nodes[:VOTERS_MAX]
        ]
        for node in self.nodes:
            plan = node.plan
            lines = [
                f"node_id = {plan.id}",
                f'cluster_id = "{self.cluster_id}"',
                f"data = {json.dumps(plan.data)}",
                *self._client_lines(plan),
                f'peer_listener = "{HOST}:{plan.peer_port}"',
                f'admin_listener = "{HOST}:{plan.admin_port}"',
                f'metadata_engine = "{self.metadata_engine}"',
                "peers = [",
                *(
                    f'  {{id = {p["id"]}, host = "{p["host"]}", port = {p["port"]}}},'
                    for p in peers
                ),
                "]",
                *(["takes_data_at_once = true"] if node not in self.nodes[:VOTERS_MAX] else []),
                *(["formation_wait_ms = 0"] if "formation_wait_ms" not in self.settings else []),
                *(f"{key} = {json.dumps(value)}" for key, value in self.settings.items()),
                "[defaults]",
                *(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in self.defaults.items()),
            ]
            path = self.folder / f"node-{plan.id}.toml"
            data = ("\n".join(lines) + "\n").encode()
            if not path.exists() or path.read_bytes() != data:
                _replace(path, data)
        kept = {node.plan.id for node in self.nodes}
        for node_id, path in _node_files(self.folder):
            if node_id not in kept:
                path.unlink()  # of an attempt with more nodes that never served


def read_node_file(folder: Path, node_id: int) -> NodeConfig:
    """The configuration that a cluster's folder holds for a node.

    Raises:
        DevError: there is none.
    """
    path = folder / f"node-{node_id}.toml"
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise DevError(f"no node {node_id} in {folder}: {path.name} is missing") from None
    if not text.strip("\0 \n"):
        raise DevError(
            f"{path} is empty, as after a power loss: start the whole cluster once with "
            f"`raftmq dev --data {folder}`, which writes it anew"
        )
    # No RAFTMQ_* variables: they would make every node the same one.
    return load_config(text)


def read_cluster_file(folder: Path) -> dict[str, Any] | None:
    """What `cluster.json` says; None without one.

    Raises:
        ClusterFileError: it is damaged, or not what this command wrote.
    """
    path = folder / CLUSTER_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        for node in content["nodes"]:
            _plan_of(node)
            node["pid"]
        content["nodes"][0]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ClusterFileError(
            f"{path} is damaged or not a cluster's file ({error!r}), and no node-ID.toml beside it "
            "says what it should hold: remove it, or give another folder"
        ) from error
    return content


def find_cluster(folder: Path) -> dict[str, Any] | None:
    """What `cluster.json` says; None without one. A damaged one is written anew from the nodes' own
    files, and from their data where those are gone.

    Raises:
        DevError: it is damaged and the folder holds no node.
    """
    try:
        return read_cluster_file(folder)
    except ClusterFileError:
        plans = _plans_of_nodes(folder)
        if not plans:
            raise
    content = _as_content(plans, {})
    write_cluster_file(folder, content)
    note(f"{folder / CLUSTER_FILE} was damaged; written anew for the {len(plans)} nodes found")
    return content


def _plans_of_nodes(folder: Path) -> list[NodePlan]:
    """The nodes of which the folder has a configuration or data; ports that neither names are
    chosen anew."""
    plans: dict[int, NodePlan] = {}
    ids = {
        int(match[1])
        for path in folder.glob("node-*/node.json")
        if (match := _NODE_FOLDER.match(path.parent.name))
    }
    for node_id, _ in _node_files(folder):
        ids.add(node_id)
        try:
            config = read_node_file(folder, node_id)
        except (DevError, ConfigError):
            continue  # damaged too: its data must do
        plans[node_id] = NodePlan(
            node_id,
            config.client_listeners[0].address.port,
            config.peer_listener.port,
            config.admin_listener.port,
            str(config.data),
        )
    if ids == plans.keys():
        return [plans[node_id] for node_id in sorted(ids)]
    first = min((plan.port - plan.id + 1 for plan in plans.values()), default=PORT_DEFAULT)
    fresh = _new_plans(folder, max(ids), first)
    return [plans.get(plan.id, plan) for plan in fresh]


def _node_files(folder: Path) -> list[tuple[int, Path]]:
    """The nodes' configuration files, by node id."""
    found = [(_NODE_FILE.match(path.name), path) for path in folder.glob("node-*.toml")]
    return sorted((int(match[1]), path) for match, path in found if match)


def write_cluster_file(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace `cluster.json`, durably: readers see the old one or the new one."""
    _replace(folder / CLUSTER_FILE, (json.dumps(content, indent=1) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    # The pid keeps apart what `raftmq dev` and `raftmq dev --node` write at the same moment.
    temporary = f"{path.absolute()}.{os.getpid()}.tmp"
    try:
        replace_file(RealDisk(), str(path.absolute()), data, temporary)
    except DiskError as error:
        raise DevError(str(error)) from error


def record_pid(folder: Path, node_id: int, pid: int) -> None:
    """Say in `cluster.json` which process runs a node now.

    Raises:
        DevError: no such cluster or node.
    """
    content = find_cluster(folder)
    if content is None:
        raise DevError(f"{folder} holds no cluster: {CLUSTER_FILE} is missing")
    for node in content["nodes"]:
        if node["id"] == node_id:
            node["pid"] = pid
            write_cluster_file(folder, content)
            return
    known = ", ".join(str(node["id"]) for node in content["nodes"])
    raise DevError(f"no node {node_id} in {folder}; it has {known}")


_AGAIN_S: Final = 0.1
_USER_MAY: Final = {
    Kind.TOPIC: (Operation.READ, Operation.WRITE, Operation.CREATE, Operation.DESCRIBE_CONFIGS),
    Kind.GROUP: (Operation.READ,),
    Kind.TRANSACTIONAL_ID: (Operation.WRITE,),
}
"""Of every topic, group and id: what services do, and nothing that administrates."""


def user_rules(principal: str) -> list[Rule]:
    """The rules from which a user of a local cluster has its rights."""
    return [
        Rule(kind, Pattern.LITERAL, ANY_NAME, principal, ANY_HOST, operation, Permission.ALLOW)
        for kind, operations in _USER_MAY.items()
        for operation in operations
    ]


def admit(security: ThrowAwaySecurity, user: str, bootstrap: str, timeout_s: float) -> None:
    """Let a user in who may read and write every topic; again, it changes nothing.

    Raises:
        DevError: the cluster does not do that in time.
    """
    from raftmq_client.blocking.admin import Admin
    from raftmq_client.core.admin import SCRAM_MECHANISMS
    from raftmq_client.errors import AuthenticationError, ClientError
    from raftmq_client.security_file import read_security_file

    security.write_client_files(ADMIN, bootstrap)
    shown = read_security_file(security.folder / f"{ADMIN}.toml").access.security()
    rules = user_rules(security.principal(user))
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with Admin(bootstrap, security=shown, timeout_ms=timeout_s * 1000) as admin:
                if security.mode == "scram" and not admin.users([user]):
                    for mechanism in SCRAM_MECHANISMS:
                        admin.set_password(user, security.password(user), mechanism=mechanism)
                admin.create_acls(rules)
                return
        except AuthenticationError as error:
            # The first user, who this is, is made by the nodes themselves once they serve.
            if time.monotonic() > deadline:
                raise DevError(f"{ADMIN} is not let in: {error}") from error
            time.sleep(_AGAIN_S)
        except ClientError as error:
            raise DevError(f"user {user} is not let in: {error}") from error


def admit_all(security: ThrowAwaySecurity, bootstrap: str, timeout_s: float) -> None:
    """Let the users in who are there from the beginning, and write the files of all clients.

    Raises:
        DevError: as `admit`.
    """
    if USER in security.users:
        admit(security, USER, bootstrap, timeout_s)
    for user in security.users or (USER,):
        security.write_client_files(user, bootstrap)


def is_healthy(admin_port: int) -> bool:
    """Ask a node's `/health`; False while it does not answer 200."""
    request = f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    try:
        with socket.create_connection((HOST, admin_port), _HEALTH_TIMEOUT_S) as sock:
            sock.sendall(request)
            return sock.recv(64).split(b" ")[1:2] == [b"200"]
    except OSError:
        return False


def is_dev_node(pid: int, node_id: int) -> bool:
    """True when a pid is a `raftmq dev --node` of that id (pids are reused)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"dev" in words and any(
        words[i : i + 2] == [b"--node", str(node_id).encode()] for i in range(len(words))
    )


def _plan_of(node: Mapping[str, Any]) -> NodePlan:
    return NodePlan(node["id"], node["port"], node["peer_port"], node["admin_port"], node["data"])


def _bootstrap(plans: Iterable[NodePlan]) -> str:
    return ",".join(f"{HOST}:{plan.port}" for plan in plans)


def _as_content(plans: Sequence[NodePlan], pids: Mapping[int, int]) -> dict[str, Any]:
    """What `cluster.json` holds."""
    nodes = [_as_json(plan, pids.get(plan.id, 0)) for plan in plans]
    return {"bootstrap": _bootstrap(plans), "nodes": nodes}


def _as_json(plan: NodePlan, pid: int) -> dict[str, Any]:
    return {
        "id": plan.id,
        "pid": pid,
        "host": HOST,
        "port": plan.port,
        "peer_port": plan.peer_port,
        "admin_port": plan.admin_port,
        "data": plan.data,
    }


def _with_port(plan: NodePlan, port: int) -> NodePlan:
    return NodePlan(plan.id, port, plan.peer_port, plan.admin_port, plan.data)


def _new_plans(folder: Path, nodes: int, port: int) -> list[NodePlan]:
    plans = []
    ports = free_ports(2 * nodes, start=port + 100)
    for i in range(nodes):
        data = str((folder / f"node-{i + 1}").absolute())
        plans.append(NodePlan(i + 1, port + i, ports[2 * i], ports[2 * i + 1], data))
    return plans


def free_ports(count: int, start: int) -> list[int]:
    """Free ports in a row, the first such from `start` on.

    Not drawn by the kernel: those are the ones it also gives to outgoing connections, and one of
    them might be taken when the cluster is started again.

    Raises:
        DevError: there are none.
    """
    first = start
    while first + count <= 65_536:
        taken = _first_taken(first, count)
        if taken is None:
            return list(range(first, first + count))
        first = taken + 1
    raise DevError(f"no {count} free ports in a row from {start} on; give another --port")


def _first_taken(first: int, count: int) -> int | None:
    with contextlib.ExitStack() as held:
        for port in range(first, first + count):
            try:
                held.enter_context(socket.create_server((HOST, port)))
            except OSError:
                return port
    return None


def _refuse_running(known: Mapping[str, Any]) -> None:
    for node in known["nodes"]:
        if is_healthy(node["admin_port"]):
            raise DevError(
                f"node {node['id']} of this folder runs already (pid {node['pid']}); stop it first"
            )


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # it ended by itself


def _explain_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _be_node(
    config: NodeConfig,
    listeners: Listeners | None,
    log: Path,
    ready: int,
    parent: int,
    death_signal: int,
) -> NoReturn:
    """The child's whole life."""
    code = 1
    try:
        # A group of its own, so that Ctrl-C is the parent's to handle, and no session of its own:
        # Linux schedules sessions against each other (autogroup), and on a busy machine one node
        # would then wait for the others' turns, now and then beyond its election timeout.
        os.setpgid(0, 0)
        die_with_parent(parent, death_signal)
        _redirect(log)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from raftmq.cli.start import run

        code = run(config, listeners=listeners, on_ready=lambda: _tell(ready))
    except BaseException:  # noqa: BLE001 - nothing may unwind into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _tell(ready: int) -> None:
    os.write(ready, b"ready")
    os.close(ready)


def die_with_parent(parent: int, death_signal: int) -> None:
    """Ask the kernel for a signal when the parent ends, however it ends (Linux)."""
    libc = ctypes.CDLL(None)
    prctl: Callable[..., int] | None = getattr(libc, "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(death_signal))
    if os.getppid() != parent:
        os._exit(0)  # it ended before we could ask


def _redirect(log: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(null)
    os.close(out)
