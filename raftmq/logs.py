"""The log of a node: structlog, one event per line, console or JSON, no drawn tracebacks; and a
logger that a flood cannot fill.

structlog imports rich wherever it finds it, to draw tracebacks; a node draws none, and rich costs a
sixth of its start time. So this module must be the first to import structlog in a node's process.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO
from weakref import WeakSet

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # "not installed", for this one import
    try:
        import structlog
    finally:
        del sys.modules["rich"]
else:
    import structlog

import msgspec

from raftmq.foreign import ascii_json, visible

__all__ = ["LEVELS", "RateLimitedLog", "configure_logs", "flush_all", "structlog"]

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_EVENT_WIDTH: Final = 32
LINES_MAX: Final = 5
"""So many lines of one event are written in `PERIOD_S`."""
PERIOD_S: Final = 10.0
_all: Final[WeakSet[RateLimitedLog]] = WeakSet()
_all_lock: Final = threading.Lock()
"""Modules that make one are imported in workers, too, while the loop flushes all of them."""


def configure_logs(
    *, log_format: str, level: str, cluster_id: str, node_id: int, stream: TextIO | None = None
) -> None:
    """Set up logging for this process; every event names its cluster and node.

    Args:
        log_format: "console" for people, "json" for machines.
        level: the least level that is written.
    """
    render = _render_json if log_format == "json" else _render_console
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS.get(level, 20)),
        logger_factory=structlog.PrintLoggerFactory(stream or sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(cluster=cluster_id, node=node_id)


def _render_json(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    try:
        return ascii_json(msgspec.json.encode(event, enc_hook=str))
    except (TypeError, ValueError):  # a lone surrogate, a key that is no text
        shown = {str(key): visible(str(value)) for key, value in event.items()}
        return ascii_json(msgspec.json.encode(shown))


def _render_console(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    at, level = event.pop("timestamp", ""), event.pop("level", "")
    name = visible(str(event.pop("event", "")))
    trace = str(event.pop("exception", ""))
    event.pop("cluster", None)
    fields = " ".join(f"{visible(str(key))}={visible(str(value))}" for key, value in event.items())
    line = f"{at} {level:<7} {name:<{_EVENT_WIDTH}} {fields}".rstrip()
    # Indented, since a message in a traceback may hold what looks like a line of its own.
    return "\n".join([line, *(f"    {visible(part)}" for part in trace.split("\n") if part)])


class RateLimitedLog:
    """A logger that a flood cannot fill: at most `lines_max` lines of an event in `PERIOD_S`, then
    one line that says how many were left out.

    For events that clients can cause, and events that can happen to a thousand partitions at once.
    """

    __slots__ = ("__weakref__", "_lines_max", "_log", "_now", "_periods")

    def __init__(
        self,
        log: Any,
        now: Callable[[], float] = time.monotonic,
        *,
        lines_max: int = LINES_MAX,
    ) -> None:
        self._log = log
        self._now = now
        self._lines_max = lines_max
        self._periods: dict[str, tuple[float, int, str]] = {}  # event (ours): start, lines, level
        with _all_lock:
            _all.add(self)

    def debug(self, event: str, **fields: object) -> None:
        """Log a detail, or count it."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log a change, or count it."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning, or count it."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Log an error, or count it."""
        self._write("error", event, fields)

    def flush(self) -> None:
        """Log how many lines were left out in periods that are over."""
        now = self._now()
        for event, (start, lines, level) in list(self._periods.items()):
            if 0 <= now - start < PERIOD_S:
                continue
            del self._periods[event]
            if lines > self._lines_max:
                getattr(self._log, level)(event, left_out=lines - self._lines_max)

    def _write(self, level: str, event: str, fields: dict[str, object]) -> None:
        now = self._now()
        start, lines, _ = self._periods.get(event, (now, 0, level))
        if now - start >= PERIOD_S or now < start:
            if lines > self._lines_max:
                fields = {**fields, "left_out": lines - self._lines_max}
            start, lines = now, 0
        lines += 1
        self._periods[event] = (start, lines, level)
        if lines <= self._lines_max:
            getattr(self._log, level)(event, **fields)


def flush_all() -> None:
    """Flush every such logger of this process; a node does so about once a second, since an event
    that never comes again would not say how much of it was left out."""
    with _all_lock:
        known = list(_all)
    for log in known:
        log.flush()
