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

from raftmq.visible import ascii_json, visible

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
    try:
        return ascii_json(msgspec.json.encode(event, enc_hook=str))
    except (TypeError, ValueError):  # a lone surrogate, a key that is no text
        shown = {str(key): visible(str(value)) for key, value in event.items()}
        return ascii_json(msgspec.json.encode(shown))


def _render_console(_logger: object, _method: str, event: MutableMapping[str, Any]) -> str:
    time, level = event.pop("timestamp", ""), event.pop("level", "")
    name = visible(str(event.pop("event", "")))
    trace = str(event.pop("exception", ""))
    event.pop("cluster", None)
    fields = " ".join(f"{visible(str(key))}={visible(str(value))}" for key, value in event.items())
    line = f"{time} {level:<7} {name:<{_EVENT_WIDTH}} {fields}".rstrip()
    # Indented, since a message in a traceback may hold what looks like a line of its own.
    return "\n".join([line, *(f"    {visible(part)}" for part in trace.split("\n") if part)])
