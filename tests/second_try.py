"""A live test that fails is run once more in the same session, and never in silence.

Real processes on a machine that does other things may miss a limit that no promise of the product
set. The first failure is printed in full before the last line, which counts it as "rerun"; a second
one is a failure as any. Tests without the marker `live` decide at once, and so does what no machine
excuses (`PromiseBrokenError`): a lost record is lost whatever a second try finds. Whatever fixtures
were shared is torn down in between, so that the second try begins with clusters of its own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from _pytest.runner import call_and_report
from _pytest.terminal import TerminalReporter

RERUN = "rerun"
_AGAIN = pytest.StashKey[bool]()
_IS_FINAL = pytest.StashKey[bool]()


class PromiseBrokenError(AssertionError):
    """What must not happen on any machine: acknowledged records lost, doubled or out of order."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, None, None]:
    """Notice what decides at once."""
    if call.excinfo is not None and call.excinfo.errisinstance(PromiseBrokenError):
        item.stash[_IS_FINAL] = True
    yield


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a live test; if it fails, say so and have it run again."""
    is_watched = item.config.getoption("usepdb")
    if item.get_closest_marker("live") is None or is_watched or _AGAIN in item.stash:
        return None
    hook, where = item.ihook, {"nodeid": item.nodeid, "location": item.location}
    hook.pytest_runtest_logstart(**where)
    reports = _attempt(item, nextitem)
    failures = [report for report in reports if report.failed]
    if _IS_FINAL in item.stash:
        failures.clear()
    for report in failures or reports:
        if failures:
            report.outcome = RERUN  # type: ignore[assignment]  # pytest has no name for it
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(**where)
    if failures:
        item.stash[_AGAIN] = True
        # Through the hook, for a time limit of its own.
        hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
    return True


def _attempt(item: Any, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """As pytest's `runtestprotocol`, but after a failure nothing is left standing."""
    reports = [call_and_report(item, "setup", log=False)]
    if reports[0].passed:
        reports.append(call_and_report(item, "call", log=False))
    if any(report.failed for report in reports):
        nextitem = None
    reports.append(call_and_report(item, "teardown", log=False, nextitem=nextitem))
    item._request = False  # whoever runs it next makes a new one
    item.funcargs = None
    return reports


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    return (RERUN, "R", "RERUN") if report.outcome == RERUN else None


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    reports: list[Any] = terminalreporter.stats.get(RERUN, [])
    for report in reports:
        title = f"FAILED AT FIRST: {report.nodeid} ({report.when})"
        terminalreporter.write_sep("=", title, red=True)
        report.toterminal(terminalreporter._tw)
    for report in reports:
        terminalreporter.write_line(f"RAN TWICE {report.nodeid}: find out why", red=True)
