"""The controller's part in replacing nodes: wish one partition after the other elsewhere, and end
what has nothing left to do (`replacement.py` decides both).

Owns only whether a command of this office is under way. Each names the state it was computed from,
so that one which comes too late is rejected and computed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftmq.controller.leader_table import LeaderTable
from raftmq.controller.replacement import next_end, next_move
from raftmq.metadata.metadata_engine import MetadataEngine
from raftmq.promise import Promise
from raftmq.types import NodeId

LOOK_AGAIN_MS: Final = 500.0


class Replacing:
    """The memory of one controller's term of office."""

    def __init__(
        self,
        engine: MetadataEngine,
        leaders: LeaderTable,
        moves_max: int,
        limit_of: Callable[[NodeId], int],
    ) -> None:
        self._engine = engine
        self._leaders = leaders
        self._moves_max = moves_max
        self._limit_of = limit_of
        self._is_proposing = False
        self._seen = (-1, -1)
        self._look_at_ms = 0.0

    def tick(self, now_ms: float) -> None:
        """Propose what is due; looks only where something changed, or after a while."""
        image, configuration = self._engine.image, self._engine.configuration
        if self._is_proposing or configuration is None or not image.replacements:
            return
        seen = image.structure_version, self._leaders.version
        if seen == self._seen and now_ms < self._look_at_ms:
            return
        self._seen, self._look_at_ms = seen, now_ms + LOOK_AGAIN_MS
        move = next_move(image, self._leaders, self._moves_max, self._limit_of)
        command = move or next_end(image, configuration)
        if command is None:
            return
        self._is_proposing = True

        def done(_promise: Promise[Any]) -> None:
            # Whatever came of it: the next tick looks at the state again.
            self._is_proposing = False
            self._seen = (-1, -1)

        self._engine.propose(
            command, expected_version=image.structure_version, may_resend=False
        ).when_done(done)
