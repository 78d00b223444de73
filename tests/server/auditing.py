"""An audit that keeps its lines for a test to read, and one that keeps none."""

from __future__ import annotations

import json
from typing import Any, Final

from raftmq.runtime.clock import RealClock
from raftmq.server.audit import Audit

NO_AUDIT: Final = Audit(None, RealClock(), cluster="cluster", node=1)


class Lines:
    """A sink; `room` lines fit, all if None."""

    def __init__(self) -> None:
        self.raw: list[bytes] = []
        self.room: int | None = None
        self.failure = ""

    def write(self, line: bytes) -> bool:
        if self.room is not None:
            if not self.room:
                return False
            self.room -= 1
        self.raw.append(line)
        return True

    @property
    def read(self) -> list[dict[str, Any]]:
        """All lines, without what every line has."""
        rows = [json.loads(line) for line in self.raw]
        for row in rows:
            assert row.pop("at"), "each says when"
            assert (row.pop("cluster"), row.pop("node")) == ("cluster", 1)
        return rows
