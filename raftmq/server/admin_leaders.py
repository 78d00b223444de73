"""/leaders of the admin port: who leads what, and giving a partition to another of its replicas.

`GET /leaders` shows every partition with its leader, preferred leader and in-sync replicas, as the
node knows them; `POST /leaders/transfer` takes `{"topic": "t", "partition": 0, "to": 2}` at any
node and answers when node 2 leads, or at its timeout. The transfer makes it the preferred leader
too, or balancing would undo it.

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
        return _answer(leaders.show())

    async def transfer(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
            return _answer({"error": f"the body must be {_JSON}"}, 415)
        body = b""
        async with aclosing(request.stream()) as stream:
            async for piece in stream:
                body += piece
                if len(body) > BODY_BYTES_MAX:
                    return _answer({"error": f"more than {BODY_BYTES_MAX} bytes"}, 413)
        try:
            wish = msgspec.json.decode(body, type=TransferWish)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _answer({"error": str(error)}, 400)
        return _answer(await leaders.transfer(wish))

    return [
        Route("/leaders", show, methods=["GET"]),
        Route("/leaders/transfer", transfer, methods=["POST"]),
    ]


def _answer(body: dict[str, Any], status_code: int = 200) -> Response:
    content = msgspec.json.encode(body)
    return Response(content, status_code=status_code, media_type=_JSON)
