"""`raftmq cluster ...`: who is there, who leads, what lags.

Only asks. `cluster status` is made for scripts: it ends with 1 while a partition has no live leader
or too few replicas in sync, and can wait for that to pass.
"""

from __future__ import annotations

from typing import Annotated

import typer

from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    format_time,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import out
from raftmq.cli.main import EXIT_FAILED
from raftmq.errors import ErrorCode
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import QuorumInfo
from raftmq_client.core.metadata import ClusterInfo
from raftmq_client.errors import BrokerError

cluster_app = typer.Typer(help="The cluster as a whole.", no_args_is_help=True)

QUORUM_COLUMNS = ("NodeId", "LogEndOffset", "Lag", "LastCaughtUpTimestamp", "Status")
BAD_COLUMNS = ("Topic", "Partition", "Leader", "Replicas", "Isr")


@cluster_app.command()
def status(
    wait: Annotated[
        float, typer.Option("--wait", metavar="SECONDS", help="Wait so long for it to be healthy.")
    ] = 0.0,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Is all well? Ends with 1 while partitions are without leader or short of replicas.

    Examples: raftmq cluster status --wait 30
    """
    import time

    deadline = time.monotonic() + wait
    with reported(), Admin(bootstrap, timeout_ms=timeout * 1000) as admin:
        while True:
            info = admin.cluster()
            offline, under = _troubles(info)
            if not (offline or under) or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        partitions = sum(len(topic.partitions) for topic in info.topics)
        if as_json:
            show_json(
                {
                    "ClusterId": info.cluster_id,
                    "Controller": info.controller,
                    "Brokers": [broker.node_id for broker in info.brokers],
                    "Topics": len(info.topics),
                    "Partitions": partitions,
                    "OfflinePartitions": [dict(zip(BAD_COLUMNS, r, strict=True)) for r in offline],
                    "UnderReplicatedPartitions": [
                        dict(zip(BAD_COLUMNS, r, strict=True)) for r in under
                    ],
                }
            )
        else:
            ids = ", ".join(str(broker.node_id) for broker in info.brokers)
            out(f"cluster {info.cluster_id}: brokers {ids}; controller {info.controller}")
            out(
                f"{len(info.topics)} topics, {partitions} partitions: {len(offline)} without "
                f"leader, {len(under)} under-replicated"
            )
            if offline or under:
                show(BAD_COLUMNS, [*offline, *under], as_json=False)
        if offline or under:
            raise typer.Exit(EXIT_FAILED)


@cluster_app.command()
def describe(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show the metadata group: its leader, voters, observers and how far they are.

    Examples: raftmq cluster describe
    """
    with reported(), Admin(bootstrap, timeout_ms=timeout * 1000) as admin:
        info = admin.cluster([])
        try:
            quorum = admin.quorum()
        except BrokerError as error:
            if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                raise
            message = f"cluster {info.cluster_id} keeps its metadata elsewhere than in a Raft group"
            raise CommandError(message) from error
        rows = _quorum_rows(quorum)
        if as_json:
            show_json(
                {
                    "ClusterId": info.cluster_id,
                    "LeaderId": quorum.leader,
                    "LeaderEpoch": quorum.leader_epoch,
                    "HighWatermark": quorum.high_watermark,
                    "Replicas": [dict(zip(QUORUM_COLUMNS, row, strict=True)) for row in rows],
                }
            )
            return
        out(f"ClusterId: {info.cluster_id}")
        out(f"LeaderId: {quorum.leader}  LeaderEpoch: {quorum.leader_epoch}")
        out(f"HighWatermark: {quorum.high_watermark}")
        show(QUORUM_COLUMNS, rows, as_json=False)


def _troubles(
    info: ClusterInfo,
) -> tuple[list[tuple[object, ...]], list[tuple[object, ...]]]:
    """(partitions without a live leader, those short of replicas in sync)."""
    alive = {broker.node_id for broker in info.brokers}
    offline: list[tuple[object, ...]] = []
    under: list[tuple[object, ...]] = []
    for topic in info.topics:
        for item in topic.partitions:
            row = (
                topic.name,
                item.partition,
                item.leader,
                list(item.replicas),
                list(item.in_sync),
            )
            if item.leader not in alive:
                offline.append(row)
            elif len(item.in_sync) < len(item.replicas):
                under.append(row)
    return offline, under


def _quorum_rows(quorum: QuorumInfo) -> list[tuple[object, ...]]:
    end = max((item.log_end_offset for item in quorum.voters), default=0)
    rows: list[tuple[object, ...]] = []
    for kind, replicas in (("Follower", quorum.voters), ("Observer", quorum.observers)):
        for item in replicas:
            status = "Leader" if item.node_id == quorum.leader else kind
            caught_up = format_time(item.last_caught_up_timestamp)
            known = item.log_end_offset if item.log_end_offset >= 0 else None
            lag = None if known is None else max(0, end - known)
            rows.append((item.node_id, known, lag, caught_up, status))
    return rows
