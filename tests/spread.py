"""How the processes of a whole run share the tests: by file, one of them those that compute.

The last process takes the files that compute, the others those with live tests, which wait most of
the time; whoever has nothing left helps the others. A file stays whole, with what its tests share.
The processes that collected tell the one that hands out, which knows of tests but their names: each
leaves the same lines in a file. (xdist's own groups are suffixes of names that pytest 9.2 drops.)
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LIVE_FILES = "live_files"
_FOLDER = pytest.StashKey[TemporaryDirectory[str]]()
LONG_S = {
    "tests/sim/test_seeds.py": 800,
    "tests/controller/test_metadata_sim.py": 240,
    "tests/live/test_revoked.py": 230,
    "tests/jepsen_like/checkers/test_generated.py": 160,
    "tests/clients/test_shrunk_aliases.py": 130,
    "tests/sim/test_execution.py": 130,
    "tests/sim/test_planted.py": 120,
    "tests/live/test_oauth.py": 100,
    "tests/live/test_views.py": 100,
    "tests/cli/test_live_cli.py": 90,
    "tests/client/test_live_transactions.py": 80,
    "tests/test_contracts.py": 80,
    "tests/clients/test_shrunk_under_load.py": 70,
    "tests/delays/test_deliveries.py": 60,
    "tests/live/test_delays.py": 60,
    "tests/live/test_fuzz_ports.py": 60,
    "tests/live/test_throttle.py": 60,
    "tests/test_tidy.py": 60,
    "tests/client/test_damaged_answers.py": 50,
    "tests/clients/test_views.py": 50,
    "tests/controller/test_transactions_sim.py": 50,
    "tests/live/test_shrink.py": 50,
    "tests/log/test_crash_points.py": 50,
    "tests/sim/test_cluster.py": 50,
}
"""How long a file takes in a whole run on two cores, if that is more than most: `--durations=0`."""


def file_of(name: str) -> str:
    """The file of a test's full name."""
    return name.partition("::")[0]


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Hands out files, in the order of collection; all but the last process prefer live ones."""

    def __init__(self, config: pytest.Config, log: Any, live_files: Path) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False
        self._live_files = live_files
        self._live: frozenset[str] | None = None
        self._fatal: set[str] = set()

    def _split_scope(self, nodeid: str) -> str:
        return file_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        if self._live is None:
            self._live = frozenset(self._live_files.read_text().splitlines())
        prefers_live = node is not self.nodes[-1]
        wanted = (name for name in self.workqueue if (name in self._live) == prefers_live)
        chosen = next(wanted, None)
        if chosen is not None:
            self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def remove_node(self, node: Any) -> str | None:
        """Hand out what an ended process has left, but for the test that ended it: xdist's own
        scheduler would have that one end the next process too, and so on."""
        for unit in self.assigned_work[node].values():
            left = [name for name, is_done in unit.items() if not is_done]
            if left:
                self._fatal.add(left[0])
                break
        crashed: str | None = super().remove_node(node)
        return crashed

    def _reschedule(self, node: Any) -> None:
        for scope, unit in list(self.workqueue.items()):
            unit.update(dict.fromkeys(self._fatal & unit.keys(), True))
            if all(unit.values()):
                del self.workqueue[scope]
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)  # a process begins a test once it knows what comes then


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """In the process that hands out: where the others leave what it has to know."""
    node.workerinput[LIVE_FILES] = str(_live_files(node.config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log, _live_files(config))


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a process that tests: leave what the one that hands out has to know."""
    told: str | None = getattr(session.config, "workerinput", {}).get(LIVE_FILES)
    if told is None:
        return
    names = {file_of(item.nodeid) for item in session.items if item.get_closest_marker("live")}
    unfinished = Path(f"{told}.{os.getpid()}")
    unfinished.write_text("\n".join(sorted(names)))
    unfinished.rename(told)


def _live_files(config: pytest.Config) -> Path:
    if _FOLDER not in config.stash:
        folder = config.stash[_FOLDER] = TemporaryDirectory(prefix="raftmq-tests-")
        config.add_cleanup(folder.cleanup)
    return Path(config.stash[_FOLDER].name, LIVE_FILES)
