"""Families as text, in Prometheus' own format or as OpenMetrics.

The same bytes as prometheus_client's encoders write (a test compares them), in a quarter of their
time or less: names are known to be plain, and a partition's labels are joined once for all its
metrics. The encoders take the interpreter from the loop for longer than a scrape may
(`docs/decisions/0015-own-writer-of-metrics-text.md`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.utils import floatToGoString

from raftmq.node.metrics.families import Family

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_PLAIN_MAX: Final = 1_000_000
"""Whole numbers below it are written as they are; Go switches to exponents above."""

Labels = dict[tuple[tuple[str, ...], tuple[str, ...]], str]


def write(families: Iterable[Family], *, is_openmetrics: bool) -> str:
    """The lines of all families, without an end mark."""
    known: Labels = {}
    lines: list[str] = []
    for family in families:
        metric = family.metric
        name = metric.name
        if is_openmetrics and metric.kind == "counter":
            name = name.removesuffix("_total")
        help_text = metric.help.replace("\\", r"\\").replace("\n", r"\n")
        if is_openmetrics:
            help_text = help_text.replace('"', r"\"")
        lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {metric.kind}\n")
        for labels, value in zip(family.labels, family.values, strict=True):
            lines.append(f"{metric.name}{_labels(known, metric.labels, labels)} {_number(value)}\n")
        for labels, buckets, seconds in family.histograms:
            lines += _histogram(known, family, labels, buckets, seconds)
    return "".join(lines)


def _histogram(
    known: Labels,
    family: Family,
    labels: tuple[str, ...],
    buckets: list[tuple[str, float]],
    seconds: float,
) -> Iterable[str]:
    name, names = family.metric.name, family.metric.labels
    for edge, count in buckets:
        text = _labels(known, (*names, "le"), (*labels, edge))
        yield f"{name}_bucket{text} {_number(count)}\n"
    text = _labels(known, names, labels)
    yield f"{name}_count{text} {_number(buckets[-1][1])}\n"
    yield f"{name}_sum{text} {_number(seconds)}\n"


def _labels(known: Labels, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    text = known.get((names, values))
    if text is None:
        pairs = sorted(zip(names, values, strict=True))
        inner = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
        text = known[names, values] = f"{{{inner}}}"
    return text


def _number(value: float) -> str:
    whole = int(value) if -_PLAIN_MAX < value < _PLAIN_MAX else None
    if whole == value:
        return f"{whole}.0"
    text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
    return text
