"""`Cluster`: real nodes as processes of this machine, which tests kill, pause and cut off.

Owns what is broken on purpose (cuts, dead and paused nodes) and mends it (`restore`); processes are
the keeper's, and `KeeperLink` is this end of the socket to it. All calls block and may come from
any thread, also from within trio or asyncio (for those that wait, a worker thread is the better
place). A call that returns has happened. One that is interrupted (Ctrl-C, a time limit of a test)
leaves an answer that is dropped when the next one is read.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from attrs import frozen

from raftmq.errors import RaftmqError
from raftmq.runtime.throw_away import MODES, USER, ThrowAwaySecurity
from raftmq.testing.login import Login

if TYPE_CHECKING:
    from raftmq_client import Admin

__all__ = ["Cluster", "ClusterError", "LackError", "NodeView"]

HOST: Final = "127.0.0.1"
SIZES: Final = (1, 3, 5)
VOTERS_MAX: Final = 3
START_TIMEOUT_S: Final = 60.0
_POLL_S: Final = 0.01
QUICK: Final = {"group.initial.rebalance.delay.ms": "0"}
"""A test's group has all the members it will have."""
ANSWER_BYTES_MAX: Final = 1 << 17
_GRACE_S: Final = 30.0
"""How much longer than the order itself an answer may take."""
_LOG_TAIL: Final = 2_000
_NOT_FOR_NODES: Final = ("PYTHONOPTIMIZE", "PYTHONWARNINGS", "COVERAGE_PROCESS", "COV_CORE")


class ClusterError(RaftmqError):
    """The test cluster cannot do that; the message says why."""


class LackError(ClusterError):
    """This machine cannot do that; the message says what is missing."""


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


@frozen
class NodeView:
    """A node as the keeper last saw it."""

    id: int
    port: int
    admin_port: int
    pid: int
    ended: str
    is_ready: bool
    is_paused: bool

    @property
    def is_running(self) -> bool:
        """True while it neither was killed nor ended."""
        return not self.ended


