"""Settings: brokers' while they run (`raftmq node config`, `raftmq cluster config`), and those of a
node's file (`raftmq config`), which is read as `raftmq start` would, without starting the node.

A value in force is a node's own, else the cluster's, else that of the node's file, else the
default. Only what brokers can change while they run is set here; of the rest the node's file is
named, with its key. Names are Kafka's; for an unknown one the nearest is suggested.

`raftmq config` speaks from `NodeConfig` itself: keys, defaults and meanings are written nowhere
else. It touches no data folder and no port.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final

import typer

from raftmq.cli import completion
from raftmq.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    CommandError,
    Timeout,
    code_name,
    open_admin,
    parse_pairs,
    reported,
    show,
    show_json,
)
from raftmq.cli.console import note, out
from raftmq.config import (
    ENVIRONMENT_PREFIX,
    KAFKA_FILE_KEYS,
    NodeConfig,
    documented_keys,
    load_config,
)
from raftmq.errors import ErrorCode
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import ConfigEntry, ResourceType
from raftmq_client.errors import BrokerError

node_config_app = typer.Typer(help="Settings of one broker.", no_args_is_help=True)
cluster_config_app = typer.Typer(help="Settings of all brokers.", no_args_is_help=True)

Node = Annotated[
    int,
    typer.Argument(metavar="NODE", autocompletion=completion.nodes, help="The broker's id.", min=0),
]
Keys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY",
        autocompletion=completion.settings,
        help="Only these.",
        show_default=False,
    ),
]
SomeKeys = Annotated[
    list[str],
    typer.Argument(metavar="KEY", autocompletion=completion.settings, help="Their names."),
]
Pairs = Annotated[
    list[str],
    typer.Argument(metavar="KEY=VALUE", autocompletion=completion.settable, help="What to set."),
]
All = Annotated[bool, typer.Option("--all", help="Also what nobody has set.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and show; change nothing.")]

OWN: Final = "DYNAMIC_BROKER_CONFIG"
CLUSTER: Final = "DYNAMIC_DEFAULT_BROKER_CONFIG"
FILE: Final = "STATIC_BROKER_CONFIG"
DEFAULT: Final = "DEFAULT_CONFIG"
SOURCES: Final = {OWN: "node", CLUSTER: "cluster", FILE: "file", DEFAULT: "default"}
NODE_COLUMNS: Final = ("Name", "Value", "Default", "Source")
CLUSTER_COLUMNS: Final = ("Name", "Value", "Default", "Source", "Nodes")


@node_config_app.command("show")
def show_of_node(
    node: Node,
    keys: Keys = None,
    every: All = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show a broker's settings: each value in force, its default, and where it is set.

    Without KEY or --all those that somebody has set: for this node, for the cluster, or in the
    node's file, whose key is named where it is another.

    Examples: raftmq node config show 1; raftmq node config show 1 num.partitions
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        entries = _entries_of(admin, node)
        _check_names(keys or (), entries)
        wanted = [
            entry
            for entry in entries.values()
            if (entry.name in keys if keys else every or entry.source != DEFAULT)
        ]
        if as_json:
            show_json([_as_json(entry) for entry in wanted])
            return
        rows = [(e.name, _value(e), _default(e), _source(e)) for e in wanted]
        show(NODE_COLUMNS, rows, as_json=False)
        _explain(wanted if keys else ())


@node_config_app.command("set")
def set_of_node(
    node: Node,
    pairs: Pairs,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Set values for one broker, at once and for good; they win over the cluster's.

    Examples: raftmq node config set 1 replica.catchup.bytes.per.s=1048576 --dry-run
    """
    _change(node, pairs, dry_run, bootstrap, timeout, as_json)


