"""What a connection fetched last, for clients that poll on in the same words.

A consumer at the end of its partitions repeats itself until something comes. Known again by its
words, its request is not decoded; and while the partitions are as they were, the look at them and
the encoded answer, in which nothing but the correlation id differs, are used again as well.

Kept per connection, for small requests without a session (a session's differ in their epoch). Only
remembers: whether a look at partitions still holds is for the fetch handler to say.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, Self, cast

from raftmq.protocol import RequestHeader
from raftmq.protocol.fetch import FetchRequest, FetchResponse, encode_fetch_frame
from raftmq.server.kafka.fetch_sessions import FINAL_EPOCH
from raftmq.server.kafka.replies import Pieces

if TYPE_CHECKING:
    from raftmq.server.kafka.handlers.fetch import Reading
    from raftmq.server.kafka.idle_poll import IdlePoll

BYTES_MAX: Final = 512
"""A poller without a session asks in the same words until it gets something."""
_HEAD_SIZE: Final = 8
"""API key, version and correlation id of a request; frame size and correlation id of an answer."""

_pack_id = struct.Struct(">i").pack


class FetchMemo:
    """One request and what is known of it."""

    __slots__ = ("_encoded", "_response", "_words", "header", "idle", "reading", "request")

    def __init__(self, header: RequestHeader, words: bytes, request: FetchRequest) -> None:
        self.header = header
        self.request = request
        self.reading: Reading | None = None
        """The last look at its partitions, if it found nothing and nobody uses it."""
        self.idle: IdlePoll | None = None
        """Waits with the next request of the same words."""
        self._words = words
        self._response: FetchResponse | None = None
        self._encoded = b""

    @classmethod
    def of(cls, header: RequestHeader, frame: memoryview, request: FetchRequest) -> Self | None:
        """A memo of this request if one is worth while."""
        if request.session_epoch != FINAL_EPOCH or len(frame) > BYTES_MAX:
            return None
        return cls(header, bytes(frame[_HEAD_SIZE:]), request)

    def is_of(self, version: int, frame: memoryview) -> bool:
        """True when `frame`, a fetch of this version, says the same again."""
        return self._words == frame[_HEAD_SIZE:] and version == self.header.api_version

    def encode(self, header: RequestHeader, correlation_id: int, response: FetchResponse) -> Pieces:
        """The answer as it is sent; the same response object is encoded once."""
        if response is self._response:
            encoded = self._encoded
            return (b"".join((encoded[:4], _pack_id(correlation_id), encoded[_HEAD_SIZE:])),)
        pieces: Any = encode_fetch_frame(header.api_version, correlation_id, response)
        if len(pieces) == 1:
            self._response, self._encoded = response, pieces[0]
        return cast(Pieces, pieces)
