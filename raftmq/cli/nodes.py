"""`raftmq node ...`: who is there, and replacing a node that is gone for good.

What only raftmq knows (storage ids, who votes on metadata, what is being replaced) is asked of the
admin port of any live node, whose address a broker's configuration names. Against other brokers
`node list` shows what the Kafka protocol tells.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Annotated, Any, Final

import msgspec
import typer

from raftmq.cli import completion
from raftmq.cli.broker_configs import node_config_app
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    open_admin,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import note, out
from raftmq.cli.main import EXIT_FAILED, EXIT_UNKNOWN
from raftmq.cli.picture import find_addresses
from raftmq_client.blocking.admin import Admin

node_app = typer.Typer(help="Nodes (brokers).", no_args_is_help=True)
node_app.add_typer(node_config_app, name="config")

NODE_COLUMNS: Final = (
    "NodeId",
    "Host",
    "Port",
    "Rack",
    "StorageId",
    "Role",
    "State",
    "Controller",
    "Leaders",
    "Replicas",
)
POLL_S: Final = 0.25
LOST_S: Final = 30.0
"""No node answers for so long: nobody knows how far the replacement is."""


@node_app.command("list")
def list_nodes(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List nodes: role in the metadata group, live or fenced, what they lead and keep.

    Examples: raftmq node list --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        found = AdminPort.find(admin, timeout)
        told = None if found is None else found.get("/nodes")
        rows = _rows_of_cluster(admin) if told is None else [*map(_row, _nodes(told))]
        show(NODE_COLUMNS, rows, as_json=as_json)


@node_app.command("replace")
def replace_node(
    old: Annotated[
        int,
        typer.Argument(
            metavar="OLD", autocompletion=completion.nodes, help="The node that is gone.", min=0
        ),
    ],
    new: Annotated[
        int,
        typer.Argument(metavar="NEW", autocompletion=completion.nodes, help="A live node.", min=0),
    ],
    even_if_alive: Annotated[
        bool, typer.Option("--even-if-alive", help="Empty OLD while it still runs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show each step and its quorum; change nothing.")
    ] = False,
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Watch it so long.", min=0)
    ] = 3600.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Let NEW take the place of OLD: as a voter of metadata, and for every partition replica.

    The cluster does it by itself once begun; the command shows how far it is, may be ended at any
    time, and run again to go on watching. NEW has joined before, with the `peers` of this cluster.

    Examples: raftmq node replace 1 4 --dry-run
    """
    with reported():
        with open_admin(bootstrap, timeout) as admin:
            port = AdminPort.find(admin, timeout)
        if port is None:
            raise CommandError("no node of this cluster tells of an admin port")
        answer = port.post(
            "/nodes/replace",
            {
                "old_id": old,
                "new_id": new,
                "even_if_alive": even_if_alive,
                "dry_run": dry_run,
                "timeout_ms": round(timeout * 1000),
            },
        )
        code = answer.get("code", "UNKNOWN_SERVER_ERROR")
        if as_json and (dry_run or code != "NONE"):
            show_json(answer)
        if code != "NONE":
            is_unknown = code == "REQUEST_TIMED_OUT"
            raise CommandError(
                f"{answer.get('message') or answer.get('error') or code} ({code})",
                EXIT_UNKNOWN if is_unknown else EXIT_FAILED,
            )
        if not as_json:
            for step in answer["steps"]:
                out(step)
            out(f"replacing node {old} by node {new}: {answer['message']}")
        if not dry_run:
            _watch(port, old, wait, as_json)


def _watch(port: AdminPort, old: int, wait: float, as_json: bool) -> None:
    """Show how far a replacement is until it is done."""
    deadline = time.monotonic() + wait
    heard = seen = time.monotonic()
    shown = ""
    while True:
        try:
            told = port.get("/nodes")
            heard = time.monotonic()
        except CommandError:
            if time.monotonic() - heard > LOST_S:
                raise
            told = {"replacements": []}
        row = next((r for r in told["replacements"] if r["old_id"] == old), None)
        if row is None and time.monotonic() - seen > LOST_S:
            raise CommandError(f"nobody knows of a replacement of node {old} any more")
        if row is not None:
            seen = time.monotonic()
            text = _progress_text(row)
            if text != shown and not as_json:
                out(text)
            shown = text
            if row["is_done"] or row["waits_for_end"]:
                if as_json:
                    show_json(row)
                if row["is_done"] or _is_live(told, old):
                    return
        if time.monotonic() >= deadline:
            note("The cluster goes on by itself; run the same again to watch it.")
            raise CommandError(f"node {old} is not replaced yet: {shown}", EXIT_UNKNOWN)
        time.sleep(POLL_S)


