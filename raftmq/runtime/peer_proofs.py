"""What proves on a stream between nodes that both sides know the cluster's secret: keys, no bytes
of a network.

The key of a stream is an HMAC-SHA256, by the secret, of the numbers that both sides drew and of the
certificate that the dialled side showed. A proof is an HMAC by that key of its step and of the
hellos up to it. So it holds on this stream alone, in one direction, once, and for these hellos:
cluster, node and storage of both sides, the stream's name, and the formats that they speak.
"""

from __future__ import annotations

import hmac
from enum import Enum
from hashlib import sha256
from typing import Final

NUMBER_BYTES: Final = 32
PROOF_BYTES: Final = 32
_ALGORITHM: Final = "sha256"
_STREAM_KEY: Final = b"raftmq peer stream 1"
"""Before what a stream's key is made of, which has a fixed length; of another version another."""


class Step(Enum):
    """What a proof is of, in the order in which they are said. Each has a text of its own, so that
    none can be passed off as another."""

    DIALLING_KNOWS = b"the dialling side knows the secret"
    DIALLED_KNOWS = b"the dialled side knows the secret"
    DIALLING_HELLO = b"the dialling side's hello"
    DIALLED_HELLO = b"the dialled side's hello, after the dialling side's"


class StreamProofs:
    """The proofs of one stream, of both sides.

    Args:
        secret: one that this node knows.
        dialled_number: what the dialled side drew for this connection, of `NUMBER_BYTES`.
        dialling_number: likewise.
        certificate: that of the dialled side (DER), as this side showed or saw it.
        is_dialling: whether this is the dialling side.
    """

    __slots__ = ("_key", "_said", "is_dialling")

    def __init__(
        self,
        secret: bytes,
        *,
        dialled_number: bytes,
        dialling_number: bytes,
        certificate: bytes,
        is_dialling: bool,
    ) -> None:
        assert len(dialled_number) == len(dialling_number) == NUMBER_BYTES
        of = _STREAM_KEY + dialled_number + dialling_number + sha256(certificate).digest()
        self._key = hmac.digest(secret, of, _ALGORITHM)
        self._said = sha256()  # of all hellos so far, each with its length before it
        self.is_dialling = is_dialling

    def known(self) -> bytes:
        """The proof that this side knows the secret."""
        return self._proof(self._step(is_hello=False, is_own=True))

    def is_known(self, proof: bytes) -> bool:
        """True when the other side knows it."""
        wanted = self._proof(self._step(is_hello=False, is_own=False))
        return hmac.compare_digest(wanted, proof)

    def said(self, hello: bytes) -> bytes:
        """The proof of this side's hello, after which it is said."""
        self._said.update(hello)
        return self._proof(self._step(is_hello=True, is_own=True))

    def is_said(self, hello: bytes, proof: bytes) -> bool:
        """True when the other side said this hello, and heard what this one said before."""
        self._said.update(hello)
        wanted = self._proof(self._step(is_hello=True, is_own=False))
        return hmac.compare_digest(wanted, proof)

    def _step(self, *, is_hello: bool, is_own: bool) -> Step:
        if self.is_dialling == is_own:
            return Step.DIALLING_HELLO if is_hello else Step.DIALLING_KNOWS
        return Step.DIALLED_HELLO if is_hello else Step.DIALLED_KNOWS

    def _proof(self, step: Step) -> bytes:
        return hmac.digest(self._key, self._said.digest() + step.value, _ALGORITHM)
