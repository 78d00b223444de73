"""Who may do what: rules of Kafka's shape (ACLs), and the verdict on one caller and one resource.

A rule allows or denies an operation to a principal, from a host, on a resource that it names
literally, by a prefix, or as `*`. Nothing is allowed that no rule allows; a rule that denies goes
before all that allow; super users may do everything. Some operations imply others where they are
allowed, none where they are denied, as in Kafka: whoever may Read may Describe, but to be denied
Describe is not to be denied Read.

`Rules` is the set of all of them as an immutable value, by principal and by pattern, so that
another rule costs no more where there are ten thousand. A verdict is a mask with a bit of each
operation (`BIT`), which a `Rights` keeps for each resource until the rules are others.

Owns the vocabulary, the verdicts and their reasons (`explain`). Never reads requests, and knows
nothing of how a caller proved who it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from ipaddress import IPv4Network as _IPv4Network
from typing import Annotated, Final, TypeAlias

import msgspec
from attrs import evolve, frozen
from immutables import Map

from raftmq.types import METADATA_TOPIC

NAME_LENGTH_MAX: Final = 1_000
"""Of a resource in a rule, and of a principal. Longer transactional ids and groups are only named
by prefixes."""
HOST_LENGTH_MAX: Final = 64
CALLERS_MAX: Final = 10_000
MASKS_MAX: Final = 100_000
"""Callers, and verdicts on one caller's resources, that are kept; beyond it all are made anew."""
ANY_NAME: Final = "*"
ANY_HOST: Final = "*"
EVERYBODY: Final = "User:*"
CLUSTER_NAME: Final = "kafka-cluster"
"""The only resource of the kind cluster."""

_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
_Host: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=HOST_LENGTH_MAX)]


class Kind(StrEnum):
    """Kinds of resources."""

    TOPIC = "topic"
    GROUP = "group"
    CLUSTER = "cluster"
    TRANSACTIONAL_ID = "transactional-id"
    USER = "user"


class Pattern(StrEnum):
    """How a rule names its resource."""

    LITERAL = "literal"
    PREFIXED = "prefixed"


class Operation(StrEnum):
    """What a caller does with a resource."""

    ALL = "all"
    READ = "read"
    WRITE = "write"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    DESCRIBE = "describe"
    CLUSTER_ACTION = "cluster-action"
    DESCRIBE_CONFIGS = "describe-configs"
    ALTER_CONFIGS = "alter-configs"
    IDEMPOTENT_WRITE = "idempotent-write"
    CREATE_TOKENS = "create-tokens"
    DESCRIBE_TOKENS = "describe-tokens"
    TWO_PHASE_COMMIT = "two-phase-commit"


class Permission(StrEnum):
    """What a rule does."""

    DENY = "deny"
    ALLOW = "allow"


KIND_CODES: Final = {
    Kind.TOPIC: 2,
    Kind.GROUP: 3,
    Kind.CLUSTER: 4,
    Kind.TRANSACTIONAL_ID: 5,
    Kind.USER: 7,
}
PATTERN_CODES: Final = {Pattern.LITERAL: 3, Pattern.PREFIXED: 4}
OPERATION_CODES: Final = {operation: code for code, operation in enumerate(Operation, 2)}
PERMISSION_CODES: Final = {Permission.DENY: 2, Permission.ALLOW: 3}
"""Kafka's numbers on the wire; in what is stored and shown there are words."""
CODE_ANY: Final = 1
CODE_MATCH: Final = 2
"""Of a pattern in a filter: whatever applies to a resource of that name."""

BIT: Final = {operation: 1 << code for operation, code in OPERATION_CODES.items()}
"""Of each operation in a mask; Kafka's authorized operations are the same numbers."""
EVERYTHING: Final = sum(BIT.values())
_IMPLIED: Final = {
    Operation.DESCRIBE: (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER),
    Operation.DESCRIBE_CONFIGS: (Operation.ALTER_CONFIGS,),
}
"""By each operation, those that imply it where they are allowed."""
_ALLOWED: Final = {
    operation: EVERYTHING
    if operation is Operation.ALL
    else bit | sum(BIT[one] for one, by in _IMPLIED.items() if operation in by)
    for operation, bit in BIT.items()
}
_DENIED: Final = {**BIT, Operation.ALL: EVERYTHING}


