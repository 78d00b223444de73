"""A page of /metrics, read by prometheus_client's own parser."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from tests.live.harness import Node


class Page:
    """Samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {f.name: f for f in text_string_to_metric_families(text)}
        self.samples = [s for f in self.families.values() for s in f.samples]

    @property
    def names(self) -> set[str]:
        """Metric names as documented: counters with _total."""
        return {
            f"{f.name}_total" if f.type == "counter" else f.name for f in self.families.values()
        }

    def rows(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        return [
            (s.labels, s.value)
            for s in self.samples
            if s.name == name and labels.items() <= s.labels.items()
        ]

    def sum(self, name: str, **labels: str) -> float:
        return sum(value for _, value in self.rows(name, **labels))

    def value(self, name: str, **labels: str) -> float:
        rows = self.rows(name, **labels)
        assert len(rows) == 1, f"{name}{labels}: {rows}"
        return rows[0][1]


def pages(nodes: Iterable[Node]) -> list[Page]:
    return [Page(node.text("/metrics")) for node in nodes]


def total(found: Iterable[Page], name: str, **labels: str) -> float:
    return sum(page.sum(name, **labels) for page in found)
