"""The page of the admin port that evens out the brokers.

`POST /balance` takes `{"dry_run": true}` and answers with each move, its reason and its bytes (-1
where nobody knows them), in a dry run also with what the partition's group goes through. Without
`dry_run` it answers once the moves are planned; `GET /moves` shows what becomes of them. With
`"onto": [4]` only these brokers gain replicas.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.routing import Route

from raftmq.controller.control_plane import ControlPlane
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import BalanceCall, Outcome
from raftmq.server.admin.pages import action_page, value_of, within_limits
from raftmq.server.audit import Audit

ONTO_MAX: Final = 1_000


class BalanceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /balance`."""

    dry_run: bool = False
    onto: tuple[int, ...] | None = None
    timeout_ms: int = 30_000


class BalancePage:
    """What one node does on this page."""

    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    async def balance(self, wanted: BalanceRequest) -> dict[str, Any]:
        """Have the controller plan a balance, and submit it unless only asked."""
        call = BalanceCall(
            dry_run=wanted.dry_run,
            onto=None if wanted.onto is None else wanted.onto[:ONTO_MAX],
            timeout_ms=within_limits(wanted.timeout_ms),
        )
        try:
            verdict, *rows = await value_of(self._control.call(call))
        except KafkaError as error:
            return {"code": error.code.name, "message": error.message, "moves": []}
        return {
            "code": ErrorCode(verdict.code).name,
            "message": verdict.message or "",
            "moves": [_told(row) for row in rows],
        }


def _told(row: Outcome) -> dict[str, Any]:
    move: dict[str, Any] = {} if row.move is None else msgspec.to_builtins(row.move)
    return {**move, "code": ErrorCode(row.code).name, "message": row.message or ""}


def balance_routes(page: BalancePage, audit: Audit) -> list[Route]:
    """The page's route."""
    return [Route("/balance", action_page(BalanceRequest, page.balance, audit), methods=["POST"])]
