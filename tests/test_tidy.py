"""What a linter does not see: deciding code stays sans-IO, files and functions readable."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path
    for folder in ("raftmq", "client", "spark", "jepsen_like", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
PRODUCT = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ("raftmq", "client")]
PERFORMS = {"cli", "node", "runtime", "server", "testing", "config.py", "logs.py"}
DECIDING = [
    path
    for path in PRODUCT
    if path.relative_to(ROOT).parts[0] == "raftmq"
    and path.relative_to(ROOT).parts[1] not in PERFORMS
]
BANNED_MODULES = {"time", "random", "os", "socket", "threading", "trio", "asyncio", "subprocess"}
LINES_MAX = 1000
FUNCTION_LINES_MAX = 70
MODULE_LINES_MIN = 50
FOLDER_MODULES_MAX = 30
LONG_FUNCTIONS: dict[str, str] = {
    "raftmq/partition/partition.py:read": "gates, spans and aborted transactions: to be parted",
}
"""Functions that may be longer, as `path:name`, and why."""
SMALL_MODULES: dict[str, str] = {}
"""Modules that may be smaller although one module alone imports them, and why."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("path", DECIDING, ids=name_of)
def test_deciding_code_has_no_clock_chance_or_io(path: Path) -> None:
    """One seed replays a whole cluster only if nothing else decides."""
    tree = ast.parse(path.read_text())
    assert not BANNED_MODULES & set(imported(tree)), "take it as an argument (raftmq/ports.py)"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "hash", f"line {node.lineno}: hash() differs between processes"
        if isinstance(node, ast.For | ast.comprehension):
            is_set = isinstance(node.iter, ast.Set | ast.SetComp) or (
                isinstance(node.iter, ast.Call)
                and isinstance(node.iter.func, ast.Name)
                and node.iter.func.id in ("set", "frozenset")
            )
            assert not is_set, f"iteration over a set near {ast.dump(node.iter)[:60]}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_finished_and_fit_a_reader(path: Path) -> None:
    """No marks of unfinished work, no file or function that nobody would want to open."""
    text = path.read_text()
    for mark in ("TO" + "DO", "FIX" + "ME", "XX" + "X", "raise NotImplemented" + "Error"):
        assert mark not in text, f"{mark} in the tree"
    assert text.count("\n") <= LINES_MAX, "one subject, one file: is this one subject?"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if f"{name_of(path)}:{node.name}" not in LONG_FUNCTIONS:
                assert length <= FUNCTION_LINES_MAX, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_modules_say_what_they_are_for(path: Path) -> None:
    """Every module opens with a docstring; an empty marker of a package may go without."""
    text = path.read_text()
    if text.strip():
        assert ast.get_docstring(ast.parse(text)), "what does it own, and what does it never do?"


# ---- modules are neither fragments nor heaps ----

SHIPPED = {"raftmq": ROOT, "raftmq_client": ROOT / "client", "raftmq_spark": ROOT / "spark"}


def shipped_modules() -> dict[str, Path]:
    """Every module of what is shipped by its dotted name, packages' own files left out."""
    return {
        ".".join(path.relative_to(top).with_suffix("").parts): path
        for package, top in SHIPPED.items()
        for path in (top / package).rglob("*.py")
        if not path.name.startswith("__")
    }


def importers() -> dict[str, set[Path]]:
    """Which files of what is shipped import each of its modules."""
    known = shipped_modules()
    found: dict[str, set[Path]] = {name: set() for name in known}
    for package, top in SHIPPED.items():
        for path in (top / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module, *(f"{node.module}.{n.name}" for n in node.names)]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                for name in names:
                    if name in known:
                        found[name].add(path)
    return found


def test_no_module_is_a_fragment_of_its_only_importer() -> None:
    """One subject, one file: what is small and used in one place belongs there."""
    modules = shipped_modules()
    fragments = {
        name
        for name, paths in importers().items()
        if len(paths) == 1 and modules[name].read_text().count("\n") < MODULE_LINES_MIN
    }
    assert fragments == set(SMALL_MODULES)
    assert all(SMALL_MODULES.values()), "each exception has a reason"


def test_no_folder_is_a_heap() -> None:
    counts = Counter(path.parent for path in shipped_modules().values())
    heaps = {name_of(folder): n for folder, n in counts.items() if n > FOLDER_MODULES_MAX}
    assert heaps == {}, "which subjects are in there?"


def test_exceptions_are_needed() -> None:
    """An exception whose function has become short, or has gone, is taken out."""
    long = {
        f"{name_of(path)}:{node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert set(LONG_FUNCTIONS) <= long