def _is_live(told: dict[str, Any], node_id: int) -> bool:
    return any(n["node_id"] == node_id and n["state"] == "live" for n in told["nodes"])


def _progress_text(row: dict[str, Any]) -> str:
    old, new = row["old_id"], row["new_id"]
    if row["is_done"]:
        return f"done: node {new} has taken the place of node {old}, which is forgotten"
    if row["waits_for_end"]:
        return f"node {old} holds nothing any more; it is forgotten once it has been stopped"
    voting = "metadata: settled" if row["is_voting_settled"] else "metadata: under way"
    text = f"{voting}; partitions to move: {row['partitions']}"
    if row["stuck"]:
        names = ", ".join(row["stuck"][:5])
        text += f", of which {len(row['stuck'])} have no leader ({names})"
    return text


def _nodes(told: dict[str, Any]) -> list[dict[str, Any]]:
    for node in told["nodes"]:
        node["is_controller"] = node["node_id"] == told["controller_id"]
    nodes: list[dict[str, Any]] = told["nodes"]
    return nodes


def _row(node: dict[str, Any]) -> tuple[object, ...]:
    host, _, port = node.get("client_address", "").rpartition(":")
    return (
        node["node_id"],
        host or None,
        int(port) if port else None,
        node.get("rack"),
        node.get("storage_id"),
        node["role"],
        node["state"],
        node["is_controller"],
        node["leaders"],
        node["replicas"],
    )


def _rows_of_cluster(admin: Admin) -> list[tuple[object, ...]]:
    info = admin.cluster()
    partitions = [item for topic in info.topics for item in topic.partitions]
    return [
        (
            broker.node_id,
            broker.host,
            broker.port,
            broker.rack,
            None,
            None,
            "live",
            broker.node_id == info.controller,
            sum(item.leader == broker.node_id for item in partitions),
            sum(broker.node_id in item.replicas for item in partitions),
        )
        for broker in sorted(info.brokers, key=lambda item: item.node_id)
    ]


class AdminPort:
    """The admin ports of live nodes: the first that answers is asked."""

    def __init__(self, addresses: list[str], timeout_s: float) -> None:
        self._addresses = addresses
        self._timeout_s = timeout_s

    @classmethod
    def find(cls, admin: Admin, timeout_s: float) -> AdminPort | None:
        """Ask brokers for one that answers, and it for the others; None where nobody has one.

        Brokers that are gone or hang are passed over: an operator comes when nodes are missing.
        """
        silent = []
        for address in find_addresses(admin):
            try:
                told = cls([address], timeout_s).get("/nodes")
            except CommandError:
                silent.append(address)
                continue
            others = [n.get("admin_address") for n in told["nodes"] if n["state"] == "live"]
            rest = [other for other in others if other and other != address]
            return cls([address, *rest], timeout_s)
        return cls(silent, timeout_s) if silent else None

    def get(self, path: str) -> dict[str, Any]:
        """What any node answers.

        Raises:
            CommandError: none does.
        """
        failures = []
        for address in list(self._addresses):
            try:
                return self._ask(urllib.request.Request(f"http://{address}{path}"))
            except OSError as error:
                failures.append(f"{address}: {error}")
                self._addresses.append(self._addresses.pop(0))  # another one first, next time
        raise CommandError(f"no admin port answers: {'; '.join(failures)}", EXIT_UNKNOWN)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Have a node do something, once.

        Raises:
            CommandError: nobody was reached, or the answer was lost.
        """
        self.get("/nodes")  # brings one that answers to the front
        request = urllib.request.Request(
            f"http://{self._addresses[0]}{path}",
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
        )
        try:
            return self._ask(request)
        except OSError as error:
            raise CommandError(f"outcome unknown: {error}", EXIT_UNKNOWN) from error

    def _ask(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s + 5) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                body = error.read()
            if error.code == 404:
                raise CommandError("the other side has no /nodes: an older raftmq?") from error
        parsed: dict[str, Any] = msgspec.json.decode(body)
        return parsed