@node_config_app.command("unset")
def unset_of_node(
    node: Node,
    keys: SomeKeys,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Take a broker's own values back: the cluster's, the file's or the default hold again.

    Examples: raftmq node config unset 1 replica.catchup.bytes.per.s
    """
    _change(node, keys, dry_run, bootstrap, timeout, as_json, unsets=True)


@cluster_config_app.command("show")
def show_of_cluster(
    keys: Keys = None,
    every: All = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Show the settings of all live brokers, and which of them have another value than the rest.

    Without KEY or --all those that somebody has set and that can be set here; `raftmq node config
    show NODE` tells the rest of a node's file.

    Examples: raftmq cluster config show; raftmq cluster config show --all --json
    """
    with reported(), open_admin(bootstrap, timeout) as admin:
        told = _entries_of_all(admin)
        entries = {name: entry for of_node in told.values() for name, entry in of_node.items()}
        _check_names(keys or (), entries)
        names = [
            name
            for name in sorted(entries)
            if (name in keys if keys else every or _is_of_interest(name, told))
        ]
        rows: list[dict[str, object]] = []
        for name in names:
            for nodes, entry in _alike(name, told):
                rows.append({**_as_json(entry), "Nodes": nodes})
                if not as_json:
                    who = "all" if len(nodes) == len(told) else nodes
                    word = SOURCES.get(entry.source, entry.source)
                    cells = name, _value(entry), _default(entry), word, who
                    rows[-1] = dict(zip(CLUSTER_COLUMNS, cells, strict=True))
        if as_json:
            show_json(rows)
            return
        show(CLUSTER_COLUMNS, [tuple(row.values()) for row in rows], as_json=False)
        _explain([entries[name] for name in names] if keys else ())


@cluster_config_app.command("set")
def set_of_cluster(
    pairs: Pairs,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Set values for all brokers, at once and for good; a broker's own value wins over them.

    Examples: raftmq cluster config set num.partitions=6 default.replication.factor=3
    """
    _change(None, pairs, dry_run, bootstrap, timeout, as_json)


@cluster_config_app.command("unset")
def unset_of_cluster(
    keys: SomeKeys,
    dry_run: DryRun = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    timeout: Timeout = 15.0,
    as_json: AsJson = False,
) -> None:
    """Take the cluster's values back: those of each node's file or the defaults hold again.

    Examples: raftmq cluster config unset num.partitions
    """
    _change(None, keys, dry_run, bootstrap, timeout, as_json, unsets=True)


def _change(
    node: int | None,
    words: Sequence[str],
    dry_run: bool,
    bootstrap: str,
    timeout: float,
    as_json: bool,
    *,
    unsets: bool = False,
) -> None:
    """Set KEY=VALUE words, or unset keys, of one broker, or of all for None."""
    with reported():
        changes: dict[str, str | None] = dict.fromkeys(words)
        if not unsets:
            changes = dict(parse_pairs(words, "setting"))
        with open_admin(bootstrap, timeout) as admin:
            rows = _alter(admin, node, changes, dry_run=dry_run)
        if as_json:
            show_json({"NodeId": node, "DryRun": dry_run, "Changes": rows})
            return
        whom = "all nodes" if node is None else f"node {node}"
        for row in rows:
            now = "unset" if row["Value"] is None else f"= {row['Value']}"
            was = "not set" if row["Before"] is None else row["Before"]
            out(f"{whom}: {row['Name']} {now}, was {was}{' (dry run)' if dry_run else ''}")
        _tell_hidden(rows)


def _alter(
    admin: Admin, node: int | None, changes: Mapping[str, str | None], *, dry_run: bool
) -> list[dict[str, object]]:
    """Change keys; for each its value and the one before, and which nodes have their own."""
    before = {node: _entries_of(admin, node)} if node is not None else _entries_of_all(admin)
    entries = next(iter(before.values()))
    _check_names(changes, entries)
    for name in changes:
        entry = entries[name]
        if entry.is_read_only and entry.source not in (OWN, CLUSTER):  # else no broker's own name
            where = f"key {_file_key(name)} of the node's file"
            raise CommandError(
                f"{name} cannot be changed while a broker runs",
                name=ErrorCode.INVALID_CONFIG.name,
                hint=f"It is {where}; change that and start the node again.",
            )
    place, source = ("", CLUSTER) if node is None else (str(node), OWN)
    with _hint("`raftmq cluster config show --all` shows names and values."):
        admin.alter_configs(ResourceType.BROKER, place, changes, validate_only=dry_run)
    return [
        {
            "Name": name,
            "Value": value,
            "Before": _set_at(entries[name], source),
            "OwnValues": _own_values(name, before) if node is None else {},
        }
        for name, value in changes.items()
    ]


def _tell_hidden(rows: Sequence[Mapping[str, object]]) -> None:
    """A value of the cluster changes nothing on a node that has its own."""
    for row in rows:
        own = row["OwnValues"]
        assert isinstance(own, dict)
        for node_id, value in own.items():
            note(
                f"node {node_id} keeps its own {row['Name']}={value}; "
                f"`raftmq node config unset {node_id} {row['Name']}` ends that"
            )


def _set_at(entry: ConfigEntry, source: str) -> str | None:
    return next((s.value for s in entry.synonyms if s.source == source), None)


def _own_values(name: str, told: Mapping[int, Mapping[str, ConfigEntry]]) -> dict[int, str | None]:
    entries = {node_id: of_node.get(name) for node_id, of_node in told.items()}
    return {i: e.value for i, e in entries.items() if e is not None and e.source == OWN}


def _entries_of(admin: Admin, node: int) -> dict[str, ConfigEntry]:
    """All settings of a live broker, by name.

    Raises:
        CommandError: it is not alive.
    """
    alive = [broker.node_id for broker in admin.brokers()]
    if node not in alive:
        raise CommandError(
            f"node {node} is not alive; alive are {', '.join(map(str, alive))}",
            hint="`raftmq node list` shows all of them.",
        )
    entries = admin.describe_configs(
        ResourceType.BROKER, str(node), documentation=True, synonyms=True
    )
    return {entry.name: entry for entry in entries}


def _entries_of_all(admin: Admin) -> dict[int, dict[str, ConfigEntry]]:
    return {broker.node_id: _entries_of(admin, broker.node_id) for broker in admin.brokers()}


def _is_of_interest(name: str, told: Mapping[int, Mapping[str, ConfigEntry]]) -> bool:
    entries = [of_node[name] for of_node in told.values() if name in of_node]
    return any(not entry.is_read_only and entry.source != DEFAULT for entry in entries)


def _alike(
    name: str, told: Mapping[int, Mapping[str, ConfigEntry]]
) -> Iterator[tuple[list[int], ConfigEntry]]:
    """Nodes with the same value from the same place, most of them first."""
    groups: dict[tuple[str | None, str], tuple[list[int], ConfigEntry]] = {}
    for node_id in sorted(told):
        entry = told[node_id].get(name)
        if entry is not None:
            groups.setdefault((entry.value, entry.source), ([], entry))[0].append(node_id)
    yield from sorted(groups.values(), key=lambda group: -len(group[0]))


def _check_names(names: Sequence[str] | Mapping[str, object], known: Mapping[str, object]) -> None:
    """Refuse a name that no broker knows, and say which one it may have been."""
    for name in names:
        if name not in known:
            raise CommandError(
                f"no setting {name!r}{nearest(name, known)}",
                name=ErrorCode.INVALID_CONFIG.name,
                hint="`raftmq cluster config show --all` shows names and values.",
            )


def nearest(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    """`; did you mean X?`, or nothing where no known name is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


@contextmanager
def _hint(text: str) -> Iterator[None]:
    try:
        yield
    except BrokerError as error:
        if error.code is not ErrorCode.INVALID_CONFIG:
            raise
        raise CommandError(str(error), name=code_name(error), hint=text) from error


def _explain(entries: Sequence[ConfigEntry]) -> None:
    for entry in entries:
        out("")
        out(f"{entry.name}: {entry.documentation or 'no description'}")
        for synonym in entry.synonyms[1:]:
            out(f"  hides {synonym.value} ({SOURCES.get(synonym.source, synonym.source)})")
        if entry.is_read_only:
            out(f"  set by key {_file_key(entry.name)} of the node's file alone")


def _value(entry: ConfigEntry) -> str | None:
    return "(hidden)" if entry.is_sensitive else entry.value


def _default(entry: ConfigEntry) -> str | None:
    """The default where it is not the value itself."""
    return "" if entry.source == DEFAULT else entry.default


def _source(entry: ConfigEntry) -> str:
    """Where a value is set, with the file's key where that has another name."""
    word = SOURCES.get(entry.source, entry.source)
    return f"{word}: {_file_key(entry.name)}" if entry.source == FILE else word


def _file_key(name: str) -> str:
    return KAFKA_FILE_KEYS.get(name, "defaults")


def _as_json(entry: ConfigEntry) -> dict[str, object]:
    return {
        "Name": entry.name,
        "Value": entry.value,
        "Default": entry.default,
        "Source": entry.source,
        "FileKey": _file_key(entry.name),
        "ReadOnly": entry.is_read_only,
        "Hidden": [{"Value": s.value, "Source": s.source} for s in entry.synonyms[1:]],
        "Documentation": entry.documentation,
    }


config_app = typer.Typer(help="A node's configuration.", no_args_is_help=True)


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The node's TOML file.")],
    environment: Annotated[
        bool, typer.Option("--environment/--no-environment", help="Apply RAFTMQ_* variables.")
    ] = True,
    production: Annotated[
        bool,
        typer.Option(
            "--production", help="Say instead what stands against it where strangers reach it."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what a configuration means, or what is wrong with it.

    With --production the exit status is 1 while anything is open.

    Examples: raftmq config check node.toml; raftmq config check node.toml --production
    """
    import os

    with reported():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            raise CommandError(f"{file}: not a text file in UTF-8") from None
        variables = dict(os.environ) if environment else {}
        config = _load_file(file, text, variables)
        if production:
            _review(file, config, variables, as_json=as_json)
            return
        in_file = tomllib.loads(text)
        rows: list[tuple[object, ...]] = []
        for name, _default, _doc in documented_keys():
            variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
            source = "file" if name in in_file else "default"
            source = variable if variable in variables else source
            rows.append((name, _as_value(getattr(config, name)), source))
        show(("Key", "Value", "Source"), rows, as_json=as_json)
        note(f"{file} can be used")


@config_app.command()
def keys(as_json: AsJson = False) -> None:
    """List every key with its default and meaning.

    Examples: raftmq config keys
    """
    show(("Key", "Default", "Meaning"), documented_keys(), as_json=as_json)


def _review(file: Path, config: NodeConfig, variables: Mapping[str, str], *, as_json: bool) -> None:
    from raftmq.node.production import Verdict, review

    found = review(config, variables)
    rows = [(each.subject, each.verdict.value, each.why) for each in found]
    show(("Subject", "Verdict", "Why"), rows, as_json=as_json)
    count = sum(each.verdict is Verdict.OPEN for each in found)
    if count:
        raise CommandError(f"{file}: {count} of {len(found)} are open; see docs/security.md")
    note(f"{file}: nothing is open; look yourself at what says so")


def _load_file(file: Path, text: str, environment: dict[str, str]) -> NodeConfig:
    from raftmq.config import ConfigError
    from raftmq.errors import KafkaError
    from raftmq.metadata.configs import check_static_configs

    try:
        config = load_config(text, environment=environment)
        check_static_configs(config.defaults)
    except ConfigError as error:
        raise CommandError(f"{file}: {error}") from error
    except KafkaError as error:
        raise CommandError(f"{file}: key 'defaults': {error.message}") from error
    return config


def _as_value(value: object) -> object:
    """As JSON can hold it."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return [str(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
