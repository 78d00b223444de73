"""`raftmq dev`: a local cluster of separate processes, for trying things out and for tests.

Prints one line `ready BOOTSTRAP` on standard output once every node serves; everything else goes
to standard error. Ends with its nodes on SIGTERM and SIGINT. A dead node stays dead unless
`--restart`.
"""

from __future__ import annotations

import argparse
import os
import select
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from raftmq.cli.console import note, out
from raftmq.cli.dev_cluster import (
    PORT_DEFAULT,
    DevCluster,
    DevError,
    DevNode,
    admit_all,
    find_cluster,
    is_dev_node,
    read_cluster_file,
    read_node_file,
    record_pid,
)
from raftmq.config import METADATA_ENGINES, ConfigError
from raftmq.errors import RaftmqError
from raftmq.runtime.throw_away import ADMIN, USER, ThrowAwaySecurity

READY_TIMEOUT_S: Final = 60.0
_RESTART_DELAY_S: Final = 0.5

_EXAMPLES: Final = """\
examples:
  raftmq dev                              three nodes on 127.0.0.1:9092,9093,9094
  raftmq dev --nodes 1 --port 19092
  raftmq dev --data ./cluster             keep the data; start again with the same folder
  raftmq dev --secure                     TLS, users, rules; prints how clients log in
  raftmq dev --node 2 --data ./cluster    run one node of it again, in the foreground

exit codes: 0 ended as asked, 1 failed, 2 usage or a key that cannot be used
"""

_DECIDED_HERE: Final = frozenset(
    {"node_id", "cluster_id", "data", "peers", "defaults", "metadata_engine"}
    | {"client_listener", "peer_listener", "admin_listener"}
)
PYSYNCOBJ_WARNING: Final = (
    "warning: --metadata-engine pysyncobj is a reference for comparison. It reports success for\n"
    "commands that were never committed, forgets acknowledged ones and never fsyncs;\n"
    "docs/decisions has the table of what was measured. Keep nothing in this cluster."
)


def dev(arguments: Sequence[str]) -> int:
    """Run a local cluster until told to end; gives the exit code."""
    parser = _parser()
    options = parser.parse_args(list(arguments))
    for word in options.set:
        if "=" not in word:
            parser.error(f"--set {word!r} is not KEY=VALUE")
        if word.partition("=")[0] in _DECIDED_HERE:
            parser.error(f"--set {word!r}: {parser.prog} decides this key itself")
    if options.node is not None and options.data is None:
        parser.error("--node needs --data, the folder of its cluster")
    if options.metadata_engine == "pysyncobj":
        note(PYSYNCOBJ_WARNING)
    try:
        if options.node is not None:
            return _run_one(options)
        return _run_all(options)
    except ConfigError as error:
        note(f"raftmq dev: {error}")
        return 2
    except RaftmqError as error:
        note(f"raftmq dev: {error}")
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        note(f"raftmq dev: {where}{error.strerror or error}")
        return 1


def a_number(low: int, high: int | None = None) -> Callable[[str], int]:
    """An option's value, for argparse: a whole number of a range, both ends included."""
    wanted = f"from {low} on" if high is None else f"from {low} to {high}"

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low or (high is not None and number > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
        return number

    return read


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raftmq dev",
        description="Run a local cluster of separate processes on 127.0.0.1.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nodes", type=int, choices=(1, 3, 5), help="how many nodes [3]")
    add("--port", type=a_number(1, 65535), help="client port of the first; others follow [9092]")
    add("--data", metavar="DIR", help="folder to keep [a temporary one, removed at the end]")
    add("--restart", action="store_true", help="start dead nodes again")
    add(
        "--secure",
        action="store_true",
        help="TLS, users and rules: a throw-away CA, and files for clients to log in by",
    )
    add("--node", type=int, metavar="ID", help="run this node of DIR alone, in the foreground")
    add(
        "--metadata-engine",
        choices=METADATA_ENGINES,
        default="raft",
        help="what replicates metadata; pysyncobj loses data and is for comparison only [raft]",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a key of the nodes' configuration, such as log_level=debug; repeatable",
    )
    return parser


