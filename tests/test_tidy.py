"""What a linter does not see: deciding code stays sans-IO, files and functions readable."""

from __future__ import annotations

import ast
import graphlib
from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
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
LONG_FUNCTIONS: dict[str, str] = {}
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


def all_modules() -> dict[str, Path]:
    """Every module and package of what is shipped by its dotted name."""
    found = {}
    for package, top in SHIPPED.items():
        for path in (top / package).rglob("*.py"):
            parts = path.relative_to(top).with_suffix("").parts
            found[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return found


def shipped_modules() -> dict[str, Path]:
    """Every module of what is shipped by its dotted name, packages' own files left out."""
    return {name: path for name, path in all_modules().items() if not path.name.startswith("__")}


def imports_of(tree: ast.AST, known: Collection[str]) -> set[str]:
    """Which of these modules a file imports: at its top, in its functions, for its annotations."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in known else node.module)
    return found & set(known)


def importers() -> dict[str, set[Path]]:
    """Which files of what is shipped import each of its modules."""
    known = all_modules()
    imports = shipped_imports()
    return {
        name: {known[other] for other, names in imports.items() if name in names}
        for name in shipped_modules()
    }


def circle_in(imports: dict[str, set[str]]) -> list[str]:
    """Modules that lead back to the first of them; none where there is no circle."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(reversed(error.args[1]))
    return []


@cache
def shipped_imports() -> dict[str, set[str]]:
    """What each module of what is shipped imports of the others."""
    known = all_modules()
    return {
        name: imports_of(ast.parse(path.read_text()), known) - {name}
        for name, path in known.items()
    }


def test_no_module_imports_itself_through_others() -> None:
    """Not even for an annotation: what two modules both need belongs to one, or below both."""
    circle = circle_in(shipped_imports())
    assert circle == [], "move the type, take a Protocol, or make one module of them"


def test_a_circle_is_found_wherever_its_imports_stand() -> None:
    texts = {
        "a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from b import B",
        "b": "def f():\n    import c",
        "c": "import a",
        "d": "import a",
    }
    imports = {name: imports_of(ast.parse(text), texts) for name, text in texts.items()}
    assert imports["a"] == {"b"}
    circle = circle_in(imports)
    assert circle[0] == circle[-1]
    assert set(circle) == {"a", "b", "c"}
    assert circle_in({"a": {"b"}, "b": set(), "d": {"a"}}) == []


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
    named = {name.rpartition(":")[0] for name in LONG_FUNCTIONS}
    long = {
        f"{name_of(path)}:{node.name}"
        for path in SOURCES
        if name_of(path) in named
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > FUNCTION_LINES_MAX
    }
    assert set(LONG_FUNCTIONS) <= long