class Rule(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, order=True):
    """One rule."""

    kind: Kind
    pattern: Pattern
    name: _Name
    principal: _Name
    host: _Host
    operation: Operation
    permission: Permission

    def covers(self, name: str) -> bool:
        """True when its pattern fits a resource of that name."""
        if self.pattern is Pattern.PREFIXED:
            return name.startswith(self.name)
        return self.name in (name, ANY_NAME)

    def __str__(self) -> str:
        pattern = "" if self.pattern is Pattern.LITERAL else f"{self.pattern} "
        return (
            f"{self.permission} {self.operation} on {self.kind} {pattern}{self.name!r} "
            f"to {self.principal} from {self.host}"
        )


def rule_error(rule: Rule) -> str:
    """Say why no rule may read so; "" when it may."""
    kind, colon, name = rule.principal.partition(":")
    if not (kind and colon and name):
        return f"{rule.principal!r} is no principal, such as User:alice"
    if rule.kind is Kind.CLUSTER and rule.name != CLUSTER_NAME:
        return f"the only resource of the kind cluster is {CLUSTER_NAME}"
    if not 1 <= len(rule.name) <= NAME_LENGTH_MAX:
        return f"a resource has a name of 1 to {NAME_LENGTH_MAX} characters"
    if len(rule.principal) > NAME_LENGTH_MAX:
        return f"a principal has at most {NAME_LENGTH_MAX} characters"
    if rule.host != ANY_HOST and _network(rule.host) is None:
        return f"{rule.host!r} is neither *, nor an address, nor a network such as 10.0.0.0/8"
    return ""


# ---- hosts ----

_Network: TypeAlias = _IPv4Network | IPv6Network