class Cluster:
    """Several nodes on 127.0.0.1, gone at the end: `with Cluster() as cluster: ...`.

    Args:
        nodes: 1, 3 or 5.
        defaults: Kafka's broker-wide settings by their Kafka names, such as num.partitions.
        settings: keys of the nodes' configuration (`raftmq start --help`).
        security: None: whoever comes may do everything. "scram": SASL_SSL, users with passwords and
            rules; "mtls": SSL with certificates of clients, and rules; "tls": encryption alone.
            Needs the extra `secure`. `client` says how to come in.
        power_disk: keep the data where `lose_power` can strike; needs root and XFS.
        timeout_s: how long nodes may take to serve.
        link: a keeper begun earlier, which saves its time.
    """

    def __init__(
        self,
        nodes: int = 3,
        *,
        defaults: Mapping[str, object] | None = None,
        settings: Mapping[str, object] | None = None,
        security: str | None = None,
        power_disk: bool = False,
        timeout_s: float = START_TIMEOUT_S,
        link: KeeperLink | None = None,
    ) -> None:
        if nodes not in SIZES:
            raise ValueError(f"nodes is {nodes}, and must be one of {SIZES}")
        if security not in (None, *MODES):
            raise ValueError(f"security is {security!r}, and must be None or one of {MODES}")
        self._size = nodes
        self._defaults = {**QUICK, **{k: _text(v) for k, v in (defaults or {}).items()}}
        self._settings = dict(settings or {})
        self._security = security
        self._admin_token = ""
        self._power_disk = power_disk
        self._timeout_s = timeout_s
        self._link = link
        self._nodes: dict[int, NodeView] = {}
        self._downed: set[int] = set()
        self._cuts: set[tuple[int, int]] = set()
        self._prefix = ""
        self._is_prefix_used = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Start all nodes; returns once each of them serves.

        Raises:
            ClusterError: they do not come up; the message holds what a node said.
        """
        if self._nodes:
            raise ClusterError("this cluster runs already")
        try:
            self._link = self._link or KeeperLink()
            self._ask(
                "open",
                nodes=self._size,
                settings=self._settings,
                defaults=self._defaults,
                security=self._security,
                power_disk=self._power_disk,
            )
            if self._security is not None:
                self._admit()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End everything and remove the data; harmless when nothing runs."""
        link, self._link = self._link, None
        self._nodes = {}
        self._downed.clear()
        self._cuts.clear()
        if link is not None:
            link.close()

    # ---- for clients ----

    @property
    def bootstrap(self) -> str:
        """The addresses of all nodes, for any Kafka client's bootstrap servers."""
        return ",".join(self.address(node_id) for node_id in self.node_ids)

    def address(self, node: int) -> str:
        """Where clients find one node."""
        return f"{HOST}:{self.node(node).port}"

    @property
    def ca_file(self) -> Path:
        """The CA of a secured cluster, in PEM, for clients to trust."""
        return self._throw_away.ca_file

    def client(self, user: str = "alice", *, mechanism: str = "SCRAM-SHA-512") -> Login:
        """How a user comes in, in the words of each client: `Producer(cluster.client().confluent)`.

        Args:
            user: `alice`, who may read, write and create topics; `admin`, who may do everything; or
                one of `create_user`. Where nobody is asked who he is, any.
            mechanism: of a cluster with passwords; PLAIN and SCRAM-SHA-256 are offered, too.

        Raises:
            ClusterError: there is no such user.
        """
        if self._security is None:
            return Login(self.bootstrap)
        made = self._throw_away
        names = Login(self.bootstrap, made.protocol, ca_file=made.ca_file)
        if self._security == "tls":
            return names.but(toml=made.folder / f"{USER}.toml")
        toml = made.folder / f"{user}.toml"
        if not toml.exists():
            raise ClusterError(f"there is no user {user!r}: create_user makes one")
        if self._security == "mtls":
            pair = made.folder / f"{user}.pem", made.folder / f"{user}.key"
            return names.but(username=user, certificate_file=pair[0], key_file=pair[1], toml=toml)
        password = made.password(user)
        return names.but(mechanism=mechanism, username=user, password=password, toml=toml)

    def create_user(self, name: str, *, is_expired: bool = False) -> Login:
        """Make a user who may do what `alice` may.

        Args:
            is_expired: the user's certificate is valid no more (security="mtls").

        Raises:
            ClusterError: this cluster has no users, or nodes refuse it.
        """
        from raftmq.cli.dev_cluster import admit

        if self._security not in ("scram", "mtls"):
            raise ClusterError('only a cluster with security="scram" or "mtls" has users')
        if is_expired and self._security != "mtls":
            raise ClusterError('only users of security="mtls" have certificates')
        made = self._throw_away
        try:
            made.add_user(name, is_expired=is_expired)
            admit(made, name, ",".join(self._live_addresses()), self._timeout_s)
        except RaftmqError as error:
            raise ClusterError(str(error)) from error
        made.write_client_files(name, self.bootstrap)
        return self.client(name)

    def delete_user(self, name: str) -> None:
        """Delete a user, which ends its connections (security="scram").

        Raises:
            ClusterError: there is no such user.
        """
        from raftmq_client import ClientError

        if self._security != "scram":
            raise ClusterError('only a cluster with security="scram" can delete users')
        try:
            with self._open_admin() as admin:
                for credential in admin.users([name])[name]:
                    admin.delete_credential(name, credential.mechanism)
        except KeyError:
            raise ClusterError(f"there is no user {name!r}") from None
        except ClientError as error:
            raise ClusterError(str(error)) from error
        for path in self._throw_away.files_of(name):
            path.unlink(missing_ok=True)

    @property
    def prefix(self) -> str:
        """The prefix of this test's topics and groups; under pytest each test has its own, and
        topics with it are deleted after the test."""
        self._is_prefix_used = True
        return self._prefix

    def topic(self, name: str) -> str:
        """The name of a topic (or group) that is this test's own."""
        return self.prefix + name

    def create_topic(
        self, name: str, partitions: int = 1, configs: Mapping[str, object] | None = None
    ) -> str:
        """Create a topic of this test's own; returns once each of its partitions has a leader.

        Args:
            name: with or without this test's prefix.
            partitions: how many.
            configs: Kafka's settings of a topic by name, such as {"retention.ms": 1000}.

        Returns:
            the topic's whole name, as `topic(name)` gives it.

        Raises:
            ClusterError: the cluster refuses it, or it has no leaders in time.
        """
        from raftmq_client import ClientError

        whole = name if self.prefix and name.startswith(self.prefix) else self.topic(name)
        settings = {key: _text(value) for key, value in (configs or {}).items()}
        deadline = time.monotonic() + self._timeout_s
        try:
            with self._open_admin() as admin:
                admin.create_topic(whole, partitions, configs=settings)
                while any(item.leader < 0 for item in admin.topic(whole).partitions):
                    if time.monotonic() > deadline:
                        raise ClusterError(f"topic {whole!r} has partitions without a leader")
                    time.sleep(_POLL_S)
        except ClientError as error:
            raise ClusterError(str(error)) from error
        return whole

    def leader(self, topic: str, partition: int = 0) -> int:
        """The node that leads a partition now.

        Raises:
            ClusterError: there is no such partition, or it has no leader.
        """
        with self._open_admin() as admin:
            for found in admin.topic(topic).partitions:
                if found.partition == partition and found.leader in self._nodes:
                    return int(found.leader)
        raise ClusterError(f"nobody leads partition {partition} of {topic!r} now")

    # ---- nodes ----

    @property
    def node_ids(self) -> tuple[int, ...]:
        """1, 2, 3: all nodes, whether they run or not."""
        return tuple(self._opened)

    def node(self, node: int) -> NodeView:
        """One node as it was after the last call; `refresh` looks again."""
        try:
            return self._opened[node]
        except KeyError:
            known = ", ".join(map(str, self._nodes))
            raise ClusterError(f"there is no node {node}; this cluster has {known}") from None

    def refresh(self) -> None:
        """Ask the keeper which nodes run."""
        self._ask("show")

    @property
    def folder(self) -> Path:
        """Where configurations, logs and data are while the cluster lives."""
        if self._link is None:
            raise ClusterError("this cluster does not run")
        return self._link.folder

    def log(self, node: int) -> str:
        """A node's log so far."""
        path = self.folder / f"node-{self.node(node).id}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # ---- faults ----

    def kill(self, *nodes: int) -> None:
        """`kill -9`: nodes end at once. They stay dead until `restart`."""
        self._ask("kill", chosen=self._running(nodes, "kill"))
        self._downed |= set(nodes)

    def pause(self, *nodes: int) -> None:
        """Freeze nodes (SIGSTOP): their connections stay open, and nothing answers."""
        self._ask("pause", chosen=self._running(nodes, "pause"))

    def resume(self, *nodes: int) -> None:
        """Let frozen nodes go on, by default all that are."""
        chosen = nodes or [n for n, view in self._opened.items() if view.is_paused]
        self._ask("resume", chosen=self._running(chosen, "resume"))
        self._apply_cuts(chosen)

    def restart(self, *nodes: int) -> None:
        """Start dead nodes again, by default all; a running one is stopped first, as by SIGTERM.

        Returns once they serve. A node that sees no majority (of three, another one that runs and
        is not cut off) cannot serve: it is started, and not waited for.

        Raises:
            ClusterError: they do not come up; or a cut between two nodes could not be kept up.
        """
        self.refresh()
        chosen = nodes or [n for n, view in self._opened.items() if not view.is_running]
        running = [n for n in chosen if self.node(n).is_running]
        if running:
            self._ask("stop", chosen=running)
        self._downed -= set(chosen)
        able = [n for n in chosen if self._sees_majority(n, chosen)]
        self._start(able, wait=able)
        self._start([n for n in chosen if n not in able], wait=[])
        # Those that waited for a majority before may have one now.
        waiting = [n for n, v in self._opened.items() if v.is_running and not v.is_paused]
        late = [n for n in waiting if not self.node(n).is_ready and self._sees_majority(n, ())]
        self._start([], wait=late)

    def partition(self, *sides: Collection[int]) -> None:
        """Cut all links between nodes of different sides: `partition({1}, {2, 3})`.

        A cut is silence, as when a switch dies. Cuts add up until `heal`. Clients are not cut off:
        they reach every node.
        """
        members = [self.node(n).id for side in sides for n in side]
        if len(sides) < 2 or len(members) != len(set(members)):
            raise ValueError("a partition takes two or more sides with no node in common")
        for mine, theirs in itertools.permutations(sides, 2):
            self._cuts |= set(itertools.product(mine, theirs))
        self._apply_cuts(self.node_ids)

    def heal(self) -> None:
        """Make all links whole again."""
        self._cuts.clear()
        self._apply_cuts(self.node_ids)

    def lose_power(self) -> None:
        """Cut the power of all nodes at once: what was not synced to disk is gone, all are dead.

        `restart()` starts them again. Needs `power_disk=True`.

        Raises:
            LackError: this machine cannot do that.
        """
        self._ask("lose_power")
        self._downed |= set(self.node_ids)

    # ---- restoring ----

    def restore(self) -> None:
        """End all faults: links whole, all nodes resumed and started; returns once all serve.

        Raises:
            ClusterError: a node had ended by itself, which is reported once it runs again; or they
                do not come back.
        """
        self.refresh()
        fallen = [v for v in self._opened.values() if v.ended and v.id not in self._downed]
        if self._cuts:
            self.heal()
        if any(view.is_paused for view in self._opened.values()):
            self.resume()
        if not all(view.is_running and view.is_ready for view in self._opened.values()):
            self.restart()
        for view in fallen:
            said = self.log(view.id)[-_LOG_TAIL:]
            raise ClusterError(f"node {view.id} {view.ended}, and nobody asked it to:\n{said}")

    def wait_until_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once every running node says that it is well (`/health`).

        Raises:
            ClusterError: with what is wrong, when they do not in time.
        """
        deadline = time.monotonic() + timeout_s
        for view in [v for v in self._opened.values() if v.is_running and not v.is_paused]:
            while True:
                try:
                    health = self._admin(view, "GET", "/health", deadline)
                except OSError as error:
                    health = {"status": "silent", "reason": repr(error)}
                if health["status"] == "ok":
                    break
                if time.monotonic() > deadline:
                    raise ClusterError(f"node {view.id} is not well: {health.get('reason')}")
                time.sleep(_POLL_S)

    def begin_test(self, prefix: str) -> None:
        """Give the topics and groups from here on a prefix of their own (the plugin does)."""
        self._prefix = prefix
        self._is_prefix_used = False

    def end_test(self) -> None:
        """Restore what the test broke and delete its topics (the plugin does)."""
        try:
            self.restore()
        finally:
            if self._is_prefix_used and self._prefix:
                self._delete_topics(self._prefix)

    # ---- within ----

    @property
    def _throw_away(self) -> ThrowAwaySecurity:
        found = ThrowAwaySecurity.of(self.folder / "security")
        if found is None:
            raise ClusterError("this cluster is not secured: Cluster(security=...)")
        return found

    def _admit(self) -> None:
        """Let the first users in."""
        from raftmq.cli.dev_cluster import admit_all

        made = self._throw_away
        self._admin_token = made.admin_token
        try:
            admit_all(made, self.bootstrap, self._timeout_s)
        except RaftmqError as error:
            raise ClusterError(str(error)) from error

    def _open_admin(self) -> Admin:
        from raftmq_client import Admin

        login = self.client("admin")
        timeout_ms = self._timeout_s * 1000
        return Admin(self._live_addresses(), security=login.security, timeout_ms=timeout_ms)

    def _ask(self, do: str, **order: object) -> None:
        if self._link is None:
            raise ClusterError("this cluster does not run: it was closed, or never started")
        answer = self._link.ask(do, self._timeout_s, **order)
        self._nodes = {node["id"]: NodeView(**node) for node in answer["nodes"]}

    @property
    def _opened(self) -> dict[int, NodeView]:
        if not self._nodes:
            raise ClusterError("this cluster does not run: it was closed, or never started")
        return self._nodes

    def _running(self, nodes: Iterable[int], verb: str) -> list[int]:
        self.refresh()
        chosen = list(nodes)
        for node_id in chosen:
            view = self.node(node_id)
            if not view.is_running:
                raise ClusterError(f"cannot {verb} node {node_id}: it does not run ({view.ended})")
        return chosen

    def _live_addresses(self) -> list[str]:
        live = [v for v in self._opened.values() if v.is_running and not v.is_paused]
        return [f"{HOST}:{view.port}" for view in live]

    def _is_cut(self, a: int, b: int) -> bool:
        return (a, b) in self._cuts or (b, a) in self._cuts

    def _sees_majority(self, node_id: int, starting: Collection[int]) -> bool:
        voters = self.node_ids[:VOTERS_MAX]
        seen = [
            other
            for other in voters
            if other == node_id
            or (
                not self._is_cut(node_id, other)
                and not self._opened[other].is_paused
                and (self._opened[other].is_running or other in starting)
            )
        ]
        return 2 * len(seen) > len(voters)

    def _start(self, nodes: Collection[int], wait: Collection[int]) -> None:
        for a, b in itertools.permutations(nodes, 2):
            if self._is_cut(a, b):
                # A node that starts knows of no cut, so the other one must keep it up.
                raise ClusterError(
                    f"nodes {a} and {b} are cut off from each other and neither serves: restart "
                    "the side that has a majority first, or heal()"
                )
        for a, b in itertools.product(nodes, self.node_ids):
            view = self.node(b)
            if self._is_cut(a, b) and view.is_running and not view.is_ready:
                raise ClusterError(f"node {b} does not serve yet and cannot keep up its cut to {a}")
        if nodes or wait:
            self._ask("start", start=list(nodes), wait=list(wait))
            self._apply_cuts(wait)

    def _apply_cuts(self, nodes: Collection[int]) -> None:
        """Tell nodes of their cuts: both ends of each, as far as they serve."""
        deadline = time.monotonic() + self._timeout_s
        self.refresh()
        for node_id in nodes:
            view = self.node(node_id)
            if view.is_running and view.is_ready and not view.is_paused:
                faults = {
                    "block_to": sorted(b for a, b in self._cuts if a == node_id),
                    "block_from": sorted(a for a, b in self._cuts if b == node_id),
                }
                self._admin(view, "PUT", "/faults", deadline, json.dumps(faults))

    def _admin(
        self, view: NodeView, method: str, path: str, deadline: float, body: str | None = None
    ) -> dict[str, Any]:
        # A node that just got ready answers once its admin pages are imported.
        left_s = max(0.1, deadline - time.monotonic())
        connection = http.client.HTTPConnection(HOST, view.admin_port, timeout=left_s)
        try:
            token = {"Authorization": f"Bearer {self._admin_token}"} if self._admin_token else {}
            connection.request(method, path, body, token)
            response = connection.getresponse()
            content: dict[str, Any] = json.loads(response.read())
        finally:
            connection.close()
        if method == "PUT" and response.status != http.client.OK:
            raise ClusterError(f"node {view.id} refuses {path}: {content}")
        return content

    def _delete_topics(self, prefix: str) -> None:
        with self._open_admin() as admin:
            for topic in admin.cluster(None).topics:
                if topic.name.startswith(prefix):
                    admin.delete_topic(topic.name)


def _text(value: object) -> str:
    """A setting as Kafka writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
