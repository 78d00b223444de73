"""The map for newcomers names every room and nothing else; the contracts leave nothing out."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from tests.tree import ROOT

PRODUCT = ROOT / "raftmq"
MAP = ROOT / "docs" / "ARCHITECTURE.md"
GUIDE = ROOT / "CONTRIBUTING.md"
_PATH = re.compile(r"`([\w/]+\.py)(?::([\w.]+))?`")


@cache
def names_of(path: Path) -> frozenset[str]:
    """Classes, functions and methods of a file, and what its methods set on `self`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    found.add(f"{node.name}.{inner.attr}")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)


def place_of(path: str) -> Path | None:
    """Where a file is that the map names: below the product, else from the top."""
    return next((top / path for top in (PRODUCT, ROOT) if (top / path).is_file()), None)


def test_every_room_has_a_line_in_the_table() -> None:
    rooms = {str(init.parent.relative_to(PRODUCT)) for init in PRODUCT.glob("*/**/__init__.py")}
    assert len(rooms) > 15
    lines = re.findall(r"^\| `([\w/]+)/` \| (.+) \|$", MAP.read_text(), flags=re.MULTILINE)
    assert rooms - {room for room, _ in lines} == set(), "a package without a line"
    assert {room for room, _ in lines} - rooms == set(), "a line without a package"
    assert all(text.endswith(".") for _, text in lines)


def test_every_file_beside_the_rooms_is_named() -> None:
    named = {path for path, _ in _PATH.findall(MAP.read_text())}
    leaves = {path.name for path in PRODUCT.glob("*.py") if path.name != "__init__.py"}
    assert leaves - named == set()


@pytest.mark.parametrize("page", [MAP, GUIDE], ids=lambda page: page.name)
def test_every_file_and_name_is_there(page: Path) -> None:
    found = _PATH.findall(page.read_text())
    assert found
    for path, name in found:
        place = place_of(path)
        assert place is not None, f"{page.name} names {path}"
        assert not name or name in names_of(place), f"{page.name}: {path} has no {name}"


# ---- contracts of imports ----

ABOVE = {"testing", "cli", "node", "server"}
"""What may see requests."""
PERFORMS = ABOVE | {"runtime"}
CLIENTS_MAY_USE = {
    "protocol",
    "records",
    "codec",
    "ports",
    "rights",
    "secret_file",
    "tls",
    "errors",
    "types",
}
LEAVES = {path.stem for path in PRODUCT.glob("*.py") if path.name != "__init__.py"}
ALL = LEAVES | {path.parent.name for path in PRODUCT.glob("*/__init__.py")}


def contract(name: str, side: str) -> set[str]:
    """The rooms and leaves that a contract names."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (found,) = [contract for contract in settings["contracts"] if contract["name"] == name]
    return {each.removeprefix("raftmq.") for each in found[side] if each.startswith("raftmq.")}


@pytest.mark.parametrize(
    ("name", "side", "expected"),
    [
        ("the deciding code is sans-IO", "source_modules", ALL - PERFORMS),
        ("one door to kio", "source_modules", ALL - {"protocol"}),
        ("requests die in handlers", "source_modules", ALL - ABOVE - LEAVES - {"protocol"}),
        (
            "the client and the Spark source know nothing of the broker",
            "forbidden_modules",
            ALL - CLIENTS_MAY_USE,
        ),
    ],
    ids=["sans-IO", "kio", "requests", "clients"],
)
def test_contracts_leave_nothing_out(name: str, side: str, expected: set[str]) -> None:
    """The order of layers needs no such test: that contract is exhaustive by itself."""
    assert contract(name, side) == expected
