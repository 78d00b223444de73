"""Metrics of the whole node, a table with one line each; of its other nodes, APIs and topics.

`counter` and `gauge` take a name, a help text and a function of the node. What a node lacks (the
metadata replica where metadata runs on the reference engine) reads as 0. An API has rows from its
first request on; a topic from the first replica of it that this node runs.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from math import inf
from typing import TYPE_CHECKING, Final

from raftmq.controller.replacement import partitions_left
from raftmq.node.loop_watch import FULL_COLLECTIONS
from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work
from raftmq.replication.multiraft import Stream
from raftmq.runtime.certificates import ServerTls
from raftmq.runtime.disk import DISK_FULL

if TYPE_CHECKING:
    from raftmq.counts import TopicCounts
    from raftmq.node.composition import NodeCore


Read = Callable[["NodeCore"], float]
_TABLE: Final[list[tuple[Metric, Read]]] = []


def counter(name: str, help_text: str, read: Read) -> None:
    """Declare a number that only rises."""
    _TABLE.append((Metric(name, "counter", help_text), read))


def gauge(name: str, help_text: str, read: Read) -> None:
    """Declare a number that rises and falls."""
    _TABLE.append((Metric(name, "gauge", help_text), read))


# ---- the node in the cluster ----

gauge(
    "raftmq_node_ready",
    "1 while clients are served: joined, unfenced, metadata majority seen",
    lambda node: node.is_serving and node.control.lifecycle.is_ready,
)
gauge(
    "raftmq_node_isolated_seconds",
    "For how long no majority of the metadata group was seen",
    lambda node: node.control.lifecycle.isolated_ms() / 1e3,
)
gauge(
    "raftmq_node_is_controller",
    "1 on the node that decides for the cluster",
    lambda node: node.control.engine.is_leader,
)
gauge(
    "raftmq_brokers",
    "Brokers that are registered, as this node knows",
    lambda node: len(node.engine.image.brokers),
)
gauge(
    "raftmq_brokers_fenced",
    "Registered brokers that are fenced: out of Metadata",
    lambda node: sum(broker.is_fenced for broker in node.engine.image.brokers.values()),
)
gauge(
    "raftmq_nodes_leaving",
    "Nodes that are being replaced (`raftmq node replace`)",
    lambda node: len(node.engine.image.leaving()),
)
gauge(
    "raftmq_nodes_leaving_partitions",
    "Partitions that a leaving node still holds, as far as metadata knows",
    lambda node: partitions_left(node.engine.image),
)
gauge(
    "raftmq_recoveries",
    "How often a lost majority was given up (`raftmq recover --unsafe`)",
    lambda node: node.engine.image.recoveries,
)
gauge("raftmq_topics", "Topics of the cluster", lambda node: len(node.engine.image.topics))
gauge("raftmq_groups", "Consumer groups", lambda node: len(node.engine.image.groups.groups))
gauge(
    "raftmq_coordinator_unconfirmed_seconds",
    "How long ago it was confirmed that this node coordinates its groups; 0 without groups",
    lambda node: node.coordinator.unconfirmed_ms() / 1e3,
)
counter(
    "raftmq_offset_commits_total",
    "Offset commits that this node's coordinator took",
    lambda node: node.coordinator.commits.commits_count,
)
counter(
    "raftmq_offset_commit_commands_total",
    "Metadata commands that carried them",
    lambda node: node.coordinator.commits.commands_count,
)
gauge(
    "raftmq_offset_commits_waiting",
    "Offsets that wait for the next such command",
    lambda node: node.coordinator.commits.offsets_waiting,
)
counter(
    "raftmq_isolation_transfers_total",
    "Leaderships handed over because this node saw no metadata majority",
    lambda node: node.partitions.isolation.handed_over_count,
)

# ---- delays ----

gauge(
    "raftmq_delays_pending",
    "Records that wait in delay partitions led here; of cancelled ones some may still count",
    lambda node: node.partitions.delays.pending_count,
)
gauge(
    "raftmq_delays_held",
    "Of the records that wait those in memory, in delay partitions led and followed here",
    lambda node: node.partitions.delays.held_count,
)
gauge(
    "raftmq_delays_blocked",
    "Delay partitions led here whose next delivery was not taken at the last attempt",
    lambda node: node.partitions.delays.blocked_count,
)
gauge(
    "raftmq_delays_late_seconds",
    "How late the latest of the last deliveries of each partition led here was noted",
    lambda node: node.partitions.delays.late_ms / 1e3,
)
counter(
    "raftmq_delays_delivered_total",
    "Records that targets have taken from this node",
    lambda node: node.partitions.delays.delivered_count,
)
counter(
    "raftmq_delays_sends_failed_total",
    "Attempts to deliver that were not answered with success, and are repeated",
    lambda node: node.partitions.delays.sends_failed_count,
)
counter(
    "raftmq_delays_given_up_total",
    "Records that are dead because for raftmq.delivery.giveup.ms no target took them",
    lambda node: node.partitions.delays.given_up_count,
)

# ---- transactions ----

gauge(
    "raftmq_transaction_requests_parked",
    "Requests that wait here for the markers of the transaction before theirs",
    lambda node: node.transactions.parked_count,
)
counter(
    "raftmq_transaction_rows_total",
    "Steps of transactions that this node asked the metadata group for",
    lambda node: node.transaction_rows.rows_count,
)
counter(
    "raftmq_transaction_commands_total",
    "Metadata commands that carried them",
    lambda node: node.transaction_rows.commands_count,
)
gauge(
    "raftmq_transaction_rows_waiting",
    "Steps that wait for the next such command",
    lambda node: len(node.transaction_rows),
)
counter(
    "raftmq_transaction_markers_total",
    "Ends of transactions that leaders here committed, each partition's counted",
    lambda node: node.led_transactions.markers_count,
)
gauge(
    "raftmq_transaction_markers_under_way",
    "Ends that leaders here write just now",
    lambda node: node.led_transactions.ends_under_way,
)
counter(
    "raftmq_transaction_reports_failed_total",
    "Reports of such ends whose outcome was unknown; they were made again",
    lambda node: node.led_transactions.reports_failed_count,
)
counter(
    "raftmq_transactions_expired_total",
    "Transactions that this node aborted, as controller, since they took too long",
    lambda node: node.transaction_expiry.aborted_count,
)
counter(
    "raftmq_transactional_ids_forgotten_total",
    "Transactional ids that this node forgot, as controller, since nobody used them",
    lambda node: node.transaction_expiry.forgotten_count,
)

# ---- metadata ----

gauge(
    "raftmq_metadata_applied_index",
    "End of the metadata log that is applied here",
    lambda node: node.machine.applied_end,
)
gauge(
    "raftmq_metadata_lag_entries",
    "Committed metadata entries that are not applied here yet",
    lambda node: (
        0
        if node.metadata_replica is None
        else max(0, node.metadata_replica.commit_end - node.machine.applied_end)
    ),
)
gauge(
    "raftmq_metadata_log_bytes",
    "Metadata commands applied since the last snapshot",
    lambda node: node.machine.log_bytes,
)
gauge(
    "raftmq_metadata_snapshot_bytes",
    "Size of the last metadata snapshot written or read",
    lambda node: node.machine.state_bytes,
)
gauge(
    "raftmq_metadata_leader_epoch",
    "Leader epoch (Raft term) of the metadata group",
    lambda node: node.control.engine.controller_epoch,
)

# ---- the client port ----

gauge(
    "raftmq_connections",
    "Client connections now open",
    lambda node: node.broker.metrics.connections,
)
counter(
    "raftmq_connections_accepted_total",
    "Client connections accepted",
    lambda node: node.broker.metrics.connections_accepted,
)
counter(
    "raftmq_connections_refused_total",
    "Client connections above the limit",
    lambda node: node.broker.metrics.connections_refused,
)
counter(
    "raftmq_protocol_errors_total",
    "Connections closed for what they sent",
    lambda node: node.broker.metrics.protocol_errors,
)
counter(
    "raftmq_received_bytes_total",
    "Bytes of requests of clients",
    lambda node: node.broker.metrics.bytes_in,
)
counter(
    "raftmq_sent_bytes_total",
    "Bytes of answers to clients",
    lambda node: node.broker.metrics.bytes_out,
)
counter(
    "raftmq_sendfile_bytes_total",
    "Bytes of answers sent from files without a copy",
    lambda node: node.broker.metrics.bytes_sendfile,
)
counter(
    "raftmq_direct_sends_total",
    "Answers that left without a task switch",
    lambda node: node.broker.metrics.direct_sends,
)
counter(
    "raftmq_writer_wakes_total",
    "Times a writer task had to wake for a full socket or a late answer",
    lambda node: node.broker.metrics.writer_wakes,
)
counter(
    "raftmq_read_aheads_total",
    "Cold spans read by a worker before they were sent",
    lambda node: node.broker.metrics.read_aheads,
)
gauge(
    "raftmq_parked_fetches",
    "Fetches that wait for records",
    lambda node: node.broker.metrics.parked_fetches,
)
gauge(
    "raftmq_request_memory_bytes",
    "Memory of requests in hand, and of what came of those on their way",
    lambda node: node.request_memory.bytes_used,
)
gauge(
    "raftmq_request_memory_limit_bytes",
    "Most memory for requests in hand (request_memory_bytes_max)",
    lambda node: node.request_memory.bytes_max,
)
gauge(
    "raftmq_request_memory_waiting",
    "Connections that wait for request memory",
    lambda node: node.request_memory.waiting_count,
)

# ---- disk ----

counter(
    "raftmq_appended_batches_total",
    "Batches appended to logs here, as leader or follower; divided by raftmq_fsync_seconds_count "
    "it tells how many one fsync made durable",
    lambda node: node.partitions.counts.appends,
)
gauge(
    "raftmq_open_files",
    "Open segment and index files in the cache",
    lambda node: len(node.plane.shared.files),
)
gauge(
    "raftmq_open_files_limit",
    "Most open files in that cache (open_files_max)",
    lambda node: node.plane.shared.files.files_max,
)
gauge(
    "raftmq_index_memory_bytes",
    "Memory of loaded offset and time indexes",
    lambda node: node.plane.shared.indexes.used_bytes,
)
gauge(
    "raftmq_recent_bytes",
    "Memory of the newest batches, from which followers are served",
    lambda node: node.plane.shared.recent.used_bytes,
)
counter(
    "raftmq_catch_up_bytes_total",
    "Bytes sent to replicas that caught up: new ones, and those that had fallen far behind",
    lambda node: node.plane.catch_up.rate.bytes_total,
)
counter(
    "raftmq_catch_up_holds_total",
    "How often a replica that catches up had to wait for the limit",
    lambda node: node.plane.catch_up.rate.holds_total,
)
gauge(
    "raftmq_catch_up_held",
    "Led partitions with a replica that waits for the limit of catch-up now",
    lambda node: node.plane.catch_up.rate.waiting_count,
)
gauge(
    "raftmq_catch_up_limit_bytes_per_second",
    "The limit of catch-up in force; 0: none",
    lambda node: node.plane.catch_up.rate.bytes_per_s,
)
counter(
    "raftmq_scrub_read_bytes_total",
    "Stored bytes that the background check read",
    lambda node: node.partitions.counts.scrub_read_bytes,
)
counter(
    "raftmq_scrub_batches_total",
    "Batches that the background check found sound",
    lambda node: node.partitions.counts.scrub_batches,
)
counter(
    "raftmq_scrub_damages_total",
    "Damaged ranges that the background check found",
    lambda node: node.partitions.counts.scrub_damages,
)
counter(
    "raftmq_damages_found_total",
    "Damaged ranges found since the start, by reads and by the background check",
    lambda node: node.plane.shared.watch.damages_found,
)
counter(
    "raftmq_damages_repaired_total",
    "Damaged ranges repaired from peers",
    lambda node: node.plane.shared.watch.damages_repaired,
)
counter(
    "raftmq_segments_rolled_total",
    "Segments begun",
    lambda node: node.plane.shared.watch.segments_rolled,
)
counter(
    "raftmq_disk_full_errors_total",
    "Writes that a full disk refused",
    lambda _: DISK_FULL.count,
)
gauge("raftmq_disk_full", "1 while produces are refused", lambda node: node.events.is_disk_full)
gauge(
    "raftmq_disk_stuck",
    "1 while a flush has not come back for 2 s: leaderships are handed over",
    lambda node: node.events.is_disk_stuck,
)
gauge(
    "raftmq_disk_size_bytes",
    "Size of the file system of the data folder",
    lambda node: node.events.disk_space()[0],
)
gauge(
    "raftmq_disk_free_bytes",
    "What is free of it",
    lambda node: node.events.disk_space()[1],
)

# ---- Raft ----

counter(
    "raftmq_elections_total",
    "Elections that replicas here stood in",
    lambda node: node.partitions.counts.elections,
)
counter(
    "raftmq_elections_won_total",
    "Elections that replicas here won",
    lambda node: node.partitions.counts.elections_won,
)
counter(
    "raftmq_leader_changes_total",
    "Times that a partition's leader became another one, as replicas here saw it",
    lambda node: node.partitions.counts.leader_changes,
)
gauge(
    "raftmq_resting_groups",
    "Idle Raft groups that exchange no heartbeats of their own",
    lambda node: node.plane.multiraft.quiescent_count,
)

# ---- the loop ----

gauge(
    "raftmq_loop_lag_max_seconds",
    "The longest that a turn of the loop delayed a tick, since the start",
    lambda node: node.plane.loop_watch.lag.seconds_max,
)
counter(
    "raftmq_loop_stalls_total",
    "Ticks later than a quarter of the election timeout",
    lambda node: node.plane.loop_watch.stalls_count,
)
counter(
    "raftmq_loop_stalls_without_core_total",
    "Those of them that would have been none, had the machine or its host had a core for the loop",
    lambda node: node.plane.loop_watch.without_core_count,
)

gauge(
    "raftmq_election_timeout_factor",
    "How much longer than configured a leader's silence is borne here, since ticks come late",
    lambda node: 1 << node.plane.multiraft.timeout_doublings,
)

MOVES: Final = Metric(
    "raftmq_moves",
    "gauge",
    "Moves of replicas by origin and state, as the controller knows them; 0 on other nodes. Stuck "
    "ones count as running too",
    ("origin", "state"),
)
BUILD: Final = Metric(
    "raftmq_build_info", "gauge", "Versions; the value is 1", ("version", "python")
)
NODE: Final = Metric(
    "raftmq_node_info", "gauge", "Who this is; the value is 1", ("cluster_id", "node_id", "rack")
)
LOOP_LAG: Final = Metric(
    "raftmq_loop_lag_seconds", "histogram", "How late ticks came because the loop was busy"
)
SCRAPE_TURN: Final = Metric(
    "raftmq_scrape_turn_max_seconds",
    "gauge",
    "The longest that reading for a scrape kept the loop in one turn, since the start",
)
FSYNC: Final = Metric("raftmq_fsync_seconds", "histogram", "Time of one group commit's fdatasync")


def _version() -> str:
    try:
        return version("raftmq")
    except PackageNotFoundError:
        return "unknown"


COLLECTIONS: Final = Metric(
    "raftmq_gc_full_seconds",
    "histogram",
    "Time of a full garbage collection, in which the loop stands still",
)
VERSIONS: Final = (_version(), platform.python_version())
"""Looked up once, while a worker thread imports this module: that takes tens of milliseconds."""


def _collect_node(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    for metric, read in _TABLE:
        scrape[metric].add((), float(read(node)))
    yield None
    for origin, counts in node.control.controller.move_figures().items():
        for state in ("running", "planned", "stuck"):
            scrape[MOVES].add((str(origin) or "none", state), getattr(counts, state))
    yield None
    scrape[BUILD].add(VERSIONS, 1)
    config = node.config
    scrape[NODE].add((config.cluster_id, str(config.node_id), config.rack or ""), 1)
    scrape[LOOP_LAG].add_histogram((), node.plane.loop_watch.lag)
    scrape[COLLECTIONS].add_histogram((), FULL_COLLECTIONS)
    scrape[FSYNC].add_histogram((), node.plane.flusher.latency)
    yield None


NODE_METRICS: Final = Collector(
    (
        *(metric for metric, _ in _TABLE),
        MOVES,
        BUILD,
        NODE,
        LOOP_LAG,
        COLLECTIONS,
        SCRAPE_TURN,
        FSYNC,
    ),
    _collect_node,
)


# ---- per other node ----

CONNECTED: Final = Metric(
    "raftmq_peer_connected", "gauge", "1 while the streams to that node stand", ("peer",)
)
QUEUED: Final = Metric(
    "raftmq_peer_queue_bytes", "gauge", "Bytes that wait for that node", ("peer", "stream")
)
SENT: Final = Metric(
    "raftmq_peer_sent_bytes_total", "counter", "Bytes given to that node", ("peer", "stream")
)
DROPPED: Final = Metric(
    "raftmq_peer_dropped_frames_total",
    "counter",
    "Frames dropped: no connection, or its queue is full; Raft sends again what matters",
    ("peer", "stream"),
)
REFUSED: Final = Metric(
    "raftmq_peer_streams_refused_total",
    "counter",
    "Streams at the peer port, or to peers, that were refused or ended for what came on them: no "
    "certificate of the node that it says it is, no secret of the cluster, no hello, another "
    "cluster's or version's, above a limit, a bad frame, too much memory, too slow, or a bug met",
    ("reason",),
)


def _collect_peers(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    links = node.plane.links
    for peer, stream in sorted(links.streams()):
        counts = links.counts(peer, stream)
        labels = (str(peer), stream)
        scrape[QUEUED].add(labels, counts.queued_bytes)
        scrape[SENT].add(labels, counts.sent_bytes)
        scrape[DROPPED].add(labels, counts.dropped_frames)
        if stream == Stream.BULK:
            scrape[CONNECTED].add((str(peer),), links.is_connected(peer))
    for reason, count in links.refusals.items():
        scrape[REFUSED].add((reason,), count)
    yield None


PEERS: Final = Collector((CONNECTED, QUEUED, SENT, DROPPED, REFUSED), _collect_peers)


REQUESTS: Final = Metric("raftmq_requests_total", "counter", "Requests answered", ("api",))
ERRORS: Final = Metric(
    "raftmq_request_errors_total",
    "counter",
    "Error codes in answers, each partition's or topic's counted",
    ("api", "error"),
)
FAILURES: Final = Metric(
    "raftmq_request_failures_total",
    "counter",
    "Requests that could not be answered and closed their connection",
    ("api",),
)
LATENCY: Final = Metric(
    "raftmq_request_seconds",
    "histogram",
    "From the last byte of a request to its answer; a fetch includes its wait for records",
    ("api",),
)
BUGS: Final = Metric(
    "raftmq_connection_bugs_total",
    "counter",
    "Exceptions of this node at the client port, by kind; each cost one connection at most",
    ("kind",),
)
ADMIN_BUGS: Final = Metric(
    "raftmq_admin_bugs_total",
    "counter",
    "Exceptions of this node that cost a request at the admin port, or its connection, by kind; "
    "the log has one of them in ten seconds",
    ("kind",),
)
REFUSALS: Final = Metric(
    "raftmq_refusals_total",
    "counter",
    "What the client port refused or hung up on, by the bound that said so: a configuration key, "
    "memory where the process had none left, or admin_connections (of the admin port)",
    ("bound",),
)

HANDSHAKES: Final = Metric(
    "raftmq_tls_handshakes_total", "counter", "TLS handshakes of clients that came to their end"
)
HANDSHAKE_FAILURES: Final = Metric(
    "raftmq_tls_handshake_failures_total",
    "counter",
    "TLS handshakes of clients that did not, by what was wrong: certificate (of either side), "
    "protocol, closed by the client, timeout, half_open_max (it gave way to newer ones), "
    "mapping_rules (none gave the certificate a name), bug",
    ("reason",),
)
CERTIFICATES: Final = Metric(
    "raftmq_certificate_expires_timestamp_seconds",
    "gauge",
    "When the first certificate of a listener's chain ceases to be valid, in Unix time; also of "
    "peer_listener and admin_listener, where they have certificates of files",
    ("listener",),
)
CRLS: Final = Metric(
    "raftmq_crl_expires_timestamp_seconds",
    "gauge",
    "When the first list of revoked certificates of a listener has to be replaced, in Unix time: "
    "from then on everybody is refused whose certificate it is to be looked up for",
    ("listener",),
)
AUTHENTICATIONS: Final = Metric(
    "raftmq_authentications_total",
    "counter",
    "How often clients authenticated by SASL, by mechanism and outcome: done, again (KIP-368) or "
    "failed; expired counts sessions that ended without it",
    ("mechanism", "outcome"),
)
DENIALS: Final = Metric(
    "raftmq_denials_total",
    "counter",
    "What callers had no right to, by the kind of resource and the operation",
    ("resource", "operation"),
)
UNAUTHORIZED: Final = Metric(
    "raftmq_commands_refused_total",
    "counter",
    "Metadata commands that other nodes sent to this one, the controller, and that they may not "
    "send, by kind",
    ("command",),
)
REQUESTS_REFUSED: Final = Metric(
    "raftmq_peer_requests_refused_total",
    "counter",
    "Requests that other nodes may not make of this one (leaderships that they cannot have, "
    "deliveries of others, orders of a controller), by kind",
    ("request",),
)
AUDIT_LINES: Final = Metric(
    "raftmq_audit_lines_total",
    "counter",
    "Lines handed to the audit file: of authentications, denials and administrative changes, by "
    "what came of them",
    ("kind", "outcome"),
)
AUDIT_LEFT_OUT: Final = Metric(
    "raftmq_audit_lines_left_out_total",
    "counter",
    "Lines that are missing in the audit file: rate (strangers caused too many of them), memory "
    "(the file could not be written for too long)",
    ("reason",),
)

_TOPIC: Final = (
    (
        Metric(
            "raftmq_topic_messages_in_total",
            "counter",
            "Messages appended by producers on leaders here",
            ("topic",),
        ),
        "messages_in",
    ),
    (
        Metric(
            "raftmq_topic_in_bytes_total",
            "counter",
            "Bytes of batches appended by producers on leaders here",
            ("topic",),
        ),
        "bytes_in",
    ),
    (
        Metric(
            "raftmq_topic_messages_out_total",
            "counter",
            "Messages sent to consumers, from the wanted offset on",
            ("topic",),
        ),
        "messages_out",
    ),
    (
        Metric(
            "raftmq_topic_out_bytes_total",
            "counter",
            "Bytes of batches sent to consumers",
            ("topic",),
        ),
        "bytes_out",
    ),
    (
        Metric(
            "raftmq_topic_producer_epochs_total",
            "counter",
            "Partitions to which an idempotent producer began to write under a raised epoch: its "
            "client gave up records, and what had an unknown outcome may stand there twice",
            ("topic",),
        ),
        "producer_epochs",
    ),
)
TOPICS_LEFT_OUT: Final = Metric(
    "raftmq_topics_left_out",
    "gauge",
    f'Topics here without rows of their own (metrics_partitions_max): summed as "{OTHER}"',
)


def _add_crl(scrape: Scrape, tls: ServerTls) -> None:
    if tls.revoked.expires_s != inf:
        scrape[CRLS].add((tls.name,), tls.revoked.expires_s)


def _collect_server(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
    for name, api in sorted(node.broker.metrics.apis.items()):
        if not api.requests and not api.failures:
            continue
        scrape[REQUESTS].add((name,), api.requests)
        scrape[FAILURES].add((name,), api.failures)
        scrape[LATENCY].add_histogram((name,), api.latency)
        for error, count in sorted(api.errors.items()):
            scrape[ERRORS].add((name, error), count)
    for kind, count in sorted(node.broker.metrics.bugs.items()):
        scrape[BUGS].add((kind,), count)
    for kind, count in sorted(node.broker.metrics.admin_bugs.items()):
        scrape[ADMIN_BUGS].add((kind,), count)
    for bound, count in sorted(node.broker.metrics.refusals.items()):
        scrape[REFUSALS].add((bound,), count)
    if node.tls:
        scrape[HANDSHAKES].add((), node.broker.metrics.handshakes)
    for reason, count in sorted(node.broker.metrics.handshake_failures.items()):
        scrape[HANDSHAKE_FAILURES].add((reason,), count)
    for name, tls in node.tls.items():
        scrape[CERTIFICATES].add((name,), tls.expires_s)
        _add_crl(scrape, tls)
    for one in (node.peer_tls, node.admin_tls):
        if one is not None and one.expires_s is not None:
            scrape[CERTIFICATES].add((one.name,), one.expires_s)
        if isinstance(one, ServerTls):
            _add_crl(scrape, one)
    for labels, count in sorted(node.broker.metrics.authentications.items()):
        scrape[AUTHENTICATIONS].add(labels, count)
    for (kind, operation), count in sorted(node.broker.metrics.denials.items()):
        scrape[DENIALS].add((kind, operation), count)
    for command, count in sorted(node.engine.unauthorized.items()):
        scrape[UNAUTHORIZED].add((command,), count)
    for request, count in sorted(node.control.peer_requests.refused.items()):
        scrape[REQUESTS_REFUSED].add((request,), count)
    for audited, count in sorted(node.audit.lines.items()):
        scrape[AUDIT_LINES].add(audited, count)
    for reason, count in sorted(node.audit.left_out.items()):
        scrape[AUDIT_LEFT_OUT].add((reason,), count)
    yield None
    topics = {**node.partitions.topic_counts, **node.partitions.views.counts}
    names = sorted(topics)
    kept = names[: node.config.metrics_partitions_max]
    for number, name in enumerate(kept):
        counts = topics[name]
        for metric, attribute in _TOPIC:
            scrape[metric].add((name,), getattr(counts, attribute))
        if number % 64 == 63:
            yield None
    left = [topics[name] for name in names[len(kept) :] if name in topics]
    scrape[TOPICS_LEFT_OUT].add((), len(left))
    if left:
        _add_rest(scrape, left)
    yield None


def _add_rest(scrape: Scrape, left: list[TopicCounts]) -> None:
    for metric, attribute in _TOPIC:
        scrape[metric].add((OTHER,), sum(getattr(counts, attribute) for counts in left))


SERVER: Final = Collector(
    (
        REQUESTS,
        ERRORS,
        FAILURES,
        LATENCY,
        BUGS,
        ADMIN_BUGS,
        REFUSALS,
        HANDSHAKES,
        HANDSHAKE_FAILURES,
        CERTIFICATES,
        CRLS,
        AUTHENTICATIONS,
        DENIALS,
        UNAUTHORIZED,
        REQUESTS_REFUSED,
        AUDIT_LINES,
        AUDIT_LEFT_OUT,
        *(metric for metric, _ in _TOPIC),
        TOPICS_LEFT_OUT,
    ),
    _collect_server,
)
