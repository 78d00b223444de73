"""The typer application: every command but those that run nodes.

`start`, `dev` and `demo` appear here for help and completion; `main.run` hands them their words
before this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import Parameter, getdoc, signature
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from raftmq.cli.acls import acl_app
from raftmq.cli.bench import bench
from raftmq.cli.cluster import cluster_app
from raftmq.cli.common import (
    SecurityOption,
    bootstrap_of,
    end,
    reported,
    secured_by,
    tell_errors_as_json,
    tells_errors_as_json,
)
from raftmq.cli.configs import config_app
from raftmq.cli.console import EXIT_USAGE
from raftmq.cli.consume import consume
from raftmq.cli.export import export
from raftmq.cli.groups import group_app
from raftmq.cli.log import log_app
from raftmq.cli.nodes import leader_app, node_app
from raftmq.cli.produce import produce
from raftmq.cli.recover import recover
from raftmq.cli.retries import dead_app, retry_app
from raftmq.cli.topics import topic_app, view_app
from raftmq.cli.transactions import txn_app
from raftmq.cli.users import user_app
from raftmq.cli.why import why

_UsageError: Final[type[Exception]] = typer.BadParameter.mro()[1]
"""What typer raises for words that it cannot read; it exports this subclass alone."""


_SHORT_FLAGS: Final = "eJCqu"
"""Letters of `consume` that take no value, so that more may follow in the same word."""


def _has_short_json(word: str) -> bool:
    """True for -J, alone or among other letters: -eJ, but not -KJ, where J is the key's end."""
    flags = word[1:].partition("J")[0]
    return word[:1] == "-" and "J" in word and not flags.strip(_SHORT_FLAGS)


class _Root(TyperGroup):
    """Knows from the words whether errors are told as JSON, those of the words included."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **more: Any) -> Any:
        options = args[: args.index("--")] if "--" in args else args
        is_short = "consume" in args and any(map(_has_short_json, options))
        tell_errors_as_json("--json" in options or is_short)
        with _usage_told():
            return super().make_context(info_name, args, *rest, **more)

    def invoke(self, ctx: Any) -> Any:
        with _usage_told():
            return super().invoke(ctx)


@contextmanager
def _usage_told() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if not tells_errors_as_json():
            raise  # typer shows the usage, too
        end(error.format_message(), EXIT_USAGE)  # type: ignore[attr-defined]


app = typer.Typer(
    name="raftmq",
    cls=_Root,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A message queue that speaks the Kafka protocol, one Raft group per partition.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done, 1 failed, 2 usage, 3 unknown outcome, 130 ended by Ctrl-C.",
)

_HAND_PARSED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
Words = Annotated[list[str] | None, typer.Argument(hidden=True)]


@app.command(context_settings=_HAND_PARSED)
def start(words: Words = None) -> None:
    """Run one node in the foreground: `raftmq start --config node.toml`."""
    from raftmq.cli.start import start as run

    raise typer.Exit(run(words or []))


@app.command(context_settings=_HAND_PARSED)
def dev(words: Words = None) -> None:
    """Run a local cluster of separate processes."""
    from raftmq.cli.dev import dev as run

    raise typer.Exit(run(words or []))


@app.command(context_settings=_HAND_PARSED)
def demo(words: Words = None) -> None:
    """The whole story in under a minute: three nodes, one killed, nothing lost."""
    from raftmq.cli.demo import demo as run

    raise typer.Exit(run(words or []))


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"raftmq {version('raftmq')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A message queue that speaks the Kafka protocol, one Raft group per partition."""


app.command(rich_help_panel="Records")(produce)
app.command(rich_help_panel="Records")(consume)
app.command(rich_help_panel="Records")(bench)
app.command(rich_help_panel="Records")(export)
app.add_typer(topic_app, name="topic", rich_help_panel="Administration")
app.add_typer(view_app, name="view", rich_help_panel="Administration")
app.add_typer(group_app, name="group", rich_help_panel="Administration")
app.add_typer(retry_app, name="retry", rich_help_panel="Administration")
app.add_typer(dead_app, name="dead", rich_help_panel="Administration")
app.add_typer(txn_app, name="txn", rich_help_panel="Administration")
app.add_typer(acl_app, name="acl", rich_help_panel="Administration")
app.add_typer(user_app, name="user", rich_help_panel="Administration")
app.add_typer(cluster_app, name="cluster", rich_help_panel="Administration")
app.command(rich_help_panel="Administration")(why)
app.add_typer(leader_app, name="leader", rich_help_panel="Administration")
app.add_typer(node_app, name="node", rich_help_panel="Administration")
app.add_typer(config_app, name="config", rich_help_panel="Files")
app.add_typer(log_app, name="log", rich_help_panel="Files")
app.command(rich_help_panel="Files")(recover)


def _secure(commands: typer.Typer) -> None:
    """Give every command that asks a cluster the option --security."""
    for command in commands.registered_commands:
        if command.callback is not None and "bootstrap" in signature(command.callback).parameters:
            command.callback = _with_security(command.callback)
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        _secure(group.typer_instance)


def _with_security(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose clients do as the file of its --security says; one that names brokers is
    asked for them where nobody else does."""

    @wraps(command)
    def run(ctx: typer.Context, security: Path | None, **given: Any) -> None:
        with reported(), secured_by(security) as said:
            command(**{**given, "bootstrap": bootstrap_of(ctx, said)})

    own = signature(command, eval_str=True)
    words = list(own.parameters.values())
    after = 1 + [word.name for word in words].index("bootstrap")
    keyword = Parameter.KEYWORD_ONLY
    more = [
        Parameter("ctx", keyword, annotation=typer.Context),
        *words[:after],
        Parameter("security", keyword, default=None, annotation=SecurityOption),
        *words[after:],
    ]
    parameters = [word.replace(kind=keyword) for word in more]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {word.name: word.annotation for word in parameters}
    return run


def _flow(commands: typer.Typer) -> None:
    """Let paragraphs of help flow: typer would break them where the source does, and once more."""
    for command in commands.registered_commands:
        paragraphs = getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(p.split()) for p in paragraphs.split("\n\n"))
    for group in commands.registered_groups:
        assert group.typer_instance is not None
        _flow(group.typer_instance)


_secure(app)
_flow(app)
