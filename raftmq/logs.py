"""structlog for a node: one event per line, console or JSON, no traceback art.

structlog imports rich wherever it finds it, to draw tracebacks; a node draws none, and rich costs a
sixth of its start time. So this module must be the first to import structlog in a node's process.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, Final, TextIO

if "structlog" not in sys.modules and "rich" not in sys.modules:
    sys.modules["rich"] = None  # type: ignore[assignment]  # "not installed", for this one import
    try:
        import structlog
    finally:
        del sys.modules["rich"]
else:
    import structlog

import msgspec

__all__ = ["LEVELS", "configure_logs", "structlog"]

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_EVENT_WIDTH: Final = 32


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
    return msgspec.json.encode(event, enc_hook=str).decode()


def _render_console(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    time, level = event.pop("timestamp", ""), event.pop("level", "")
    name = str(event.pop("event", ""))
    trace = event.pop("exception", "")
    event.pop("cluster", None)
    fields = " ".join(f"{key}={value}" for key, value in event.items())
    line = f"{time} {level:<7} {name:<{_EVENT_WIDTH}} {fields}".rstrip()
    return f"{line}\n{trace}" if trace else line
