"""/nodes of the admin port: who makes up the cluster, and replacing one of them.

`GET /nodes` shows every node with its role and what is being replaced; `POST /nodes/replace` takes
`{"old_id": 1, "new_id": 4}`, with `even_if_alive` and `dry_run`, at any node, and answers when the
controller has decided. What happens then is the cluster's work, shown by `GET /nodes`.

Invariants: a body is read up to a limit; only `application/json` is taken, which no page of another
site can make a browser send unasked.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

BODY_BYTES_MAX: Final = 4 << 10
_JSON: Final = "application/json"


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
        return _answer(nodes.show())

    async def replace(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
            return _answer({"error": f"the body must be {_JSON}"}, 415)
        body = b""
        async with aclosing(request.stream()) as stream:
            async for piece in stream:
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    return _answer({"error": f"more than {BODY_BYTES_MAX} bytes"}, 413)
        try:
            wish = msgspec.json.decode(body, type=ReplaceWish)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _answer({"error": str(error)}, 400)
        return _answer(await nodes.replace(wish))

    return [
        Route("/nodes", show, methods=["GET"]),
        Route("/nodes/replace", replace, methods=["POST"]),
    ]


def _answer(body: dict[str, Any], status_code: int = 200) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status_code=status_code, media_type=_JSON)
