"""What the pages of the admin port share: JSON answers, bounded bodies, requests to act.

Invariants: a body is read up to a limit; a page that acts takes only `application/json`, which no
page of another site can make a browser send unasked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from raftmq.errors import RemoteProtocolError
from raftmq.foreign import decode_foreign

BODY_BYTES_MAX: Final = 4 << 10
_JSON: Final = "application/json"

Page: TypeAlias = Callable[[Request], Awaitable[Response]]
_Wish = TypeVar("_Wish")


def answer(body: dict[str, Any], status_code: int = 200) -> Response:
    """A JSON answer."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status_code, media_type=_JSON)


def too_large(bytes_max: int) -> Response:
    """The answer to a body above its limit."""
    return answer({"error": f"more than {bytes_max} bytes"}, 413)


async def read_body(request: Request, bytes_max: int) -> bytes | None:
    """Read a body; None, and no more of it, once it is above `bytes_max`."""
    body = b""
    async with aclosing(request.stream()) as stream:
        async for piece in stream:
            body += piece
            if len(body) > bytes_max:
                return None
    return body


def wish_page(kind: type[_Wish], act: Callable[[_Wish], Awaitable[dict[str, Any]]]) -> Page:
    """A page that reads a `kind` from its body and answers what `act` makes of it."""

    decoder = msgspec.json.Decoder(kind)

    async def page(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != _JSON:
            return answer({"error": f"the body must be {_JSON}"}, 415)
        body = await read_body(request, BODY_BYTES_MAX)
        if body is None:
            return too_large(BODY_BYTES_MAX)
        try:
            wish = decode_foreign("body", decoder.decode, body)
        except RemoteProtocolError as error:
            return answer({"error": str(error)}, 400)
        return answer(await act(wish))

    return page
