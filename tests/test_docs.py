"""Pages link to what is there, and their tables are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_RULE = re.compile(r"\|[-:| ]+\|")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a page's headings can be linked by, as GitHub makes it of them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def cells(row: str) -> int:
    return len(re.split(r"(?<!\\)\|", row))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(prose(page)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    for block in re.findall(r"(?:^\|.*\n?)+", prose(page), flags=re.MULTILINE):
        rows = block.splitlines()
        assert len(rows) > 1, f"rows without a heading: {rows[0]}"
        assert _RULE.fullmatch(rows[1]), f"rows without a heading: {rows[0]}"
        assert {cells(row) for row in rows} == {cells(rows[0])}, rows[0]


def test_what_the_readme_runs_of_the_product_installs_no_tools_of_its_tests() -> None:
    runs = re.findall(r"uv run .*\braftmq (?:demo|dev|start)\b", (ROOT / "README.md").read_text())
    assert len(runs) > 1
    assert all("--locked --no-default-groups" in line for line in runs), runs
