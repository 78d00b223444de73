"""What the simulation executes of the product: all of it but its edges, and no machine's clock."""

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

from jepsen_like.cluster import stress
from jepsen_like.cluster.options import ClusterOptions, draw_cluster_options
from jepsen_like.cluster.run import run_cluster_seed

ROOT = Path(__file__).parents[2]
RARE = (
    (stress.rot, "log/repair.py"),
    (stress.indexes, "log/prefetch.py"),
    (stress.views, "views/index.py"),
)
"""What draws options with which a module is executed that is rarely else: damage that nobody finds
in time, or that makes a look-up wait; views."""
SEEDS_MAX = 16
EDGES = ("runtime", "cli", "testing")
"""Folders of what touches the outside world: files, sockets, threads, terminals, processes."""
LEFT_OUT = {
    "tls.py": "encrypted bytes of connections, and none is simulated",
    "principals.py": "names out of certificates, as above",
    "secret_file.py": "a file of the operator, read by what is left out here",
    "sasl/exchange.py": "who a client is; simulated ones are anonymous, and everybody may do all",
    "sasl/oauthbearer.py": "as above",
    "sasl/plain.py": "as above",
    "sasl/scram.py": "as above",
    "metadata/credentials.py": "as above",
    "controller/security.py": "as above; `tests/controller` has plans of users and rules",
    "server/kafka/authentication.py": "who a client is, as in `sasl`",
    "server/kafka/guards.py": "what it may do",
    "server/kafka/record_guards.py": "as above",
    "server/kafka/handlers/acls.py": "as above",
    "server/kafka/handlers/users.py": "as above",
    "tools/command_skip.py": "an operator's offline work on a command that no node can apply",
    "tools/term_reset.py": "an operator's offline work on a term that no election can have reached",
    "node/first_user.py": "a user from a file; simulated clients are anonymous",
    "node/node.py": "the process around what is simulated",
    "node/production.py": "a look at a configuration, by the command line",
    "node/process.py": "signals and exit codes",
    "node/status.py": "a page of the admin port",
    "server/admin/access.py": "the admin port",
    "server/admin/connections.py": "the admin port",
    "server/admin/http.py": "the admin port",
    "server/admin/pages.py": "the admin port",
    "server/kafka/connection.py": "sockets; `jepsen_like/cluster/port.py` stands in for them",
    "server/kafka/listener.py": "sockets",
    "server/kafka/replies.py": "sockets",
}
"""Modules of the product that a run does not execute, and why they decide nothing."""


def has_functions(path: Path) -> bool:
    """False for modules that are all declarations: importing them is all there is to it."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    protocols = [
        n
        for n in ast.walk(tree)
        if isinstance(n, ast.ClassDef)
        and any(ast.unparse(b).startswith("Protocol") for b in n.bases)
    ]
    declared = sum(
        isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) for p in protocols for m in p.body
    )
    return len(functions) > declared


def deciding() -> dict[str, str]:
    """Modules of the product that have functions, by name, with their files: all but the edges."""
    top = ROOT / "raftmq"
    inside = {path.relative_to(top): path for path in sorted(top.rglob("*.py"))}
    return {
        str(name): str(path)
        for name, path in inside.items()
        if name.parts[0] not in EDGES and has_functions(path)
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, list[str]]:
    """What `main` saw, in a process of its own: here earlier tests may have filled caches, such as
    that of compiled codecs."""
    done = subprocess.run(
        [sys.executable, __file__], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_that_decides_is_executed(seen: dict[str, list[str]]) -> None:
    """What is left out are the runtime, the listener, the admin port and the command line."""
    called = {*seen["called"]}
    assert {name for name, file in deciding().items() if file not in called} == {*LEFT_OUT}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_reads_the_clocks_of_the_machine(seen: dict[str, list[str]]) -> None:
    """Time is an argument. How often a log line is written decides nothing else."""
    readers = [Path(file) for file in seen["readers"]]
    inside = {str(file.relative_to(ROOT)) for file in readers if file.is_relative_to(ROOT)}
    assert inside == {"raftmq/logs.py"}


def main() -> None:
    """Run seeds, first those of the rare modules, until nothing that decides is missing; print the
    files whose functions are called, and those that read clocks."""
    wanted = {file for name, file in deciding().items() if name not in LEFT_OUT}
    called: dict[str, bool] = {}
    readers: dict[str, bool] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            called[frame.f_code.co_filename] = True
        elif event == "c_call" and argument.__module__ == "time":
            readers[frame.f_code.co_filename] = True

    def run(seed: int, options: ClusterOptions) -> None:
        sys.setprofile(note)
        run_cluster_seed(seed, options)
        sys.setprofile(None)

    for seed in range(1, SEEDS_MAX + 1):
        for draw, module in RARE:
            if str(ROOT / "raftmq" / module) not in called:
                run(seed, draw(seed))
        if wanted.difference(called):
            run(seed, attrs.evolve(draw_cluster_options(seed), api_fuzzers=6))
    sys.stdout.write(json.dumps({"called": [*called], "readers": [*readers]}))


if __name__ == "__main__":
    main()
