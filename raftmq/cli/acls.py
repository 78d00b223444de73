"""`raftmq acl ...`: rules of who may do what, in the words of kafka-acls.sh.

A rule allows or denies operations on resources to principals from hosts; `create` makes one of each
combination. `why` judges as brokers do, from the rules as they are now, and names the one that
decides; who is a super user stands in the configuration of the nodes, which it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final, TypeVar

import typer

from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    open_admin,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import EXIT_FAILED, EXIT_USAGE, out
from raftmq.foreign import visible
from raftmq.rights import (
    ANY_HOST,
    CLUSTER_NAME,
    NO_RULES,
    Kind,
    Operation,
    Pattern,
    Permission,
    Rule,
    RuleFilter,
    explain,
    rule_error,
)

acl_app = typer.Typer(help="Rules of who may do what (ACLs).", no_args_is_help=True)

W = TypeVar("W", bound=StrEnum)
Words = list[str] | None
COLUMNS: Final = ("PERMISSION", "PRINCIPAL", "HOST", "OPERATION", "RESOURCE", "PATTERN", "NAME")
PRODUCER: Final = (Operation.WRITE, Operation.DESCRIBE, Operation.CREATE)
CONSUMER: Final = (Operation.READ, Operation.DESCRIBE)
TRANSACTIONAL: Final = (Operation.WRITE, Operation.DESCRIBE)

Topics = Annotated[Words, typer.Option("--topic", metavar="NAME", help="A topic; repeatable.")]
Groups = Annotated[Words, typer.Option("--group", metavar="NAME", help="A group; repeatable.")]
Cluster = Annotated[bool, typer.Option("--cluster", help="The cluster.")]
Ids = Annotated[
    Words,
    typer.Option("--transactional-id", metavar="ID", help="A transactional id; repeatable."),
]
Users = Annotated[Words, typer.Option("--user-principal", metavar="NAME", help="A user.")]
Type = Annotated[
    str,
    typer.Option(
        "--resource-pattern-type",
        metavar="TYPE",
        help="How names are meant: literal (* is all of them) or prefixed.",
    ),
]
FilterType = Annotated[
    str | None,
    typer.Option(
        "--resource-pattern-type",
        metavar="TYPE",
        help="literal, prefixed, or match: whatever applies to that name.",
    ),
]
Operations = Annotated[
    Words,
    typer.Option("--operation", metavar="WORD", help=f"Repeatable: {', '.join(Operation)}."),
]


def _word(words: type[W], text: str, option: str) -> W:
    """One of the words, also as Kafka writes it: DescribeConfigs, DESCRIBE_CONFIGS."""
    plain = text.replace("-", "").replace("_", "").lower()
    for word in words:
        if word.replace("-", "") == plain:
            return word
    raise CommandError(f"{option}: {text!r} is none of {', '.join(words)}", EXIT_USAGE)


def _named(
    topics: Words, groups: Words, ids: Words, users: Words, cluster: bool
) -> list[tuple[Kind, str]]:
    """The resources that options name."""
    rows = [
        (kind, name)
        for kind, names in (
            (Kind.TOPIC, topics),
            (Kind.GROUP, groups),
            (Kind.TRANSACTIONAL_ID, ids),
            (Kind.USER, users),
        )
        for name in names or ()
    ]
    return [*rows, (Kind.CLUSTER, CLUSTER_NAME)] if cluster else rows


def _row(rule: Rule) -> tuple[str, ...]:
    return (
        rule.permission,
        rule.principal,
        rule.host,
        rule.operation,
        rule.kind,
        rule.pattern,
        rule.name,
    )


# ---- create ----


@acl_app.command()
def create(
    allow_principal: Annotated[
        Words, typer.Option("--allow-principal", metavar="User:NAME", help="Who may; repeatable.")
    ] = None,
    deny_principal: Annotated[
        Words, typer.Option("--deny-principal", metavar="User:NAME", help="Who may not.")
    ] = None,
    allow_host: Annotated[
        Words, typer.Option("--allow-host", metavar="HOST", help="From where: address or network.")
    ] = None,
    deny_host: Annotated[
        Words, typer.Option("--deny-host", metavar="HOST", help="From where not.")
    ] = None,
    operation: Operations = None,
    topic: Topics = None,
    group: Groups = None,
    cluster: Cluster = False,
    transactional_id: Ids = None,
    user_principal: Users = None,
    pattern_type: Type = Pattern.LITERAL,
    producer: Annotated[
        bool, typer.Option("--producer", help="What a producer to --topic needs.")
    ] = False,
    consumer: Annotated[
        bool, typer.Option("--consumer", help="What a consumer of --topic in --group needs.")
    ] = False,
    idempotent: Annotated[
        bool, typer.Option("--idempotent", help="With --producer: the cluster's IdempotentWrite.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Create rules; those that are there already stay.

    Examples: raftmq acl create --allow-principal User:alice --consumer --topic orders --group
    billing; raftmq acl create --deny-principal 'User:*' --operation delete --topic orders
    """
    with reported():
        pattern = _word(Pattern, pattern_type, "--resource-pattern-type")
        named = _named(topic, group, transactional_id, user_principal, cluster)
        needs = _needs(named, operation, producer, consumer, idempotent)
        whom = _whom(allow_principal, allow_host, Permission.ALLOW)
        whom += _whom(deny_principal, deny_host, Permission.DENY)
        rules = _rules(needs, whom, pattern)
        with open_admin(bootstrap, timeout) as admin:
            admin.create_acls(rules)
        show(COLUMNS, [_row(rule) for rule in rules], as_json=as_json)


