"""The cluster as all its nodes report it: `/status` of each, asked at once, put side by side.

Admin addresses come from `--admin`, from brokers' configurations, and from the registrations that
any `/status` lists, fenced brokers included. A node that does not answer is part of the picture,
with the reason; nothing here raises for it. Against brokers that have no admin port the picture is
what the Kafka protocol gives.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from operator import itemgetter
from typing import Any, Final

import msgspec
from attrs import define, field

from raftmq.cli.admin_port import admin_refusal, admin_request, find_addresses, open_page
from raftmq.types import METADATA_TOPIC
from raftmq_client.blocking.admin import Admin

ASKED_AT_ONCE_MAX: Final = 32
NEEDED: Final = frozenset(
    {"node_id", "health", "isolation", "metadata", "brokers", "partitions", "not_running"}
    | {"quarantined", "journal_is_damaged", "faults", "disk"}
)
"""What the tables read of a `/status`."""

NODE_COLUMNS: Final = (
    "NodeId",
    "Admin",
    "State",
    "Metadata",
    "MetadataLag",
    "Led",
    "Replicas",
    "FreeBytes",
    "Remarks",
)
CATCH_UP_COLUMNS: Final = ("Topic", "Partition", "Replica", "BytesLeft", "EndOffset")
STUCK_COLUMNS: Final = ("Topic", "Partition", "Leader", "LeaderEpoch", "Why")


@define(slots=True)
class NodeReport:
    """One node's answer, or why there is none."""

    address: str
    node_id: int = -1
    status: dict[str, Any] | None = None
    failure: str = ""


