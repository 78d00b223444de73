"""What the simulation executes of the product: everything that decides, in whole nodes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import pytest

from jepsen_like.cluster.options import draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed
from jepsen_like.cluster.stress import rot

ROOT = Path(__file__).parents[2]
DECIDING = ("raft", "log", "cluster", "groups", "protocol", "server/handlers")
RUNS = ((3, draw_cluster_options), (14, draw_cluster_options), (1, rot))
"""Seeds and what draws their options: damage that nobody finds in time is rare else."""
LEFT_OUT = {
    "cluster/config_keys.py": "a table, made when it is imported",
    "raft/messages.py": "values",
    "log/index_job.py": "look-ups by time in a log without its indexes: too rare for these seeds",
    "protocol/framer.py": "for clients with sockets",
}


def has_functions(path: Path) -> bool:
    """False for modules that are all declarations: importing them is all there is to it."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    protocols = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef)
        and any(ast.unparse(b).startswith("Protocol") for b in n.bases)
    ]
    declared = sum(isinstance(m, ast.FunctionDef) for p in protocols for m in p.body)
    return len(functions) > declared


def called_files() -> set[str]:
    """Files of which a function is called, in a process of its own: here earlier tests may have
    filled caches, such as that of compiled codecs."""
    done = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return set(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_the_deciding_code_is_executed() -> None:
    called = called_files()
    product = ROOT / "raftmq"
    left_out = {
        str(path.relative_to(product))
        for folder in DECIDING
        for path in sorted((product / folder).rglob("*.py"))
        if str(path) not in called and has_functions(path)
    }
    assert left_out == {*LEFT_OUT}


def main() -> None:
    """Run the seeds and print the files."""
    called: dict[str, bool] = {}

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            called[frame.f_code.co_filename] = True

    sys.setprofile(note)
    for seed, draw in RUNS:
        run_cluster_seed(seed, attrs.evolve(draw(seed), tourists=6))
    sys.setprofile(None)
    sys.stdout.write(json.dumps([*called]))


if __name__ == "__main__":
    main()
