"""The generated table: up to date, and without gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from jepsen_like import table
from jepsen_like.__main__ import main
from jepsen_like.cluster.planted_clients import CLIENT_BUGS
from jepsen_like.cluster.planted_delays import DELAY_BUGS
from jepsen_like.cluster.planted_elastic import ELASTIC_BUGS
from jepsen_like.cluster.planted_moves import MOVE_BUGS
from jepsen_like.cluster.planted_narrow import NARROW_BUGS
from jepsen_like.cluster.planted_nodes import NODE_BUGS
from jepsen_like.cluster.planted_replicas import REPLICA_BUGS
from jepsen_like.cluster.planted_transactions import TRANSACTION_BUGS
from jepsen_like.cluster.planted_views import VIEW_BUGS
from jepsen_like.planted import BUGS
from tests.tree import ROOT

DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


def test_what_stands_has_its_bugs() -> None:
    assert table.gaps() == []
    kinds = (
        CLIENT_BUGS,
        DELAY_BUGS,
        ELASTIC_BUGS,
        MOVE_BUGS,
        NARROW_BUGS,
        NODE_BUGS,
        REPLICA_BUGS,
        TRANSACTION_BUGS,
        VIEW_BUGS,
    )
    assert len(BUGS) == sum(map(len, kinds)) >= 60


def test_whoever_is_named_as_catching_is_there() -> None:
    """Invariants and checkers are told by name, somewhere else than where bugs are planted."""
    files = [f for f in (ROOT / "jepsen_like").rglob("*.py") if not f.name.startswith("planted")]
    text = "\n".join(file.read_text() for file in files)
    named = {name for bug in BUGS.values() for name in bug.caught_by} - {AssertionError.__name__}
    assert not [name for name in sorted(named) if f'"{name}"' not in text]


def test_a_gap_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "BUGS", REPLICA_BUGS)
    found = table.gaps()
    assert "promise 9 has 0 bugs" in found
    assert "rule 20 has 0 bugs" in found


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert table.with_table(text) == text, "python -m jepsen_like table --write docs/testing.md"


def test_the_command_brings_a_document_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert main(["table", "--write", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "`acked-before-commit`" in text
    assert "old\n" not in text
    path.write_text("no marks")
    with pytest.raises(ValueError, match="lacks"):
        table.write_table(path)
