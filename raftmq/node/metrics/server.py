"""Metrics per API and per topic.

An API has rows from its first request on; a topic from the first replica of it that this node runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from raftmq.node.metrics.families import OTHER, Collector, Metric, Scrape, Work

if TYPE_CHECKING:
    from raftmq.counts import TopicCounts
    from raftmq.node.composition import NodeCore

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
    "or memory where the process had none left",
    ("bound",),
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
LEFT_OUT: Final = Metric(
    "raftmq_topics_left_out",
    "gauge",
    f'Topics here without rows of their own (metrics_partitions_max): summed as "{OTHER}"',
)


def _collect(node: NodeCore, scrape: Scrape) -> Iterator[Work | None]:
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
    yield None
    topics = node.partitions.topic_counts
    names = sorted(topics)
    kept = names[: node.config.metrics_partitions_max]
    for number, name in enumerate(kept):
        counts = topics[name]
        for metric, attribute in _TOPIC:
            scrape[metric].add((name,), getattr(counts, attribute))
        if number % 64 == 63:
            yield None
    left = [topics[name] for name in names[len(kept) :] if name in topics]
    scrape[LEFT_OUT].add((), len(left))
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
        *(metric for metric, _ in _TOPIC),
        LEFT_OUT,
    ),
    _collect,
)
