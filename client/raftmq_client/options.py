"""Reading addresses and options that all drivers share.

Text in, checked values out; what makes no sense is a `UsageError` that names it. Resolves no name
and opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from raftmq_client.core.client import ClientOptions
from raftmq_client.errors import UsageError

DEFAULT_PORT = 9092


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Read `host:port,host:port`, or a sequence of such; the port defaults to 9092.

    Raises:
        UsageError: not of that form; the message names the part.
    """
    parts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = []
    for part in (part.strip() for part in parts):
        if not part:
            continue
        host, colon, port = part.rpartition(":")
        if not colon or part.endswith("]"):
            host, port = part, str(DEFAULT_PORT)
        if not port.isdigit() or not 0 < int(port) < 65536 or not host:
            raise UsageError(f"{part!r} is not host:port, such as 127.0.0.1:9092")
        addresses.append((host.strip("[]"), int(port)))
    if not addresses:
        raise UsageError("no bootstrap address; give host:port[,host:port...]")
    return tuple(addresses)


def client_options(bootstrap: str | Sequence[str], client_id: str) -> ClientOptions:
    """Options of a client with everything else as usual."""
    return ClientOptions(bootstrap=parse_bootstrap(bootstrap), client_id=client_id)
