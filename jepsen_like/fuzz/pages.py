"""Requests of the admin port: HTTP that is good, bad, endless or cut off."""

from __future__ import annotations

from random import Random
from typing import Final

from jepsen_like.fuzz.spoil import Frame, spoiled

PATHS: Final = (
    "/",
    "/metrics",
    "/health",
    "/health/live",
    "/health/ready",
    "/status",
    "/leaders",
    "/nodes",
    "/nope",
    "/metrics?x=" + "y" * 4000,
    "/../../etc/passwd",
    "/%00%ff",
)
"""What they order (a replacement, a fault) comes with bodies that fit none of them."""
POSTS: Final = ("/nodes/replace", "/leaders/balance", "/faults", "/health")
BODIES: Final = (
    b"",
    b"{}",
    b"[" * 5000,
    b'{"old": 99, "new": "x"}',
    b'{"block_to": ' + b"9" * 500 + b"}",
    b"\xff\xfe",
    b'{"a":' * 800,
    b"null",
)

LAST_HEADERS: Final = (
    "Connection: close",
    "Transfer-Encoding: chunked",
    "Accept: \x01\x02",
    "Connection: upgrade\r\nUpgrade: h2c",
    "Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
)


class PageMaker:
    """Draws HTTP requests."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def draw(self) -> Frame:
        """One request, spoiled or whole."""
        random = self._random
        if random.random() < 0.3:
            method, path = random.choice(("POST", "PUT", "DELETE")), random.choice(POSTS)
            body = random.choice(BODIES)
        else:
            method, path, body = (
                random.choice(("GET", "GET", "HEAD", "BREW", "PRI", "gEt")),
                "",
                b"",
            )
            path = random.choice(PATHS)
        length = random.choice((len(body), len(body), len(body) + 7, 1 << 40, -1))
        lines = [
            f"{method} {path} HTTP/{random.choice(('1.1', '1.1', '1.0', '9.9'))}",
            "Host: localhost",
            f"Content-Length: {length}",
            *(f"X-{i}: {'v' * 200}" for i in range(random.choice((0, 0, 3, 400)))),
            random.choice(LAST_HEADERS),
        ]
        data = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
        return spoiled(Frame(f"{method} {path[:30]}", data), random)