class Signals:
    """Turns SIGTERM, SIGINT and SIGCHLD into a readable pipe: no races, no threads."""

    def __init__(self) -> None:
        self.must_end = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {
            number: signal.signal(number, self._end)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        }
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    def close(self) -> None:
        """Put the handlers back."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def _end(self, _number: int, _frame: object) -> None:
        self.must_end = True

    def wait(self, timeout_s: float | None, others: Sequence[int] = ()) -> list[int]:
        """Sleep until a signal, the timeout, or one of the descriptors is readable."""
        ready, _, _ = select.select([self._read, *others], [], [], timeout_s)
        if self._read in ready:
            os.read(self._read, 4096)
            ready.remove(self._read)
        return ready


def start_cluster(
    cluster: DevCluster, signals: Signals, timeout_s: float = READY_TIMEOUT_S
) -> bool:
    """Fork all nodes and wait until each serves; False when told to end meanwhile.

    Raises:
        DevError: a node ended, or they are not ready in time.
    """
    from raftmq.server.kafka.dispatch import warm_up

    cluster.bind()
    warm_up()  # once for all nodes, which would each spend that time right after their start
    for node in cluster.nodes:
        cluster.start(node)
    if not wait_ready(cluster, cluster.nodes, signals, timeout_s):
        return False
    cluster.write_file()
    return True


def wait_ready(
    cluster: DevCluster, nodes: Sequence[DevNode], signals: Signals, timeout_s: float
) -> bool:
    """Wait until started nodes serve; False when told to end meanwhile.

    Raises:
        DevError: one ended, or they are not ready in time.
    """
    deadline = time.monotonic() + timeout_s
    while not signals.must_end:
        waiting = {node.ready_fd: node for node in nodes if node.ready_fd >= 0}
        if not waiting and all(node.is_ready for node in nodes):
            return True
        for descriptor in signals.wait(max(0.0, deadline - time.monotonic()), [*waiting]):
            cluster.hear(waiting[descriptor])
        cluster.reap()
        for node in nodes:
            if node.is_running:
                continue
            tail = cluster.log_tail(node)
            raise DevError(
                f"node {node.plan.id} {node.ended} before it was ready:\n{tail}".rstrip()
            )
        if time.monotonic() > deadline:
            logs = cluster.folder / "node-*.log"
            raise DevError(f"the nodes are not ready after {timeout_s:.0f} s; see {logs}")
    return False


def _run_all(options: argparse.Namespace) -> int:
    settings = _settings(options.set)
    is_temporary = options.data is None
    folder = Path(options.data or tempfile.mkdtemp(prefix="raftmq-dev-")).absolute()
    known = find_cluster(folder)
    nodes = options.nodes or (len(known["nodes"]) if known else 3)
    port = options.port or (known["nodes"][0]["port"] if known else PORT_DEFAULT)
    signals = Signals()
    cluster: DevCluster | None = None
    try:
        cluster = DevCluster.plan(
            folder,
            nodes=nodes,
            port=port,
            metadata_engine=options.metadata_engine,
            settings=settings,
            security="scram" if options.secure else None,
        )
        if start_cluster(cluster, signals):
            if cluster.security is not None:
                admit_all(cluster.security, cluster.bootstrap, READY_TIMEOUT_S)
            out(f"ready {cluster.bootstrap}")
            if cluster.security is not None:
                note(_how_to_log_in(cluster.security))
            kind = " (temporary)" if is_temporary else ""
            note(f"data in {folder}{kind}; Ctrl-C ends")
            _supervise(cluster, signals, must_restart=options.restart)
        return 0
    finally:
        if cluster is not None:
            cluster.close()
            cluster.stop()
            _stop_foreign(cluster)
        signals.close()
        if is_temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _how_to_log_in(security: ThrowAwaySecurity) -> str:
    """What to type next: every line of it works as it stands, also in a folder with blanks."""
    admin, user, properties, user_properties = (
        shlex.quote(str(security.folder / name))
        for name in (
            f"{ADMIN}.toml",
            f"{USER}.toml",
            f"{ADMIN}.properties",
            f"{USER}.properties",
        )
    )
    read = 'dict(line.strip().split("=", 1) for line in open(sys.argv[1]))'
    code = f"import sys; from confluent_kafka.admin import AdminClient as A; c = {read}; "
    code += "print(sorted(A(c).list_topics(timeout=30).topics))"
    return f"""\
clients speak {security.protocol}, nodes TLS; the admin port wants a token. How to log in stands in
files for your eyes alone, with the passwords, which are shown nowhere else:
  {admin}  {ADMIN}, who may do everything
  {user}  {USER}, who reads and writes topics
the same for kcat and other clients on librdkafka:
  {properties}
  {user_properties}

try in another terminal:
  export RAFTMQ_SECURITY={admin}
  raftmq topic create orders
  raftmq produce orders hello --security {user}
  raftmq consume orders --security {user}
  raftmq topic delete orders --security {user}     # refused: {USER} has no right to
  raftmq node list
  raftmq node cordon 1 && raftmq node uncordon 1
  raftmq acl list
  kcat -F {user_properties} -L
  python3 -c '{code}' {user_properties}"""


def _supervise(cluster: DevCluster, signals: Signals, *, must_restart: bool) -> None:
    due: list[tuple[float, DevNode]] = []
    while not signals.must_end:
        for node in cluster.reap():
            note(f"node {node.plan.id} (pid {node.pid}) {node.ended}")
            if must_restart and not node.is_hopeless:
                at = max(time.monotonic(), node.started_at + _RESTART_DELAY_S)
                due.append((at, node))
        now = time.monotonic()
        for at, node in [item for item in due if item[0] <= now]:
            due.remove((at, node))
            cluster.start(node)
            cluster.write_file()
            note(f"node {node.plan.id} started again (pid {node.pid})")
        signals.wait(max(0.0, min(at for at, _ in due) - now) if due else None)


def _stop_foreign(cluster: DevCluster) -> None:
    """Nodes that `--node` runs elsewhere belong to this cluster too."""
    known = read_cluster_file(cluster.folder)
    for node in known["nodes"] if known else ():
        if is_dev_node(node["pid"], node["id"]):
            os.kill(node["pid"], signal.SIGTERM)


def _run_one(options: argparse.Namespace) -> int:
    folder = Path(options.data).absolute()
    config = read_node_file(folder, options.node)
    record_pid(folder, options.node, os.getpid())
    from raftmq.cli.start import run

    return run(config)


def _settings(words: Sequence[str]) -> dict[str, str]:
    """The `--set` words, known to hold an equals sign."""
    return {key: value for key, _, value in (word.partition("=") for word in words)}
