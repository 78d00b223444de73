"""Plans of what clients change of security: users' credentials, and rules of who may do what.

Pure, from the image and the request: the command, and the outcomes that the client is told. Of
users, by Kafka's rules, each succeeds or fails by itself; one that is named twice fails, and so
does one that would lose what it does not have. Of rules all of a request are created or none. A
filter is turned into the rules that it means here, so that all nodes delete the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import (
    AlterUsersCall,
    CreateAclsCall,
    DeleteAclsCall,
    Outcome,
    Outcomes,
    UserRequest,
)
from raftmq.metadata.commands import (
    RULES_PER_COMMAND_MAX,
    AlterUsers,
    AnyCommand,
    CreateAcls,
    DeleteAcls,
)
from raftmq.metadata.credentials import (
    SECRET_BYTES_MAX,
    USER_NAME_LENGTH_MAX,
    USERS_MAX,
    ScramDeletion,
    ScramUpsertion,
)
from raftmq.metadata.features import write_error
from raftmq.metadata.image import LEVEL_OF_SECURITY, MetadataImage
from raftmq.rights import Rule, rule_error
from raftmq.sasl.scram import ITERATIONS_MAX, ITERATIONS_MIN, SCRAM_BY_NUMBER

FILTERS_MAX: Final = 20
"""Of one call: each looks at every rule."""


# ---- users ----


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
                _check_user(image, change)
            if len(wanted) == USERS_MAX:
                reason = f"more than {USERS_MAX} users in one request"
                raise KafkaError(reason, code=ErrorCode.POLICY_VIOLATION)
        except KafkaError as error:
            rows.append(Outcome(name=user, code=error.code, message=error.message))
            continue
        wanted += changes
        rows.append(Outcome(name=user))
    return (_users_command(image, wanted, request.secret) if wanted else None), tuple(rows)


def _check_user(image: MetadataImage, change: UserRequest) -> None:
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


def _users_command(image: MetadataImage, wanted: list[UserRequest], secret: bytes) -> AlterUsers:
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


# ---- rules ----


def plan_rules(
    image: MetadataImage, request: CreateAclsCall | DeleteAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    """The command, None where nothing is to be changed, and what its result means."""
    if reason := write_error("rules of who may do what", LEVEL_OF_SECURITY, image):
        return _refused_rules(request, ErrorCode.UNSUPPORTED_VERSION, reason)
    if isinstance(request, CreateAclsCall):
        return _plan_creation(image, request)
    return _plan_deletion(image, request)


def _refused_rules(
    request: CreateAclsCall | DeleteAclsCall, code: ErrorCode, reason: str
) -> tuple[None, Callable[[Any], Outcomes]]:
    count = 1 if isinstance(request, CreateAclsCall) else len(request.filters)
    return None, lambda _result: (Outcome(name="", code=code, message=reason),) * count


def _plan_creation(
    image: MetadataImage, request: CreateAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    if reason := next(filter(None, map(rule_error, request.rules)), ""):
        return _refused_rules(request, ErrorCode.INVALID_REQUEST, reason)
    fresh = tuple(rule for rule in dict.fromkeys(request.rules) if rule not in image.rules)
    if len(fresh) > RULES_PER_COMMAND_MAX:
        reason = f"more than {RULES_PER_COMMAND_MAX} rules in one request"
        return _refused_rules(request, ErrorCode.POLICY_VIOLATION, reason)
    done = (Outcome(name=""),)
    return (CreateAcls(rules=fresh) if fresh else None), lambda _result: done


def _plan_deletion(
    image: MetadataImage, request: DeleteAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    if len(request.filters) > FILTERS_MAX:
        reason = f"more than {FILTERS_MAX} filters in one request"
        return _refused_rules(request, ErrorCode.POLICY_VIOLATION, reason)
    gone: dict[Rule, None] = {}
    rows = []
    for one in request.filters:
        met = tuple(image.rules.met_by(one))
        if len(gone) + len(met) > RULES_PER_COMMAND_MAX:
            reason = f"this would delete more than {RULES_PER_COMMAND_MAX} rules at once"
            rows.append(Outcome(name="", code=ErrorCode.POLICY_VIOLATION, message=reason))
            continue
        gone.update(dict.fromkeys(met))
        rows.append(Outcome(name="", rules=met))
    told = tuple(rows)
    return (DeleteAcls(rules=tuple(gone)) if gone else None), lambda _result: told