def _whom(
    principals: Words, hosts: Words, permission: Permission
) -> list[tuple[str, str, Permission]]:
    return [(one, host, permission) for one in principals or () for host in hosts or (ANY_HOST,)]


def _needs(
    named: Sequence[tuple[Kind, str]],
    operations: Words,
    producer: bool,
    consumer: bool,
    idempotent: bool,
) -> list[tuple[Kind, str, Operation]]:
    if producer or consumer:
        if operations:
            raise CommandError("--operation goes without --producer and --consumer", EXIT_USAGE)
        return _conveniences(named, producer, consumer, idempotent)
    words = [_word(Operation, one, "--operation") for one in operations or ["all"]]
    return [(kind, name, word) for kind, name in named for word in words]


def _rules(
    needs: Sequence[tuple[Kind, str, Operation]],
    whom: Sequence[tuple[str, str, Permission]],
    pattern: Pattern,
) -> list[Rule]:
    """One rule of each combination, all of which may be rules."""
    if not whom:
        raise CommandError("whom? --allow-principal or --deny-principal", EXIT_USAGE)
    if not needs:
        raise CommandError("on what? --topic, --group, --cluster, ...", EXIT_USAGE)
    rules = []
    for kind, name, word in needs:
        how = Pattern.LITERAL if kind is Kind.CLUSTER else pattern
        rules += [Rule(kind, how, name, who, host, word, what) for who, host, what in whom]
    for rule in rules:
        if reason := rule_error(rule):
            raise CommandError(reason, EXIT_USAGE)
    return rules


def _conveniences(
    named: Sequence[tuple[Kind, str]], producer: bool, consumer: bool, idempotent: bool
) -> list[tuple[Kind, str, Operation]]:
    kinds = [kind for kind, _ in named]
    if Kind.TOPIC not in kinds:
        raise CommandError("--producer and --consumer want a --topic", EXIT_USAGE)
    if consumer and Kind.GROUP not in kinds:
        raise CommandError("--consumer wants a --group", EXIT_USAGE)
    needs: dict[tuple[Kind, str, Operation], None] = {}
    for kind, name in named:
        words: list[Operation] = []
        if kind is Kind.TOPIC:
            words += [*(PRODUCER if producer else ()), *(CONSUMER if consumer else ())]
        elif kind is Kind.GROUP and consumer:
            words.append(Operation.READ)
        elif kind is Kind.TRANSACTIONAL_ID and producer:
            words += TRANSACTIONAL
        needs.update(dict.fromkeys((kind, name, word) for word in words))
    if producer and idempotent:
        needs[Kind.CLUSTER, CLUSTER_NAME, Operation.IDEMPOTENT_WRITE] = None
    return list(needs)


# ---- list, delete ----


Principal = Annotated[
    str | None, typer.Option("--principal", metavar="User:NAME", help="Rules for this principal.")
]
Host = Annotated[str | None, typer.Option("--host", metavar="HOST", help="With this host.")]
OneOperation = Annotated[
    str | None, typer.Option("--operation", metavar="WORD", help="About this operation.")
]
OnePermission = Annotated[
    str | None, typer.Option("--permission", metavar="WORD", help="allow or deny.")
]


