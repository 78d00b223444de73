"""The Grafana dashboard and the alert rules: they parse, and name what the nodes really expose."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest

from raftmq.node.metrics.exposition import COLLECTORS
from tests.node.test_metrics import PROCESS

FOLDER = Path(__file__).parent.parent / "docs" / "monitoring"
RULES = FOLDER / "alerts.yml"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""


def exposed() -> dict[str, set[str]]:
    """Series names with their labels."""
    series: dict[str, set[str]] = {"up": set(SCRAPED)}
    for metric in (metric for collector in COLLECTORS for metric in collector.metrics):
        labels = set(metric.labels) | SCRAPED
        if metric.kind == "histogram":
            series[f"{metric.name}_bucket"] = labels | {"le"}
            series[f"{metric.name}_sum"] = series[f"{metric.name}_count"] = labels
        else:
            series[metric.name] = labels
    return series | {name: set(SCRAPED) for name in PROCESS}


SERIES = exposed()


def field(text: str, name: str) -> str:
    found = re.fullmatch(r"\s*(?:- )?" + name + r':\s*"?(.*?)"?\s*', text)
    return found[1] if found else ""


def rules() -> Iterator[tuple[str, str]]:
    """(alert, expression) of each rule; this file keeps one field a line."""
    alert = ""
    for line in RULES.read_text().splitlines():
        alert = field(line, "alert") or alert
        if expression := field(line, "expr"):
            yield alert, expression


def targets() -> Iterator[tuple[str, str]]:
    """(panel, expression) of the dashboard, its variables put in."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"{panel['title']} {target['refId']}", expand(target["expr"])
    for note in DASHBOARD["annotations"]["list"]:
        yield note["name"], expand(note["expr"])


def expand(expression: str) -> str:
    return expression.replace("$__rate_interval", "1m").replace("$", "")


EXPRESSIONS = [*rules(), *targets()]


def walk(node: Any) -> Iterator[Any]:
    """All nodes of a parsed expression."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            yield from walk(child)
    for child in getattr(node, "args", None) or ():
        yield from walk(child)


def used_labels(node: Any) -> Iterator[str]:
    modifier = getattr(node, "modifier", None)
    if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
        yield from modifier.labels
    matching = getattr(modifier, "matching", None) if modifier is not None else None
    if matching is not None:
        yield from matching.labels


@pytest.mark.parametrize(("name", "expression"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_every_expression_names_what_is_exposed(name: str, expression: str) -> None:
    parsed = promql_parser.parse(expression)
    selectors = [n for n in walk(parsed) if isinstance(n, promql_parser.VectorSelector)]
    assert selectors, "an expression without a metric"
    known: set[str] = set()
    for selector in selectors:
        assert selector.name in SERIES, selector.name
        labels = SERIES[selector.name]
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no label {matcher.name}"
    for node in walk(parsed):
        for label in used_labels(node):
            assert label in known, f"no label {label} in {sorted(known)}"


def test_the_check_can_fail() -> None:
    with pytest.raises(ValueError, match=r"parenthesis|expect"):
        promql_parser.parse("sum(rate(raftmq_requests_total[5m])")
    with pytest.raises(AssertionError, match="raftmq_nothing_total"):
        test_every_expression_names_what_is_exposed("x", "rate(raftmq_nothing_total[1m])")
    with pytest.raises(AssertionError, match="no label colour"):
        test_every_expression_names_what_is_exposed("x", 'raftmq_connections{colour="red"}')
    with pytest.raises(AssertionError, match="no label colour"):
        test_every_expression_names_what_is_exposed("x", "sum by (colour) (raftmq_connections)")


# ---- rules ----


def test_every_alert_says_what_to_do() -> None:
    text = RULES.read_text()
    blocks = text.split("- alert: ")[1:]
    assert len(blocks) >= 20
    for block in blocks:
        name = block.splitlines()[0]
        assert re.search(r"labels: \{severity: (critical|warning|info)\}", block), name
        assert "summary:" in block, name
        assert "action:" in block, name
        for label in re.findall(r"\$labels\.(\w+)", block):
            expression = dict(rules())[name]
            assert label_survives(expression, label), f"{name}: {label} is aggregated away"
    names = [block.splitlines()[0] for block in blocks]
    assert len(names) == len(set(names))


def label_survives(expression: str, label: str) -> bool:
    """True when the result of an expression still has the label."""
    aggregated = re.match(r"(?:sum|max|min) by \(([^)]*)\)", expression)
    if aggregated:
        return label in re.split(r",\s*", aggregated[1])
    names = re.findall(r"\b(?:raftmq|process)_\w+|\bup\b", expression)
    return any(label in SERIES[name] for name in names)


def test_promtool_accepts_the_rules_and_they_fire_as_they_should() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on this machine; the expressions are parsed above")
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *words], cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


# ---- dashboard ----


def test_the_dashboard_is_well_formed() -> None:
    assert DASHBOARD["uid"] == "raftmq"
    assert DASHBOARD["schemaVersion"] >= 36
    panels = DASHBOARD["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def test_every_panel_has_a_unit_a_source_and_a_legend() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) >= 30
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        assert panel["targets"], panel["title"]
        letters = [target["refId"] for target in panel["targets"]]
        assert len(letters) == len(set(letters)), panel["title"]
        for target in panel["targets"]:
            assert target["legendFormat"], panel["title"]
            parsed = expand(target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                inner = re.findall(r"by \(([^)]*)\)", parsed)
                assert not inner or any(label in group for group in inner), panel["title"]


def test_variables_are_declared_and_used() -> None:
    declared = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert "datasource" in declared
    text = json.dumps(DASHBOARD)
    used = set(re.findall(r"\$\{?([a-z]\w*)", text)) - {"__rate_interval"}
    assert used == declared
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name = re.search(r"label_values\((\w+)", variable["definition"])
            assert name is not None
            assert name[1] in SERIES
