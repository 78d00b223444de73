"""Who a client is (`Caller`), and how clients of a listener with SASL authenticate: the states of a
connection, and what all of them share.

Before it is authenticated a connection is asked for nothing but ApiVersions, SaslHandshake and
SaslAuthenticate; whatever else comes ends it. A handshake of version 0 is followed by bare tokens
in frames without a header. An exchange that fails is answered after a delay, and the connection
ends with that answer. A session may end in time: then the client authenticates again on the same
connection (KIP-368), by the same mechanism and as the same principal, or loses it at its next
request.

Work that takes milliseconds (salting a password) is done by at most two workers at a time, so that
strangers who guess passwords hold up no other work.

Why an exchange failed stands in this node's log alone; no client is told. The log names existing
users only, since passwords are often typed where the name belongs.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Mapping, Set
from enum import Enum
from functools import partial
from typing import Any, Final, Protocol

import structlog
from attrs import evolve, frozen

from raftmq.config import PLAINTEXT
from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.logs import RateLimitedLog
from raftmq.metadata.commands import AlterUsers, Envelope
from raftmq.metadata.credentials import SECRET_BYTES
from raftmq.metadata.image import MetadataImage, UsersImage
from raftmq.metadata.results import Result
from raftmq.metadata.state_machine import Skip
from raftmq.partition.parked import Deadlines
from raftmq.ports import Clock
from raftmq.promise import Promise
from raftmq.protocol import ApiKey
from raftmq.raft.messages import SoftState
from raftmq.runtime.threads import WorkerPool
from raftmq.sasl.exchange import (
    TOKEN_BYTES_MAX,
    Answer,
    AuthenticationFailedError,
    Exchange,
    Step,
)
from raftmq.sasl.oauthbearer import MECHANISM as OAUTHBEARER
from raftmq.sasl.oauthbearer import OAuthBearerExchange, Verify
from raftmq.sasl.plain import PlainExchange
from raftmq.sasl.scram import SCRAM_MECHANISMS, ScramCredential, ScramExchange, ScramMechanism
from raftmq.server.audit import Audit, AuditOutcome, Who
from raftmq.server.kafka.counts import ServerCounts
from raftmq.server.kafka.work import then
from raftmq.types import Offset, RaftIndex

ANONYMOUS: Final = "User:ANONYMOUS"
"""The principal of every client that did not authenticate, as Kafka names it."""


@frozen(slots=True)
class Caller:
    """Who asks, from where, and by which listener.

    A connection holds the present one, made where it is accepted and replaced as a whole when its
    client authenticates; each request keeps the one with which it began, as an argument
    (`RequestContext.caller`) and never as something ambient. Knows no rights and checks nothing.

    Attributes:
        principal: Kafka's text of it, `User:NAME`.
        host: the client's address, without its port.
        listener: the name of the listener that accepted its connection.
    """

    principal: str = ANONYMOUS
    host: str = ""
    listener: str = PLAINTEXT


PLAIN: Final = "PLAIN"
MECHANISMS: Final = (PLAIN, OAUTHBEARER, *SCRAM_MECHANISMS)
"""All that can be switched on."""
REAUTHENTICATE_AGAIN_MS: Final = 1_000
"""A client authenticates again once in so long at most (as in Kafka)."""
WORKERS_MAX: Final = 2
WAITING_MAX: Final = 256
"""Exchanges that wait for a worker; beyond it they fail."""
NONCE_BYTES: Final = 24
_OFFERED_BEFORE: Final = (ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
_FRAMED_FROM: Final = 1
"""The first version of SaslHandshake after which tokens come in requests."""

_log = RateLimitedLog(structlog.get_logger("raftmq.security"))


@frozen(slots=True, kw_only=True)
class SaslSettings:
    """How clients may authenticate.

    Attributes:
        mechanisms: those that are offered, by Kafka's names.
        session_ms_max: how long a session lasts (connections.max.reauth.ms); 0: for ever.
        failure_delay_ms: how long a client waits for the answer to a failure.
        timeout_ms: how long a client may take until it has authenticated.
    """

    mechanisms: tuple[str, ...]
    session_ms_max: int = 0
    failure_delay_ms: int = 100
    timeout_ms: int = 30_000


class AuthenticatedConnection(Protocol):
    """What an authentication does to its connection."""

    peer: str
    caller: Caller

    def finish(self) -> None:
        """Begin no more requests, answer those in hand, hang up."""
        ...

    def broken(self) -> None:
        """Hang up soon, without an answer to what is in hand."""
        ...


class Authenticator:
    """What the connections of listeners with SASL share."""

    def __init__(
        self,
        settings: SaslSettings,
        users: Callable[[], UsersImage],
        *,
        workers: WorkerPool,
        deadlines: Deadlines,
        clock: Clock,
        counts: ServerCounts,
        audit: Audit,
        verify: Verify | None = None,
        make_nonce: Callable[[], str] = partial(secrets.token_urlsafe, NONCE_BYTES),
    ) -> None:
        """`verify` judges tokens of OAUTHBEARER, in a worker; None where it is not offered."""
        assert (verify is not None) == (OAUTHBEARER in settings.mechanisms), (
            "one goes with the other"
        )
        self.settings = settings
        self._verify = verify
        self.deadlines = deadlines
        self.clock = clock
        self.counts = counts
        self.audit = audit
        self._users = users
        self._workers = workers
        self._make_nonce = make_nonce
        self._secret = secrets.token_bytes(SECRET_BYTES)  # until the cluster has one
        self._waiting: deque[tuple[Callable[[], Answer], Promise[Answer]]] = deque()
        self._working = 0
        self._sessions: dict[int, Authentication] = {}
        self.deletions = Deletions(self.has, self._end)

    def exchange(self, mechanism: str) -> Exchange:
        """Begin an exchange by a mechanism that is offered."""
        secret = self._users().secret or self._secret
        if mechanism == PLAIN:
            return PlainExchange(self._find, secret)
        if mechanism == OAUTHBEARER:
            assert self._verify is not None, "checked when it was made"
            return OAuthBearerExchange(self._verify)
        scram = SCRAM_MECHANISMS[mechanism]
        return ScramExchange(scram, self._find, secret, self._make_nonce())

    def _find(self, user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        return self._users().get(user, mechanism.number)

    def has(self, user: str) -> bool:
        """True while there is such a user."""
        return user in self._users().credentials

    def holds(self, user: str, credential: object) -> bool:
        """True while this is one of the credentials of a user."""
        known = self._users().credentials.get(user)
        return known is not None and any(one == credential for one in known.values())

    # ---- work ----

    def work(self, job: Callable[[], Answer]) -> Promise[Answer]:
        """Do it in a worker; fails with what it raises."""
        promise: Promise[Answer] = Promise()
        if len(self._waiting) >= WAITING_MAX:
            promise.fail(AuthenticationFailedError("too many wait for a worker"))
            return promise
        self._waiting.append((job, promise))
        self._work_on()
        return promise

    def _work_on(self) -> None:
        while self._waiting and self._working < WORKERS_MAX:
            job, promise = self._waiting.popleft()
            self._working += 1
            self._workers.submit(job).when_done(partial(self._worked, promise))

    def _worked(self, promise: Promise[Answer], done: Promise[Answer]) -> None:
        self._working -= 1
        try:
            if done.error is None:
                promise.resolve(done.result())
            else:
                promise.fail(done.error)
        finally:
            self._work_on()

    # ---- sessions ----

    def began(self, session: Authentication) -> None:
        """A connection authenticated."""
        self._sessions[id(session)] = session

    def ended(self, session: Authentication) -> None:
        """A connection is closed."""
        self._sessions.pop(id(session), None)

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """End the sessions of users that are no more."""
        old, new = before.users.credentials, after.users.credentials
        if old is not new:
            self._end({user for user in old if user not in new})

    def _end(self, gone: Set[str]) -> None:
        for session in list(self._sessions.values()):
            if session.user in gone and session.is_of_this_cluster:
                _log.info("session ended: its user was deleted", peer=session.peer)
                session.end()


class Deletions:
    """Hears which users commands delete: a node that was behind applies many commands in one step,
    and the images before and after it do not show a user that was deleted and made anew."""

    def __init__(self, has: Callable[[str], bool], end: Callable[[Set[str]], None]) -> None:
        """`has(user)` is true while there is such a user, `end(users)` ends their sessions."""
        self._has = has
        self._end = end
        self._gone: set[str] = set()
        self._is_restored = False

    def command_applied(self, envelope: Envelope, _result: Result, _offset: Offset) -> None:
        """Look whom a command deleted."""
        command = envelope.command
        if isinstance(command, AlterUsers):
            self._gone.update(one.user for one in command.deletions if not self._has(one.user))

    def command_skipped(self, skip: Skip) -> None:
        """It changed nothing."""

    def state_restored(self, image: MetadataImage) -> None:
        """Whose credentials are others by now may have been deleted meanwhile."""
        self._is_restored = True

    def image_changed(self, before: MetadataImage, after: MetadataImage) -> None:
        """End the sessions of those that were deleted, or may have been."""
        gone, self._gone = self._gone, set()
        is_restored, self._is_restored = self._is_restored, False
        if is_restored:
            new = after.users.credentials
            for user, known in before.users.credentials.items():
                if known != new.get(user):
                    gone.add(user)
        if gone:
            self._end(gone)

    def advanced(self, applied_end: RaftIndex) -> None:
        """Nothing to do."""

    def role_changed(self, soft: SoftState) -> None:
        """Nothing to do."""


class AuthenticationState(Enum):
    """What a connection with SASL waits for."""

    HANDSHAKE = "the client has to name a mechanism"
    EXCHANGE = "the client's next token, in a request"
    BARE_EXCHANGE = "the client's next token, in a frame of its own"
    WORK = "a worker, or the delay after a failure"
    AUTHENTICATED = "it is served"


_State = AuthenticationState
NEXT: Final[Mapping[AuthenticationState, frozenset[AuthenticationState]]] = {
    _State.HANDSHAKE: frozenset({_State.EXCHANGE, _State.BARE_EXCHANGE, _State.WORK}),
    _State.EXCHANGE: frozenset({_State.EXCHANGE, _State.WORK, _State.AUTHENTICATED}),
    _State.BARE_EXCHANGE: frozenset({_State.BARE_EXCHANGE, _State.WORK, _State.AUTHENTICATED}),
    _State.WORK: frozenset(
        {_State.EXCHANGE, _State.BARE_EXCHANGE, _State.WORK, _State.AUTHENTICATED}
    ),
    _State.AUTHENTICATED: frozenset({_State.EXCHANGE, _State.BARE_EXCHANGE, _State.WORK}),
}
"""All ways from one state to another; only `Authentication._become` takes them."""


@frozen(slots=True)
class _Said:
    """The next token and the session's lifetime, 0 for one that does not end; or how a failure is
    told, which is the last that is said."""

    token: bytes = b""
    lifetime_ms: int = 0
    failure: str | None = None


class Authentication:
    """Of one connection."""

    __slots__ = (
        "_authenticator",
        "_connection",
        "_exchange",
        "_expires_ms",
        "_gives_up_ms",
        "_is_bare",
        "_is_over",
        "_is_told",
        "_mechanism",
        "_reauthenticated_ms",
        "has_failed",
        "is_of_this_cluster",
        "state",
        "user",
    )

    def __init__(self, authenticator: Authenticator, connection: AuthenticatedConnection) -> None:
        self._authenticator = authenticator
        self._connection = connection
        self._exchange: Exchange | None = None
        self._expires_ms: float | None = None
        settings = authenticator.settings
        self._gives_up_ms = authenticator.clock.monotonic_ms() + settings.timeout_ms
        self._is_bare = False
        self._is_over = False
        self._is_told = False  # of the failure that the client has to acknowledge yet
        self._mechanism = ""
        self._reauthenticated_ms = 0.0
        self.has_failed = False
        self.is_of_this_cluster = True
        """False where another service said who the user is."""
        self.state = AuthenticationState.HANDSHAKE
        self.user: str | None = None
        """The one that was proved first; it stays the same."""

    @property
    def peer(self) -> str:
        """Address and port of the client."""
        return self._connection.peer

    @property
    def is_bare(self) -> bool:
        """True while tokens come in frames without a header."""
        return self.state is AuthenticationState.BARE_EXCHANGE or (
            self._is_bare and self.state is AuthenticationState.WORK
        )

    @property
    def is_complete(self) -> bool:
        """True once the client has authenticated, also while it does so again."""
        return self.user is not None

    def is_too_slow(self) -> bool:
        """True when the client should have authenticated by now."""
        return self.user is None and (self._authenticator.clock.monotonic_ms() >= self._gives_up_ms)

    def _become(self, state: AuthenticationState) -> None:
        assert state in NEXT[self.state], f"SASL goes from {self.state.name} to {state.name}"
        self.state = state

    def end(self) -> None:
        """Hang up: nothing that was asked for is answered any more."""
        self._is_over = True
        self._connection.broken()

    def closed(self) -> None:
        """The connection is gone."""
        self._is_over = True
        self._authenticator.ended(self)

    # ---- what may come ----

    def check_frame(self, size: int) -> None:
        """Judge a frame by its size alone, as long as a stranger may have sent it.

        Raises:
            RemoteProtocolError: it is too large.
        """
        if self.user is None and size > TOKEN_BYTES_MAX:
            raise RemoteProtocolError(
                f"a frame of {size} bytes from a client that has not authenticated"
            )

    def check(self, api_key: int) -> None:
        """Refuse a request whose time has not come, or is over.

        Raises:
            RemoteProtocolError: the connection is to be closed.
        """
        if self.state is AuthenticationState.AUTHENTICATED and not self._is_over:
            if self._expires_ms is None or api_key == ApiKey.SASL_HANDSHAKE:
                return
            if self._authenticator.clock.monotonic_ms() < self._expires_ms:
                return
            self._authenticator.counts.authentication(self._mechanism, "expired")
            self._tell(AuditOutcome.FAILED, self.user, "the session ended")
            raise RemoteProtocolError("its session has ended, and it did not authenticate again")
        if self.state is AuthenticationState.WORK or self._is_over:
            raise RemoteProtocolError("a request before the answer to its authentication")
        is_again = self.state is AuthenticationState.EXCHANGE and api_key != _OFFERED_BEFORE[2]
        if api_key not in _OFFERED_BEFORE or is_again:
            raise RemoteProtocolError(f"API {api_key} before it has authenticated")

    # ---- requests ----

    def handshake(self, version: int, mechanism: str) -> dict[str, Any] | Promise[dict[str, Any]]:
        """Answer SaslHandshake."""
        offered = list(self._authenticator.settings.mechanisms)
        if self.state is AuthenticationState.AUTHENTICATED and not self._may_begin_again():
            return {"error_code": ErrorCode.ILLEGAL_SASL_STATE, "mechanisms": []}
        if mechanism not in offered:
            self._count("unknown", "failed")
            self._tell(AuditOutcome.FAILED, None, "an unknown mechanism")
            _log.warning("authentication failed", peer=self.peer, why="an unknown mechanism")
            return self._later(
                {"error_code": ErrorCode.UNSUPPORTED_SASL_MECHANISM, "mechanisms": offered}
            )
        if self.user is not None and mechanism != self._mechanism:
            self._exchange = _BadMechanism(mechanism, self._mechanism)
        else:
            self._mechanism = mechanism
            self._exchange = self._authenticator.exchange(mechanism)
        self._is_bare = version < _FRAMED_FROM
        self._become(
            AuthenticationState.BARE_EXCHANGE if self._is_bare else AuthenticationState.EXCHANGE
        )
        return {"error_code": ErrorCode.NONE, "mechanisms": offered}

    def _may_begin_again(self) -> bool:
        if self._expires_ms is None:
            return False
        now_ms = self._authenticator.clock.monotonic_ms()
        last_ms, self._reauthenticated_ms = self._reauthenticated_ms, now_ms
        return not last_ms or now_ms - last_ms >= REAUTHENTICATE_AGAIN_MS

    def authenticate(self, token: bytes) -> dict[str, Any] | Promise[dict[str, Any]]:
        """Answer SaslAuthenticate."""
        if self.state is AuthenticationState.AUTHENTICATED:
            return _answer(
                ErrorCode.ILLEGAL_SASL_STATE,
                "SaslAuthenticate request received after successful authentication",
            )
        if self.state is not AuthenticationState.EXCHANGE:
            why = "SaslAuthenticate request received before a SaslHandshake"
            return self._later(_answer(ErrorCode.ILLEGAL_SASL_STATE, why))
        return _translated(self._step(token))

    def bare_token(self, token: bytes) -> bytes | Promise[bytes | None] | None:
        """Answer a token without a header; None ends the connection."""
        if self.state is not AuthenticationState.BARE_EXCHANGE:
            raise RemoteProtocolError("a token before the answer to the last one")
        said: bytes | Promise[bytes | None] | None = then(self._step(token), _bare)
        return said

    # ---- the exchange ----

    def _step(self, token: bytes) -> _Said | Promise[_Said]:
        exchange = self._exchange
        assert exchange is not None, "begun by the handshake"
        try:
            step: Step = exchange.step(token)
            if isinstance(step, Answer):
                return self._take(step)
        except AuthenticationFailedError as error:
            return self._failed(error)
        self._become(AuthenticationState.WORK)
        said: Promise[_Said] = Promise()

        def worked(done: Promise[Answer]) -> None:
            error = done.error
            if error is None:
                try:
                    said.resolve(self._take(done.result()))
                    return
                except AuthenticationFailedError as failure:
                    error = failure
            if isinstance(error, AuthenticationFailedError):
                self._failed(error).when_done(lambda one: said.resolve(one.result()))
            else:
                said.fail(error)

        self._authenticator.work(step).when_done(worked)
        return said

    def _take(self, answer: Answer) -> _Said:
        if answer.user is None:
            if answer.failure is not None:
                self._tell_failure(answer.failure)  # whoever hangs up now was told nothing more
                self._is_told = True
            self._become(
                AuthenticationState.BARE_EXCHANGE if self._is_bare else AuthenticationState.EXCHANGE
            )
            return _Said(answer.token)
        is_again = self.user is not None
        if is_again and answer.user != self.user:
            raise AuthenticationFailedError(
                "another principal than before",
                self.user,
                told="Cannot change principals during re-authentication from "
                f"User.{self.user}: User.{answer.user}",
            )
        is_own = self.is_of_this_cluster = answer.is_of_this_cluster
        if is_own and not self._authenticator.holds(answer.user, answer.credential):
            why = "the user was deleted, or its password changed, since the exchange began"
            raise AuthenticationFailedError(why, answer.user)
        lifetime_ms = self._lifetime_ms(answer)
        now_ms = self._authenticator.clock.monotonic_ms()
        self._expires_ms = None if lifetime_ms is None else now_ms + lifetime_ms
        self._exchange = None
        self._become(AuthenticationState.AUTHENTICATED)
        self._count(self._mechanism, "again" if is_again else "done")
        self._tell(AuditOutcome.OK, answer.user, None, is_again=is_again)
        if not is_again:
            self.user = answer.user
            connection = self._connection
            connection.caller = evolve(connection.caller, principal=f"User:{answer.user}")
            if not self._is_over:
                self._authenticator.began(self)
        return _Said(answer.token, lifetime_ms or 0)

    def _lifetime_ms(self, answer: Answer) -> int | None:
        settings, clock = self._authenticator.settings, self._authenticator.clock
        lifetimes = [settings.session_ms_max] if settings.session_ms_max else []
        if answer.expires_ms is not None:
            lifetimes.append(max(0, answer.expires_ms - int(clock.wall_ms())))
        return min(lifetimes, default=None)

    def _failed(self, error: AuthenticationFailedError) -> Promise[_Said]:
        if not self._is_told:
            self._tell_failure(error)
        kind = "authentication" if self.user is None else "re-authentication"
        told = error.told or (
            f"Authentication failed during {kind} due to invalid credentials with SASL mechanism "
            f"{self._mechanism}"
        )
        return self._later(_Said(failure=told))

    def _tell_failure(self, error: AuthenticationFailedError) -> None:
        self._count(self._mechanism, "failed")
        _log.warning(
            "authentication failed",
            peer=self.peer,
            mechanism=self._mechanism,
            user=error.user,
            why=error.reason,
        )
        is_again = self.user is not None
        self._tell(AuditOutcome.FAILED, error.user, error.reason, is_again=is_again)

    def _later(self, answer: Any) -> Promise[Any]:
        """An answer after the delay, with which the connection ends."""
        if self.state is not AuthenticationState.WORK:
            self._become(AuthenticationState.WORK)
        self._is_over = self.has_failed = True
        self._exchange = None
        promise: Promise[Any] = Promise()

        def answered() -> None:
            promise.resolve(answer)

        self._authenticator.deadlines.after(self._authenticator.settings.failure_delay_ms, answered)
        self._connection.finish()
        return promise

    def _tell(
        self,
        outcome: AuditOutcome,
        user: str | None,
        why: str | None,
        *,
        is_again: bool = False,
    ) -> None:
        """Tell the audit; `user` is None where nobody of that name is known."""
        caller = self._connection.caller
        principal = None if user is None else f"User:{user}"
        who = Who(principal, caller.host, caller.listener)
        mechanism = self._mechanism or "unknown"
        self._authenticator.audit.authentication(
            who, mechanism, outcome, why=why, is_again=is_again
        )

    def _count(self, mechanism: str, outcome: str) -> None:
        self._authenticator.counts.authentication(mechanism, outcome)


class _BadMechanism:
    """Of a client that wants to authenticate again by another mechanism."""

    def __init__(self, wanted: str, before: str) -> None:
        self._told = (
            f"SASL mechanism '{wanted}' requested by client is not supported for "
            f"re-authentication of mechanism '{before}'"
        )

    def step(self, _token: bytes) -> Step:
        """Fail."""
        raise AuthenticationFailedError("another mechanism than before", told=self._told)


def _bare(said: _Said) -> bytes | None:
    return said.token if said.failure is None else None


def _translated(said: _Said | Promise[_Said]) -> dict[str, Any] | Promise[dict[str, Any]]:
    return then(said, _read_said)


def _read_said(said: _Said) -> dict[str, Any]:
    if said.failure is not None:
        return _answer(ErrorCode.SASL_AUTHENTICATION_FAILED, said.failure)
    return _answer(ErrorCode.NONE, None, said.token, said.lifetime_ms)


def _answer(
    code: ErrorCode, message: str | None, token: bytes = b"", lifetime_ms: int = 0
) -> dict[str, Any]:
    return {
        "error_code": code,
        "error_message": message,
        "auth_bytes": token,
        "session_lifetime": lifetime_ms,
    }