@define(slots=True)
class Picture:
    """All answers."""

    reports: list[NodeReport] = field(factory=list)

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The `/status` of those that answered."""
        return [report.status for report in self.reports if report.status is not None]

    # ---- tables ----

    def nodes(self) -> list[tuple[object, ...]]:
        """A row per node."""
        return [self._node_row(report) for report in self.reports]

    def _node_row(self, report: NodeReport) -> tuple[object, ...]:
        known = {
            broker["node_id"]: broker for answer in self.answers for broker in answer["brokers"]
        }
        node_id = None if report.node_id < 0 else report.node_id
        is_fenced = known.get(report.node_id, {}).get("is_fenced", False)
        status = report.status
        if status is None:
            state = "fenced" if is_fenced else "no answer"
            return node_id, report.address, state, None, None, None, None, None, report.failure
        role, lag = self._metadata_of(report.node_id)
        health = status["health"]
        state = "ok" if health["status"] == "ok" else "unavailable"
        partitions = status["partitions"]
        return (
            node_id,
            report.address,
            state,
            role,
            lag,
            sum(row["is_leader"] for row in partitions),
            len(partitions),
            status["disk"]["free_bytes"],
            "; ".join(remarks(status)) or None,
        )

    def _metadata_of(self, node_id: int) -> tuple[str | None, int | None]:
        """(role in the metadata group, entries behind), by its leader's report or else its own."""
        told = [answer["metadata"] for answer in self.answers]
        leading = [m for m in told if m.get("leader") is not None]
        best = max(leading, key=lambda m: int(m["leader_epoch"]), default=None)
        if best is None:
            return None, None
        role = "leader" if best["leader"] == node_id else None
        if role is None:
            role = "voter" if node_id in best["voters"] else "learner"
        members = (row for m in told for row in m.get("members", ()))
        lags = [r["lag_entries"] for r in members if r["node_id"] == node_id]
        return role, next((lag for lag in lags if lag is not None), None)

    def catching_up(self) -> list[tuple[object, ...]]:
        """A row per replica that is behind, as leaders report it."""
        return [
            (row["topic"], row["partition"], one["node_id"], one["bytes_left"], one["end_offset"])
            for row in self._leader_rows()
            for one in row["catching_up"]
        ]

    def _leader_rows(self) -> list[dict[str, Any]]:
        return [row for answer in self.answers for row in answer["partitions"] if row["is_leader"]]

    def behind(self) -> list[tuple[object, ...]]:
        """A row per partition whose newest leader counts voters as out of sync: topic, number,
        leader, voters, voters in sync. Metadata may not say so: its leader table comes later."""
        newest: dict[tuple[str, int], dict[str, Any]] = {}
        for row in self._leader_rows():
            key = row["topic"], row["partition"]
            if key not in newest or row["leader_epoch"] > newest[key]["leader_epoch"]:
                newest[key] = row
        return [
            (*key, row["leader"], row["voters"], row["isr"])
            for key, row in sorted(newest.items())
            if row.get("lagging")  # absent in answers of older versions
        ]

    def stuck(self) -> list[tuple[object, ...]]:
        """A row per partition in trouble, with the reasons that all nodes give."""
        by_name: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for answer in self.answers:
            for row in answer["partitions"]:
                by_name.setdefault((row["topic"], row["partition"]), []).append(row)
        rows: list[tuple[object, ...]] = []
        for (topic, partition), told in sorted(by_name.items()):
            newest = max(told, key=lambda row: (row["is_leader"], row["leader_epoch"]))
            why: dict[str, None] = {}
            for row in told:
                why.update(dict.fromkeys(row["troubles"]))
            if why:
                leader, epoch = newest["leader"], newest["leader_epoch"]
                rows.append((topic, partition, leader, epoch, list(why)))
        return rows + [
            (row["topic"], row["partition"], None, None, [row["why"]])
            for row in self.unheld()
            if (row["topic"], row["partition"]) not in by_name
        ]

    def unheld(self) -> list[dict[str, Any]]:
        """Partitions that no live broker holds, by the newest metadata among the answers."""
        versions = [int(answer["metadata"].get("version", -1)) for answer in self.answers]
        newest = max(zip(versions, self.answers, strict=True), key=itemgetter(0), default=(0, {}))
        return list(newest[1].get("unheld", ()))

    def metadata(self) -> dict[str, Any] | None:
        """The metadata group by its leader's report, else by that of the node that knows most."""
        told = [answer["metadata"] for answer in self.answers if "voters" in answer["metadata"]]
        if not told:
            return None
        best: dict[str, Any] = max(told, key=_how_much)
        return best

    def troubles(self, alive: Collection[int]) -> list[str]:
        """What is wrong with nodes, as sentences; none for brokers that are not raftmq's.

        Args:
            alive: brokers that the cluster counts as live, though their admin port may not answer.
        """
        heard = {answer["node_id"] for answer in self.answers}.union(alive)
        voters = (self.metadata() or {}).get("voters", ())
        found = [
            f"metadata voter {node} is not there: it does not answer, and is no live broker"
            for node in sorted(set(voters).difference(heard))
        ]
        for answer in self.answers:
            disk = answer["disk"]
            if disk["is_full"]:
                found.append(f"node {answer['node_id']}: its disk is full")
            if disk.get("is_stuck"):  # absent in answers of older versions
                found.append(f"node {answer['node_id']}: its disk does not answer")
        rivals = [rival for answer in self.answers for rival in answer.get("rivals", ())]
        found += sorted({_rival_text(rival) for rival in rivals})
        return found

    @property
    def is_complete(self) -> bool:
        """True when every node answered and is well."""
        return all(
            report.status is not None and report.status["health"]["status"] == "ok"
            for report in self.reports
        )


def _rival_text(rival: dict[str, Any]) -> str:
    return (
        f"node_id {rival['node_id']} is used twice: a process at {rival['address']} with storage "
        f"{rival['storage_id']} is refused; stop it, or give it a node_id of its own"
    )


def _how_much(metadata: dict[str, Any]) -> tuple[bool, int, int]:
    """How much a node knows: the leader of the newest term most, then nodes that know a leader."""
    known = sum(row["lag_entries"] is not None for row in metadata["members"])
    return metadata["leader"] is not None, int(metadata["leader_epoch"]), known


