"""/leaders of the admin port: who leads what, and giving a partition to another of its replicas.

`GET /leaders` shows every partition with its leader, preferred leader and in-sync replicas, as the
node knows them; `POST /leaders/transfer` takes `{"topic": "t", "partition": 0, "to": 2}` at any
node and answers when node 2 leads, or at its timeout. The transfer makes it the preferred leader
too, or balancing would undo it.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.server.admin.admin_pages import answer, wish_page


class TransferWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /leaders/transfer`."""

    topic: str
    partition: int
    to: int
    timeout_ms: int = 10_000


class LeadersPort(Protocol):
    """What these pages show and do."""

    def show(self) -> dict[str, Any]: ...
    async def transfer(self, wish: TransferWish) -> dict[str, Any]: ...


def leaders_routes(leaders: LeadersPort) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(leaders.show())

    return [
        Route("/leaders", show, methods=["GET"]),
        Route("/leaders/transfer", wish_page(TransferWish, leaders.transfer), methods=["POST"]),
    ]
