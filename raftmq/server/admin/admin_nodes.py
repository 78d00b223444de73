"""/nodes of the admin port: who makes up the cluster, and replacing one of them.

`GET /nodes` shows every node with its role and what is being replaced; `POST /nodes/replace` takes
`{"old_id": 1, "new_id": 4}`, with `even_if_alive` and `dry_run`, at any node, and answers when the
controller has decided. What happens then is the cluster's work, shown by `GET /nodes`.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from raftmq.server.admin.admin_pages import answer, wish_page


class ReplaceWish(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /nodes/replace`."""

    old_id: int
    new_id: int
    even_if_alive: bool = False
    dry_run: bool = False
    timeout_ms: int = 10_000


class NodesPort(Protocol):
    """What these pages show and do."""

    def show(self) -> dict[str, Any]: ...
    async def replace(self, wish: ReplaceWish) -> dict[str, Any]: ...


def nodes_routes(nodes: NodesPort) -> list[Route]:
    """The pages' routes."""

    async def show(_request: Request) -> Response:
        return answer(nodes.show())

    return [
        Route("/nodes", show, methods=["GET"]),
        Route("/nodes/replace", wish_page(ReplaceWish, nodes.replace), methods=["POST"]),
    ]