def _filters(
    named: Sequence[tuple[Kind, str]],
    pattern_type: str | None,
    principal: str | None,
    host: str | None,
    operation: str | None,
    permission: str | None,
) -> list[RuleFilter]:
    """One filter for each resource that is named; one for all where none is."""
    is_match = pattern_type is not None and pattern_type.lower() == "match"
    pattern = None
    if pattern_type is not None and not is_match:
        pattern = _word(Pattern, pattern_type, "--resource-pattern-type")
    word = None if operation is None else _word(Operation, operation, "--operation")
    what = None if permission is None else _word(Permission, permission, "--permission")
    rows: Sequence[tuple[Kind | None, str | None]] = named or [(None, None)]
    return [
        RuleFilter(kind, pattern, name, principal, host, word, what, is_match)
        for kind, name in rows
    ]


@acl_app.command("list")
def list_(
    principal: Principal = None,
    host: Host = None,
    operation: OneOperation = None,
    permission: OnePermission = None,
    topic: Topics = None,
    group: Groups = None,
    cluster: Cluster = False,
    transactional_id: Ids = None,
    user_principal: Users = None,
    pattern_type: FilterType = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """List rules.

    Examples: raftmq acl list --principal User:alice; raftmq acl list --topic orders
    --resource-pattern-type match
    """
    with reported():
        named = _named(topic, group, transactional_id, user_principal, cluster)
        filters = _filters(named, pattern_type, principal, host, operation, permission)
        with open_admin(bootstrap, timeout) as admin:
            found = [rule for one in filters for rule in admin.describe_acls(one)]
        rows = [_row(rule) for rule in dict.fromkeys(found)]
        show(COLUMNS, rows, as_json=as_json)


@acl_app.command()
def delete(
    principal: Principal = None,
    host: Host = None,
    operation: OneOperation = None,
    permission: OnePermission = None,
    topic: Topics = None,
    group: Groups = None,
    cluster: Cluster = False,
    transactional_id: Ids = None,
    user_principal: Users = None,
    pattern_type: FilterType = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Delete all rules that fit, and show them.

    Examples: raftmq acl delete --principal User:alice --topic orders
    """
    with reported():
        named = _named(topic, group, transactional_id, user_principal, cluster)
        filters = _filters(named, pattern_type, principal, host, operation, permission)
        if filters == [RuleFilter()]:
            raise CommandError("which rules? all of them are not deleted at once", EXIT_USAGE)
        with open_admin(bootstrap, timeout) as admin:
            ask = admin.describe_acls if dry_run else admin.delete_acls
            gone = [rule for one in filters for rule in ask(one)]
        rows = [_row(rule) for rule in dict.fromkeys(gone)]
        show(COLUMNS, rows, as_json=as_json)


# ---- why ----


@acl_app.command()
def why(
    user: Annotated[str, typer.Argument(metavar="USER", help="alice, or User:alice.")],
    operation: Annotated[str, typer.Argument(metavar="OPERATION", help="Such as read.")],
    resource: Annotated[
        str, typer.Argument(metavar="RESOURCE", help="topic:orders, group:billing, cluster, ...")
    ],
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", help="From where; by default from anywhere."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Say whether a user may do something, and which rule decides.

    Ends with 0 where it may, with 1 where it may not. Super users, whom the configuration of the
    nodes names, may do everything whatever this says.

    Examples: raftmq acl why alice read topic:orders; raftmq acl why bob alter cluster
    """
    with reported():
        principal = user if ":" in user else f"User:{user}"
        word = _word(Operation, operation, "OPERATION")
        kind_text, _, name = resource.partition(":")
        kind = _word(Kind, kind_text, "RESOURCE")
        if kind is Kind.CLUSTER:
            name = name or CLUSTER_NAME
        if not name:
            raise CommandError(f"RESOURCE: which {kind}? {kind}:NAME", EXIT_USAGE)
        with open_admin(bootstrap, timeout) as admin:
            rules = NO_RULES.with_rules(admin.describe_acls(RuleFilter(kind=kind)))
        verdict = explain(rules, frozenset(), principal, host, kind, name, word)
        if as_json:
            show_json(
                {
                    "allowed": verdict.is_allowed,
                    "why": verdict.why,
                    "rule": None if verdict.rule is None else list(_row(verdict.rule)),
                }
            )
        else:
            said = "may" if verdict.is_allowed else "may not"
            what = visible(f"{principal} {said} {word} {kind} {name!r}: {verdict.why}")
            out(what)
        if not verdict.is_allowed:
            raise typer.Exit(EXIT_FAILED)