@lru_cache(maxsize=4096)
def _network(text: str) -> _Network | None:
    """The addresses that a rule's host names; None when it names none."""
    if len(text) > HOST_LENGTH_MAX:
        return None
    try:
        return ip_network(text, strict=False)
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def address_of(text: str) -> IPv4Address | IPv6Address | None:
    """An address as rules and limits compare it, without a zone; None for any other text.

    A client of IPv4 looks like ::ffff:10.0.0.7 to a socket for both, and is 10.0.0.7.
    """
    try:
        address = ip_address(text.strip("[]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def is_from(pattern: str, host: str) -> bool:
    """True when a rule's host covers the address of a caller."""
    if pattern in (ANY_HOST, host):
        return True
    network, address = _network(pattern), address_of(host)
    return network is not None and address is not None and address in network


# ---- the set of all rules ----

PatternKey: TypeAlias = tuple[Kind, Pattern, str]
Table: TypeAlias = Map[PatternKey, tuple[Rule, ...]]
"""One principal's rules, by pattern."""
_NO_TABLE: Final[Table] = Map()


@frozen(slots=True)
class Rules:
    """All rules, by principal."""

    tables: Map[str, Table] = Map()
    count: int = 0

    def __contains__(self, rule: Rule) -> bool:
        return rule in self.tables.get(rule.principal, _NO_TABLE).get(_key(rule), ())

    def __iter__(self) -> Iterator[Rule]:
        """All of them, in a fixed order: a Map's own differs from process to process."""
        for principal in sorted(self.tables):
            yield from sorted_rules(self.tables[principal])

    def with_rules(self, rules: Iterable[Rule]) -> Rules:
        """The same and these."""
        tables, count = self.tables, self.count
        for rule in rules:
            table = tables.get(rule.principal, _NO_TABLE)
            known = table.get(_key(rule), ())
            if rule not in known:
                count += 1
                fresh = tuple(sorted((*known, rule)))  # equal sets are equal values
                tables = tables.set(rule.principal, table.set(_key(rule), fresh))
        return self if count == self.count else evolve(self, tables=tables, count=count)

    def without_rules(self, rules: Iterable[Rule]) -> Rules:
        """The same less these."""
        tables, count = self.tables, self.count
        for rule in rules:
            table = tables.get(rule.principal, _NO_TABLE)
            known = table.get(_key(rule), ())
            if rule not in known:
                continue
            count -= 1
            left = tuple(one for one in known if one != rule)
            table = table.set(_key(rule), left) if left else table.delete(_key(rule))
            tables = tables.set(rule.principal, table) if table else tables.delete(rule.principal)
        return self if count == self.count else evolve(self, tables=tables, count=count)

    def met_by(self, wanted: RuleFilter) -> list[Rule]:
        """Those that a filter means, in a fixed order."""
        tables: Iterable[Table] = self.tables.values()
        if wanted.principal is not None:
            tables = (self.tables.get(wanted.principal, _NO_TABLE),)
        met = (r for table in tables for rules in table.values() for r in rules if wanted.fits(r))
        return sorted(met)

    def about(self, principal: str, kind: Kind, name: str) -> Iterator[Rule]:
        """The rules for a principal and for everybody that cover a resource, in no order."""
        for one in dict.fromkeys((principal, EVERYBODY)):
            table = self.tables.get(one)
            if table is None:
                continue
            yield from table.get((kind, Pattern.LITERAL, name), ())
            if name != ANY_NAME:
                yield from table.get((kind, Pattern.LITERAL, ANY_NAME), ())
            if len(table) < len(name):
                for key, rules in table.items():
                    if key[0] is kind and key[1] is Pattern.PREFIXED and name.startswith(key[2]):
                        yield from rules
                continue
            for end in range(1, min(len(name), NAME_LENGTH_MAX) + 1):
                yield from table.get((kind, Pattern.PREFIXED, name[:end]), ())

    def of(self, principal: str, kind: Kind) -> Iterator[Rule]:
        """All rules for a principal and for everybody on a kind of resource, in no order."""
        for one in dict.fromkeys((principal, EVERYBODY)):
            for key, rules in self.tables.get(one, _NO_TABLE).items():
                if key[0] is kind:
                    yield from rules


NO_RULES: Final = Rules()


def sorted_rules(table: Table) -> list[Rule]:
    """One principal's rules in a fixed order."""
    return sorted(rule for rules in table.values() for rule in rules)


def _key(rule: Rule) -> PatternKey:
    return rule.kind, rule.pattern, rule.name


class RuleFilter(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Which rules are meant; None is any. `is_match`: those that apply to the resource `name`, by
    whichever pattern."""

    kind: Kind | None = None
    pattern: Pattern | None = None
    name: str | None = None
    principal: str | None = None
    host: str | None = None
    operation: Operation | None = None
    permission: Permission | None = None
    is_match: bool = False

    def fits(self, rule: Rule) -> bool:
        """True when that rule is one of them."""
        return (
            self.kind in (None, rule.kind)
            and self.pattern in (None, rule.pattern)
            and self.principal in (None, rule.principal)
            and self.host in (None, rule.host)
            and self.operation in (None, rule.operation)
            and self.permission in (None, rule.permission)
            and (
                self.name is None
                or (rule.covers(self.name) if self.is_match else self.name == rule.name)
            )
        )


# ---- verdicts ----


@frozen(slots=True)
class Verdict:
    """Whether something is allowed, and the rule that decides; None where a super user asks, the
    resource is for super users alone, or no rule allows it."""

    is_allowed: bool
    why: str
    rule: Rule | None = None


def explain(
    rules: Rules,
    super_users: frozenset[str],
    principal: str,
    host: str | None,
    kind: Kind,
    name: str,
    operation: Operation,
) -> Verdict:
    """The verdict, with its reason.

    Args:
        host: where the caller is; None: anywhere, so rules for some hosts only do not count where
            they allow, and do where they deny.
    """
    if principal in super_users:
        return Verdict(True, f"{principal} is a super user")
    if kind is Kind.TOPIC and name == METADATA_TOPIC:
        return Verdict(False, f"{METADATA_TOPIC} is for super users alone")
    found = sorted(rules.about(principal, kind, name))
    bit = BIT[operation]
    for rule in found:
        is_here = True if host is None else is_from(rule.host, host)
        if rule.permission is Permission.DENY and _DENIED[rule.operation] & bit and is_here:
            return Verdict(False, f"a rule denies it: {rule}", rule)
    for rule in found:
        is_here = rule.host == ANY_HOST if host is None else is_from(rule.host, host)
        if rule.permission is Permission.ALLOW and _ALLOWED[rule.operation] & bit and is_here:
            return Verdict(True, f"a rule allows it: {rule}", rule)
    return Verdict(False, "no rule allows it")


class Rights:
    """Those of one principal at one address: the verdicts on it."""

    __slots__ = ("_authorizer", "_masks", "_rules", "_somewhere", "host", "is_super", "principal")

    def __init__(self, authorizer: Authorizer, principal: str, host: str) -> None:
        self.principal = principal
        self.host = host
        self.is_super = principal in authorizer.super_users
        self._authorizer = authorizer
        self._rules: Rules | None = None
        self._masks: dict[tuple[Kind, str], int] = {}
        self._somewhere: dict[tuple[Kind, Operation], bool] = {}

    def mask(self, kind: Kind, name: str) -> int:
        """The operations that are allowed on a resource, by `BIT`."""
        rules = self._authorizer.rules()
        if rules is not self._rules:
            self._forget(rules)
        found = self._masks.get((kind, name))
        if found is None:
            if len(self._masks) >= MASKS_MAX:
                self._masks.clear()
            found = self._masks[kind, name] = self._judge(rules, kind, name)
        return found

    def may(self, operation: Operation, kind: Kind, name: str) -> bool:
        """True when that is allowed."""
        return bool(self.mask(kind, name) & BIT[operation])

    def may_somewhere(self, operation: Operation, kind: Kind) -> bool:
        """True when that is allowed on any resource of a kind, whether or not there is one of it
        (KIP-679)."""
        rules = self._authorizer.rules()
        if rules is not self._rules:
            self._forget(rules)
        found = self._somewhere.get((kind, operation))
        if found is None:
            found = self.is_super or self._is_allowed_somewhere(rules, operation, kind)
            self._somewhere[kind, operation] = found
        return found

    def _forget(self, rules: Rules) -> None:
        self._rules = rules
        self._masks = {}
        self._somewhere = {}

    def _judge(self, rules: Rules, kind: Kind, name: str) -> int:
        if self.is_super:
            return EVERYTHING
        if kind is Kind.TOPIC and name == METADATA_TOPIC:
            return 0
        allowed = denied = 0
        for rule in rules.about(self.principal, kind, name):
            if not is_from(rule.host, self.host):
                continue
            if rule.permission is Permission.DENY:
                denied |= _DENIED[rule.operation]
            else:
                allowed |= _ALLOWED[rule.operation]
        return allowed & ~denied

    def _is_allowed_somewhere(self, rules: Rules, operation: Operation, kind: Kind) -> bool:
        bit = BIT[operation]
        allowed: list[Rule] = []
        literals: dict[str, None] = {METADATA_TOPIC: None} if kind is Kind.TOPIC else {}
        prefixes: dict[str, None] = {}
        for rule in rules.of(self.principal, kind):
            if not is_from(rule.host, self.host):
                continue
            if rule.permission is Permission.ALLOW:
                if _ALLOWED[rule.operation] & bit:
                    allowed.append(rule)
            elif _DENIED[rule.operation] & bit:
                names = prefixes if rule.pattern is Pattern.PREFIXED else literals
                names[rule.name] = None
        if ANY_NAME in literals:
            return False
        lengths = sorted({len(prefix) for prefix in prefixes})
        for rule in allowed:
            is_literal = rule.pattern is Pattern.LITERAL
            if is_literal and rule.name == ANY_NAME:
                return True
            if is_literal and rule.name in literals:
                continue
            if not any(rule.name[:length] in prefixes for length in lengths):
                return True
        return False


class Authorizer:
    """The verdicts of one node."""

    def __init__(self, rules: Callable[[], Rules], super_users: Iterable[str]) -> None:
        """`rules` gives those that are in force now."""
        self.rules = rules
        self.super_users = frozenset(super_users)
        self._callers: dict[tuple[str, str], Rights] = {}

    def rights_of(self, principal: str, host: str) -> Rights:
        """The rights of a principal at an address."""
        key = principal, host
        found = self._callers.get(key)
        if found is None:
            if len(self._callers) >= CALLERS_MAX:
                self._callers.clear()
            found = self._callers[key] = Rights(self, *key)
        return found
