"""Plans of changes of users' credentials: the command for a client's request, and its outcomes.

Pure, from the image and the request, by Kafka's rules: each user succeeds or fails by itself, one
that is named twice fails, and so does one that would lose what it does not have.
"""

from __future__ import annotations

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import AlterUsersCall, Outcome, Outcomes, UserRequest
from raftmq.metadata.commands import AlterUsers
from raftmq.metadata.credentials import (
    SECRET_BYTES_MAX,
    USER_NAME_LENGTH_MAX,
    USERS_MAX,
    ScramDeletion,
    ScramUpsertion,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import LEVEL_OF_SECURITY, MetadataImage
from raftmq.sasl.scram import ITERATIONS_MAX, ITERATIONS_MIN, SCRAM_BY_NUMBER


def plan_users(image: MetadataImage, request: AlterUsersCall) -> tuple[AlterUsers | None, Outcomes]:
    """The command, None where nothing is to be changed, and the outcome of each user."""
    if request.is_first and image.users.secret:
        return None, tuple(Outcome(name=one.user) for one in request.users)
    by_user: dict[str, list[UserRequest]] = {}
    for one in request.users:
        by_user.setdefault(one.user, []).append(one)
    wanted: list[UserRequest] = []
    rows = []
    for user, changes in by_user.items():
        try:
            if len(changes) > 1 and not request.is_first:
                raise KafkaError(
                    "A user credential cannot be altered twice in the same request",
                    code=ErrorCode.DUPLICATE_RESOURCE,
                )
            for change in changes:
                _check(image, change)
            if len(wanted) == USERS_MAX:
                reason = f"more than {USERS_MAX} users in one request"
                raise KafkaError(reason, code=ErrorCode.POLICY_VIOLATION)
        except KafkaError as error:
            rows.append(Outcome(name=user, code=error.code, message=error.message))
            continue
        wanted += changes
        rows.append(Outcome(name=user))
    return (_command(image, wanted, request.secret) if wanted else None), tuple(rows)


def _check(image: MetadataImage, change: UserRequest) -> None:
    """Refuse a change that cannot be made.

    Raises:
        KafkaError: as Kafka refuses it.
    """
    if reason := write_error("a user", LEVEL_OF_SECURITY, image):
        raise KafkaError(reason, code=ErrorCode.UNSUPPORTED_VERSION)
    if not change.user:
        raise _unacceptable("Username must not be empty")
    if len(change.user) > USER_NAME_LENGTH_MAX:
        raise _unacceptable(f"Username must not be longer than {USER_NAME_LENGTH_MAX}")
    mechanism = SCRAM_BY_NUMBER.get(change.mechanism)
    if mechanism is None:
        raise KafkaError("Unknown SCRAM mechanism", code=ErrorCode.UNSUPPORTED_SASL_MECHANISM)
    if change.is_deleted:
        if image.users.get(change.user, change.mechanism) is None:
            raise KafkaError(
                "Attempt to delete a user credential that does not exist",
                code=ErrorCode.RESOURCE_NOT_FOUND,
            )
        return
    if change.iterations < ITERATIONS_MIN:
        raise _unacceptable("Too few iterations")
    if change.iterations > ITERATIONS_MAX:
        raise _unacceptable("Too many iterations")
    if not 0 < len(change.salt) <= SECRET_BYTES_MAX:
        raise _unacceptable(f"A salt has 1 to {SECRET_BYTES_MAX} bytes")
    if not len(change.stored_key) == len(change.server_key) == mechanism.size:
        raise _unacceptable(f"A salted password has {mechanism.size} bytes")


def _unacceptable(reason: str) -> KafkaError:
    return KafkaError(reason, code=ErrorCode.UNACCEPTABLE_CREDENTIAL)


def _command(image: MetadataImage, wanted: list[UserRequest], secret: bytes) -> AlterUsers:
    return AlterUsers(
        deletions=tuple(
            ScramDeletion(user=one.user, mechanism=one.mechanism)
            for one in wanted
            if one.is_deleted
        ),
        upsertions=tuple(
            ScramUpsertion(
                user=one.user,
                mechanism=one.mechanism,
                iterations=one.iterations,
                scram_salt=one.salt,
                scram_stored_key=one.stored_key,
                scram_server_key=one.server_key,
            )
            for one in wanted
            if not one.is_deleted
        ),
        scram_secret=b"" if image.users.secret else secret[:SECRET_BYTES_MAX],
    )
