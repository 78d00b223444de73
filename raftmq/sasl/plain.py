"""PLAIN (RFC 4616): a name and its password as they are, judged by the credentials of SCRAM.

The password is salted as often as its credential says, which is work for a worker; for a name that
has no credential the same work is done in vain, that of a user with all mechanisms, so that the
time does not tell.
"""

from __future__ import annotations

from raftmq.sasl.exchange import (
    Answer,
    AuthenticationFailedError,
    Step,
    check_identity,
    decode_text,
)
from raftmq.sasl.scram import (
    SCRAM_SHA_256,
    SCRAM_SHA_512,
    FindCredential,
    made_up_credential,
    proves,
)


class PlainExchange:
    """The server's side of one exchange."""

    def __init__(self, find: FindCredential, secret: bytes) -> None:
        """`secret` is what credentials are made up from."""
        self._find = find
        self._secret = secret
        self._is_over = False

    def step(self, token: bytes) -> Step:
        """Take the client's only message: the work of judging it.

        Raises:
            AuthenticationFailedError: it is malformed, or not the first one.
        """
        if self._is_over:
            raise AuthenticationFailedError("a message after the last one")
        self._is_over = True
        parts = decode_text(token).split("\0")
        if len(parts) != 3:
            raise AuthenticationFailedError("a malformed message")
        wanted, user, password = parts
        if not user or not password:
            raise AuthenticationFailedError("a message without a user or a password")
        check_identity(wanted, user)
        made_up = made_up_credential(self._secret, SCRAM_SHA_512, user)
        mechanism, credential = SCRAM_SHA_512, self._find(user, SCRAM_SHA_512)
        if credential is None:
            credential = self._find(user, SCRAM_SHA_256)
            mechanism = SCRAM_SHA_512 if credential is None else SCRAM_SHA_256
        is_known = credential is not None
        judged = made_up if credential is None else credential

        def judge() -> Answer:
            is_right = proves(mechanism, judged, password)
            if not is_right or not is_known:
                raise AuthenticationFailedError("a wrong password", user if is_known else None)
            return Answer(b"", user, credential=judged)

        return judge
