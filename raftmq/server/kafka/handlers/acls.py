"""CreateAcls, DescribeAcls, DeleteAcls: Kafka's shapes of the rules of who may do what.

On the wire kinds, patterns, operations and permissions are numbers; behind this module they are
words. The controller decides, and answers once every live broker knows of the change, so that what
was denied here is denied everywhere. While the authorizer is off all three answer
SECURITY_DISABLED, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, TypeAlias, TypeVar

from msgspec.structs import replace

from raftmq.controller.security import FILTERS_MAX
from raftmq.errors import ErrorCode, KafkaError
from raftmq.metadata.broker_messages import CreateAclsCall, DeleteAclsCall, Outcome
from raftmq.metadata.commands import RULES_PER_COMMAND_MAX
from raftmq.promise import Promise
from raftmq.protocol import Struct
from raftmq.rights import (
    CODE_ANY,
    CODE_MATCH,
    KIND_CODES,
    OPERATION_CODES,
    PATTERN_CODES,
    PERMISSION_CODES,
    Rule,
    RuleFilter,
    rule_error,
)
from raftmq.server.kafka.broker import Broker
from raftmq.server.kafka.request_context import RequestContext
from raftmq.server.kafka.work import Work, all_of, in_turns, value_of

Answer: TypeAlias = dict[str, Any]
Outcomes: TypeAlias = tuple[Outcome, ...]
W = TypeVar("W", bound=StrEnum)

RULES_PER_TURN: Final = 256
TIMEOUT_MS: Final = 5_000
_OFF: Final = 'no authorizer is configured: `authorizer = "acl"` in the configuration of the node'
_OF_KIND: Final = {code: word for word, code in KIND_CODES.items()}
_OF_PATTERN: Final = {code: word for word, code in PATTERN_CODES.items()}
_OF_OPERATION: Final = {code: word for word, code in OPERATION_CODES.items()}
_OF_PERMISSION: Final = {code: word for word, code in PERMISSION_CODES.items()}


def describe(broker: Broker, _context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DescribeAcls."""
    if broker.authorizer is None:
        return _undescribed(ErrorCode.SECURITY_DISABLED, _OFF)
    try:
        wanted = _filter(request)
    except KafkaError as error:
        return _undescribed(error.code, error.message)
    resources: dict[tuple[Any, ...], list[Answer]] = {}
    tables = broker.image.rules.tables
    principals = sorted(tables) if wanted.principal is None else [wanted.principal]
    count = 0
    for principal in principals:
        for rule in broker.image.rules.met_by(replace(wanted, principal=principal)):
            count += 1
            if count % RULES_PER_TURN == 0:
                yield None
            key = rule.kind, rule.name, rule.pattern
            resources.setdefault(key, []).append(
                {
                    "principal": rule.principal,
                    "host": rule.host,
                    "operation": OPERATION_CODES[rule.operation],
                    "permission_type": PERMISSION_CODES[rule.permission],
                }
            )
        yield None
    rows = [
        {
            "resource_type": KIND_CODES[kind],
            "resource_name": name,
            "pattern_type": PATTERN_CODES[pattern],
            "acls": resources[kind, name, pattern],
        }
        for kind, name, pattern in resources
    ]
    return {"throttle_time": 0, "error_code": 0, "error_message": None, "resources": rows}


def _undescribed(code: ErrorCode, message: str) -> Answer:
    return {"throttle_time": 0, "error_code": code, "error_message": message, "resources": []}


