"""Who sent a request: the principal, where it comes from, the listener that took it in.

One frozen value. A connection holds the present one, made where it is accepted and replaced as a
whole when its client authenticates; each request keeps the one with which it began, as an argument
(`RequestContext.caller`) and never as something ambient. Knows no rights and checks nothing.
"""

from __future__ import annotations

from typing import Final

from attrs import frozen

from raftmq.config import PLAINTEXT

ANONYMOUS: Final = "User:ANONYMOUS"
"""The principal of every client that did not authenticate, as Kafka names it."""


@frozen(slots=True)
class Caller:
    """Who asks, from where, and by which listener.

    Attributes:
        principal: Kafka's text of it, `User:NAME`.
        host: the client's address, without its port.
        listener: the name of the listener that accepted its connection.
    """

    principal: str = ANONYMOUS
    host: str = ""
    listener: str = PLAINTEXT
