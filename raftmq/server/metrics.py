"""Numbers of the client port, kept as plain integers and turned into metrics only when asked.

The hot path adds to integers; `ServerCollector` (it imports prometheus_client, which `ready` does
not need) reads them at a scrape. A histogram is a list of counts per bucket, found by bit length of
the microseconds, so one observation costs no search.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

BUCKET_COUNT: Final = 26
"""Bucket i holds answers that took under 2**i microseconds; the last one all others (32 s)."""


class ApiMetrics:
    """Counts of one API."""

    __slots__ = ("buckets", "errors", "requests", "seconds")

    def __init__(self) -> None:
        self.requests = 0
        self.errors = 0
        self.seconds = 0.0
        self.buckets = [0] * BUCKET_COUNT

    def observe(self, seconds: float) -> None:
        """Count one answered request."""
        self.requests += 1
        self.seconds += seconds
        bucket = int(seconds * 1e6).bit_length()
        self.buckets[bucket if bucket < BUCKET_COUNT else BUCKET_COUNT - 1] += 1


class ServerMetrics:
    """Everything the client port counts."""

    __slots__ = (
        "apis",
        "bytes_in",
        "bytes_out",
        "bytes_sendfile",
        "connections",
        "connections_accepted",
        "connections_refused",
        "direct_sends",
        "parked_fetches",
        "protocol_errors",
        "read_aheads",
        "writer_wakes",
    )

    def __init__(self) -> None:
        self.apis: dict[str, ApiMetrics] = {}
        self.bytes_in = 0
        self.bytes_out = 0
        self.bytes_sendfile = 0
        self.connections = 0
        self.connections_accepted = 0
        self.connections_refused = 0
        self.protocol_errors = 0
        self.direct_sends = 0
        self.writer_wakes = 0
        self.read_aheads = 0
        self.parked_fetches = 0

    def api(self, name: str) -> ApiMetrics:
        """The counts of one API, made at first use."""
        found = self.apis.get(name)
        if found is None:
            found = self.apis[name] = ApiMetrics()
        return found


class ServerCollector:
    """A prometheus_client collector over `ServerMetrics`."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        metrics = self._metrics
        for name, help_text, value in (
            ("connections", "Client connections now open", metrics.connections),
            ("parked_fetches", "Fetches that wait for records", metrics.parked_fetches),
        ):
            yield GaugeMetricFamily(f"raftmq_server_{name}", help_text, value=value)
        for name, help_text, value in (
            ("connections_accepted", "Client connections accepted", metrics.connections_accepted),
            ("connections_refused", "Connections above the limit", metrics.connections_refused),
            ("protocol_errors", "Connections closed for what they sent", metrics.protocol_errors),
            ("received_bytes", "Bytes of requests", metrics.bytes_in),
            ("sent_bytes", "Bytes of answers", metrics.bytes_out),
            ("sendfile_bytes", "Bytes of answers sent from files", metrics.bytes_sendfile),
            ("direct_sends", "Answers that left without a task switch", metrics.direct_sends),
            ("writer_wakes", "Times a writer task had to wake", metrics.writer_wakes),
            ("read_aheads", "Cold spans read by a worker first", metrics.read_aheads),
        ):
            yield CounterMetricFamily(f"raftmq_server_{name}", help_text, value=value)
        requests = CounterMetricFamily("raftmq_requests", "Requests answered", labels=["api"])
        errors = CounterMetricFamily(
            "raftmq_request_errors", "Requests that closed their connection", labels=["api"]
        )
        latency = HistogramMetricFamily(
            "raftmq_request_seconds",
            "From the last byte of a request to its answer",
            labels=["api"],
        )
        for name, api in sorted(metrics.apis.items()):
            requests.add_metric([name], api.requests)
            errors.add_metric([name], api.errors)
            latency.add_metric([name], _cumulative(api.buckets), sum_value=api.seconds)
        yield requests
        yield errors
        yield latency


def _cumulative(buckets: list[int]) -> list[tuple[str, float]]:
    total = 0
    rows = []
    for i, count in enumerate(buckets):
        total += count
        edge = "+Inf" if i == BUCKET_COUNT - 1 else repr((1 << i) / 1e6)
        rows.append((edge, float(total)))
    return rows