def create(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer CreateAcls: rules that read as none can are refused one by one, the others are
    created all or none."""
    rows: list[Answer] = []
    rules: dict[int, Rule] = {}
    for place, one in enumerate(request.creations):
        if place % RULES_PER_TURN == RULES_PER_TURN - 1:
            yield None
        code, message = ErrorCode.NONE, None
        if broker.authorizer is None:
            code, message = ErrorCode.SECURITY_DISABLED, _OFF
        elif len(rules) >= RULES_PER_COMMAND_MAX:
            code, message = ErrorCode.POLICY_VIOLATION, "too many rules in one request"
        else:
            try:
                rules[place] = _rule(one)
            except KafkaError as error:
                code, message = error.code, error.message
        rows.append({"error_code": code, "error_message": message})
    if rules:
        call = CreateAclsCall(rules=tuple(rules.values()), timeout_ms=TIMEOUT_MS)
        (outcome,) = yield from value_of(broker.outcomes(call, context.who, _refused))
        told = {"error_code": outcome.code, "error_message": outcome.message}
        for place in rules:
            rows[place] = told
    return {"throttle_time": 0, "results": rows}


def delete(broker: Broker, context: RequestContext, request: Struct) -> Work[Answer]:
    """Answer DeleteAcls: what each filter met."""
    promises: list[Outcomes | Promise[Outcomes]] = []
    for place, one in enumerate(request.filters):
        if broker.authorizer is None:
            promises.append(_refused(ErrorCode.SECURITY_DISABLED, _OFF))
        elif place >= FILTERS_MAX:
            promises.append(
                _refused(ErrorCode.POLICY_VIOLATION, f"more than {FILTERS_MAX} filters")
            )
        else:
            try:
                call = DeleteAclsCall(filters=(_filter(one),), timeout_ms=TIMEOUT_MS)
            except KafkaError as error:
                promises.append(_refused(error.code, error.message))
            else:
                promises.append(broker.outcomes(call, context.who, _refused))
        if place % RULES_PER_TURN == RULES_PER_TURN - 1 or not isinstance(promises[-1], tuple):
            yield None
    results = []
    for (outcome,) in (yield from all_of(promises)):
        rows = yield from in_turns(outcome.rules, _matching_row, RULES_PER_TURN)
        results.append(
            {
                "error_code": outcome.code,
                "error_message": outcome.message,
                "matching_acls": rows,
            }
        )
    return {"throttle_time": 0, "filter_results": results}


def _matching_row(rule: Rule) -> Answer:
    return {
        "error_code": 0,
        "error_message": None,
        "resource_type": KIND_CODES[rule.kind],
        "resource_name": rule.name,
        "pattern_type": PATTERN_CODES[rule.pattern],
        "principal": rule.principal,
        "host": rule.host,
        "operation": OPERATION_CODES[rule.operation],
        "permission_type": PERMISSION_CODES[rule.permission],
    }


def _refused(code: ErrorCode, message: str) -> Outcomes:
    return (Outcome(name="", code=code, message=message),)


def _rule(one: Struct) -> Rule:
    """A rule as a request spells it.

    Raises:
        KafkaError: INVALID_REQUEST, since no rule can read so.
    """
    rule = Rule(
        _word(_OF_KIND, one.resource_type, "resource type"),
        _word(_OF_PATTERN, one.resource_pattern_type, "pattern type"),
        one.resource_name,
        one.principal,
        one.host,
        _word(_OF_OPERATION, one.operation, "operation"),
        _word(_OF_PERMISSION, one.permission_type, "permission type"),
    )
    if reason := rule_error(rule):
        raise KafkaError(reason, code=ErrorCode.INVALID_REQUEST)
    return rule


def _filter(one: Struct) -> RuleFilter:
    """A filter as a request spells it.

    Raises:
        KafkaError: INVALID_REQUEST, since no filter can read so.
    """
    pattern = one.pattern_type_filter
    is_match = pattern == CODE_MATCH
    return RuleFilter(
        _any_or(_OF_KIND, one.resource_type_filter, "resource type"),
        None if is_match else _any_or(_OF_PATTERN, pattern, "pattern type"),
        one.resource_name_filter,
        one.principal_filter,
        one.host_filter,
        _any_or(_OF_OPERATION, one.operation, "operation"),
        _any_or(_OF_PERMISSION, one.permission_type, "permission type"),
        is_match,
    )


def _any_or(words: Mapping[int, W], code: int, what: str) -> W | None:
    return None if code == CODE_ANY else _word(words, code, what)


def _word(words: Mapping[int, W], code: int, what: str) -> W:
    if code not in words:
        raise KafkaError(f"there is no {what} {code} here", code=ErrorCode.INVALID_REQUEST)
    return words[code]
