"""Plans of the rules of who may do what: a command for a client's request, and its outcomes.

Pure, from the image and the request. A filter is turned into the rules that it means here, so that
all nodes delete the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from raftmq.errors import ErrorCode
from raftmq.metadata.broker_messages import CreateAclsCall, DeleteAclsCall, Outcome, Outcomes
from raftmq.metadata.commands import RULES_PER_COMMAND_MAX, AnyCommand, CreateAcls, DeleteAcls
from raftmq.metadata.features import write_error
from raftmq.metadata.image import LEVEL_OF_SECURITY, MetadataImage
from raftmq.rights import Rule, rule_error

FILTERS_MAX: Final = 20
"""Of one call: each looks at every rule."""


def plan_rules(
    image: MetadataImage, request: CreateAclsCall | DeleteAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    """The command, None where nothing is to be changed, and what its result means."""
    if reason := write_error("rules of who may do what", LEVEL_OF_SECURITY, image):
        return _refused(request, ErrorCode.UNSUPPORTED_VERSION, reason)
    if isinstance(request, CreateAclsCall):
        return _plan_creation(image, request)
    return _plan_deletion(image, request)


def _refused(
    request: CreateAclsCall | DeleteAclsCall, code: ErrorCode, reason: str
) -> tuple[None, Callable[[Any], Outcomes]]:
    count = 1 if isinstance(request, CreateAclsCall) else len(request.filters)
    return None, lambda _result: (Outcome(name="", code=code, message=reason),) * count


def _plan_creation(
    image: MetadataImage, request: CreateAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    if reason := next(filter(None, map(rule_error, request.rules)), ""):
        return _refused(request, ErrorCode.INVALID_REQUEST, reason)
    fresh = tuple(rule for rule in dict.fromkeys(request.rules) if rule not in image.rules)
    if len(fresh) > RULES_PER_COMMAND_MAX:
        reason = f"more than {RULES_PER_COMMAND_MAX} rules in one request"
        return _refused(request, ErrorCode.POLICY_VIOLATION, reason)
    done = (Outcome(name=""),)
    return (CreateAcls(rules=fresh) if fresh else None), lambda _result: done


def _plan_deletion(
    image: MetadataImage, request: DeleteAclsCall
) -> tuple[AnyCommand | None, Callable[[Any], Outcomes]]:
    if len(request.filters) > FILTERS_MAX:
        reason = f"more than {FILTERS_MAX} filters in one request"
        return _refused(request, ErrorCode.POLICY_VIOLATION, reason)
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