def remarks(status: dict[str, Any]) -> list[str]:
    """What an operator should know of a node, beyond its row."""
    found = []
    if status["health"].get("reason"):
        found.append(status["health"]["reason"])
    isolation = status["isolation"]
    if isolation["is_isolated"]:
        seconds = isolation["isolated_ms"] // 1000
        found.append(f"cut off from the metadata majority for {seconds} s")
    if status["disk"]["is_full"]:
        found.append("disk full")
    if status["disk"].get("is_stuck"):  # absent in answers of older versions
        found.append("disk does not answer")
    if status["journal_is_damaged"]:
        found.append("journal was damaged")
    if status["metadata"].get("failure"):
        found.append(f"{METADATA_TOPIC}: {status['metadata']['failure']}")
    found += status.get("turned_away", {}).values()
    links = status.get("peer_tls", {})  # absent in answers of older versions
    if links.get("is_open"):
        found.append("speaks plain with other nodes")
    if links.get("plain_peers") and links["mode"] != "off":
        found.append(f"peers without TLS: {', '.join(map(str, links['plain_peers']))}")
    if status["quarantined"]:
        found.append(f"{len(status['quarantined'])} folders in quarantine")
    if status["not_running"]:
        found.append(f"{len(status['not_running'])} replicas not running yet")
    faults = status["faults"]
    if faults is not None:
        on = {key: value for key, value in faults.items() if value}
        found.append(f"faults on: {on}" if on else "faults armed")
    return found


def take_picture(admin: Admin | None, addresses: Iterable[str], timeout_s: float) -> Picture:
    """Ask every node that can be found, all at once.

    Args:
        admin: to find the first admin port by; None: only `addresses` are there to begin with.
        addresses: admin ports, as an operator named them.
        timeout_s: for each node.
    """
    reports = {report.address: report for report in _ask_all(list(addresses), timeout_s)}
    if admin is not None and not any(r.status for r in reports.values()):
        for address in find_addresses(admin):
            report = reports[address] = ask_node(address, timeout_s)
            if report.status is not None:
                break  # it knows all other nodes
    while wanted := _others(reports):
        for report in _ask_all(wanted, timeout_s):
            reports[report.address] = report
    return Picture(sorted(reports.values(), key=lambda r: (r.node_id < 0, r.node_id, r.address)))


def _others(reports: dict[str, NodeReport]) -> list[str]:
    """Admin ports that the answers list and that were not asked yet; notes ids of known ones."""
    known = _registered(reports.values())
    for address, node_id in known.items():
        if address in reports and reports[address].node_id < 0:
            reports[address].node_id = node_id
    answered = {r.node_id for r in reports.values() if r.status is not None}
    return [a for a, n in known.items() if a not in reports and n not in answered]


def _registered(reports: Iterable[NodeReport]) -> dict[str, int]:
    """Admin address to node, as the answers so far list them."""
    return {
        broker["addresses"]["admin"]: broker["node_id"]
        for report in reports
        if report.status is not None
        for broker in report.status["brokers"]
        if "admin" in broker["addresses"]
    }


def _ask_all(addresses: list[str], timeout_s: float) -> list[NodeReport]:
    if not addresses:
        return []
    # Each thread knows the command's --security by a copy of this one's context.
    contexts = [copy_context() for _ in addresses]
    with ThreadPoolExecutor(min(len(addresses), ASKED_AT_ONCE_MAX)) as pool:
        asked = zip(contexts, addresses, strict=True)
        return list(pool.map(lambda one: one[0].run(ask_node, one[1], timeout_s), asked))


def ask_node(address: str, timeout_s: float) -> NodeReport:
    """The `/status` of the node with that admin port, or why there is none."""
    try:
        with open_page(admin_request(address, "/status"), timeout_s) as answer:
            body = answer.read()
        status = msgspec.json.decode(body, type=dict[str, Any])
        if not status.keys() >= NEEDED:
            return NodeReport(address, failure="its /status is of another version of raftmq")
        return NodeReport(address, status["node_id"], status)
    except urllib.error.HTTPError as error:
        with error:
            refusal = admin_refusal(error) or f"answers HTTP {error.code}"
            return NodeReport(address, failure=refusal)
    except urllib.error.URLError as error:
        return NodeReport(address, failure=_reason(error.reason))
    except OSError as error:
        return NodeReport(address, failure=_reason(error))
    except (ValueError, KeyError, msgspec.MsgspecError):
        return NodeReport(address, failure="answers something else than raftmq's /status")


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).lower()
