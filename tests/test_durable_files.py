"""What replaces a file: the old content or the new one, whatever happens and whenever."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from jepsen_like.disk import SimCrash, SimDisk
from raftmq.ports import DiskError, DiskFullError, replace_file, replacing

ROOT = Path(__file__).parent.parent
PRODUCT = sorted(
    path for folder in ("raftmq", "client", "spark") for path in (ROOT / folder).rglob("*.py")
)

GIVES_NAMES = {
    "raftmq/ports.py:replacing": "the one way",
    "raftmq/runtime/disk.py:rename": "the operation itself",
    "raftmq/log/model.py:run": "the journal's new file; syncs it before and the folder after",
    "raftmq/log/replicated_log.py:repaired": "built and synced by a worker; syncs the folder",
    "raftmq/replication/opening.py:attempt": "moves a folder aside; syncs the one above",
    "raftmq/node/partitions.py:_quarantine": "moves a folder aside; syncs both",
    "spark/raftmq_spark/export/store.py:create": "streams; syncs before and after",
    "spark/raftmq_spark/export/store.py:put_if_absent": "never replaces; syncs before and after",
}
"""Functions that give a file or folder its name, and why each is allowed to."""

WRITES_IN_PLACE = {
    "raftmq/testing/cluster.py": "a process' output",
    "raftmq/testing/keeper.py": "the image of a disk",
    "spark/raftmq_spark/export/runner.py": "what Java says, for people",
    "spark/raftmq_spark/export/store.py": "the files that get their names afterwards",
    "client/raftmq_client/security_file.py": "a folder that is gone a moment later",
    "raftmq/runtime/certificates.py": "PEM in memory, by way of a file that has no name",
}
"""Modules that write files of their own without the port of the disk."""


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(ROOT)}:{node.name}", node


def gives_a_name(node: ast.AST) -> bool:
    """`disk.rename(a, b)`, `os.replace(a, b)`, `temporary.replace(target)`, `files.move(a, b)`; not
    `text.replace(a, b)` nor `structs.replace(value, key=...)`."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner, name = ast.unparse(node.func.value), node.func.attr
    if name == "replace":
        is_path = "path" in owner or "temporary" in owner
        return owner == "os" or (is_path and len(node.args) == 1 and not node.keywords)
    return name.startswith("rename") or (owner, name) in {("os", "link"), ("self.files", "move")}


def test_only_known_functions_give_names() -> None:
    found = {
        name
        for path in PRODUCT
        for name, function in functions(path)
        if any(gives_a_name(node) for node in ast.walk(function))
    }
    assert found == set(GIVES_NAMES), "use raftmq.ports.replacing, or say here why not"


@pytest.mark.parametrize("name", sorted(set(GIVES_NAMES) - {"raftmq/runtime/disk.py:rename"}))
def test_whoever_gives_a_name_syncs_the_folder(name: str) -> None:
    """HDFS and object stores have no folders to sync."""
    bodies = [ast.dump(f) for n, f in functions(ROOT / name.split(":")[0]) if n == name]
    renaming = [body for body in bodies if "sync_directory" in body or "_sync_folder" in body]
    assert renaming


def writes_a_file(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("write_text", "write_bytes"):
        return True
    is_open = isinstance(node.func, ast.Name | ast.Attribute) and (
        getattr(node.func, "id", getattr(node.func, "attr", "")) in ("open", "fdopen", "mkstemp")
    )
    modes = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return is_open and any(isinstance(m, str) and len(m) < 4 and set("wxa") & set(m) for m in modes)


def test_no_module_writes_files_behind_the_disk() -> None:
    found = {
        str(path.relative_to(ROOT))
        for path in PRODUCT
        if any(writes_a_file(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == set(WRITES_IN_PLACE), "use raftmq.ports.replacing, or say here why not"


# ---- the one way ----


def disk_with_an_old_file(seed: int) -> SimDisk:
    disk = SimDisk(Random(seed))
    disk.make_directories("d")
    replace_file(disk, "d/f", b"old" * 400)
    return disk


def content(disk: SimDisk) -> bytes:
    file = disk.open("d/f")
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


@pytest.mark.parametrize("seed", range(40))
def test_power_loss_at_any_step_leaves_one_of_both(seed: int) -> None:
    disk = disk_with_an_old_file(seed)
    disk.crash_after(seed % 8)
    is_replaced = False
    try:
        replace_file(disk, "d/f", b"new" * 500)
        is_replaced = True
    except SimCrash:
        pass
    disk.crash(Random(seed))
    allowed = [b"new" * 500] if is_replaced else [b"old" * 400, b"new" * 500]
    assert content(disk) in allowed
    replace_file(disk, "d/f", b"again")
    assert content(disk) == b"again", "what a crash left behind is in nobody's way"


def test_a_full_disk_keeps_the_old_one_and_gives_the_room_back() -> None:
    disk = disk_with_an_old_file(1)
    disk.capacity_bytes = 2_000
    with pytest.raises(DiskFullError):
        replace_file(disk, "d/f", b"new" * 500)
    assert content(disk) == b"old" * 400
    assert disk.list("d") == ["f"]
    assert disk.open_files == 0


def test_a_failed_sync_keeps_the_old_one() -> None:
    disk = disk_with_an_old_file(1)
    disk.fail_when(lambda verb, path: verb == "fdatasync" and path.endswith(".tmp"))
    with pytest.raises(DiskError):
        replace_file(disk, "d/f", b"new")
    disk.fail_when(None)
    assert content(disk) == b"old" * 400


def test_a_block_that_fails_replaces_nothing() -> None:
    disk = disk_with_an_old_file(1)

    def half() -> None:
        with replacing(disk, "d/f") as file:
            file.pwrite(b"half", 0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        half()
    assert content(disk) == b"old" * 400
    assert disk.list("d") == ["f"]
