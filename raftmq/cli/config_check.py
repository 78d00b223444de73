"""`raftmq config ...`: read a node's configuration as `raftmq start` would, without starting it.

Speaks from `NodeConfig` itself: keys, defaults and meanings are written nowhere else. Touches no
data folder and no port.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from raftmq.cli.common import AsJson, CommandError, reported, show
from raftmq.cli.console import note
from raftmq.config import ENVIRONMENT_PREFIX, NodeConfig, documented_keys, load_config

config_app = typer.Typer(help="A node's configuration.", no_args_is_help=True)


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The node's TOML file.")],
    environment: Annotated[
        bool, typer.Option("--environment/--no-environment", help="Apply RAFTMQ_* variables.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Say what a configuration means, or what is wrong with it.

    Examples: raftmq config check node.toml
    """
    import os

    with reported():
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            raise CommandError(f"{file}: not a text file in UTF-8") from None
        variables = dict(os.environ) if environment else {}
        config = _load(file, text, variables)
        in_file = tomllib.loads(text)
        rows: list[tuple[object, ...]] = []
        for name, _default, _doc in documented_keys():
            variable = f"{ENVIRONMENT_PREFIX}{name.upper()}"
            source = "file" if name in in_file else "default"
            source = variable if variable in variables else source
            rows.append((name, _value(getattr(config, name)), source))
        show(("Key", "Value", "Source"), rows, as_json=as_json)
        note(f"{file} can be used")


@config_app.command()
def keys(as_json: AsJson = False) -> None:
    """List every key with its default and meaning.

    Examples: raftmq config keys
    """
    show(("Key", "Default", "Meaning"), documented_keys(), as_json=as_json)


def _load(file: Path, text: str, environment: dict[str, str]) -> NodeConfig:
    from raftmq.config import ConfigError
    from raftmq.errors import KafkaError
    from raftmq.metadata.topic_configs import check_static_configs

    try:
        config = load_config(text, environment=environment)
        check_static_configs(config.defaults)
    except ConfigError as error:
        raise CommandError(f"{file}: {error}") from error
    except KafkaError as error:
        raise CommandError(f"{file}: key 'defaults': {error.message}") from error
    return config


def _value(value: object) -> object:
    """As JSON can hold it."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, tuple):
        return [f"{p.id}@{p.host}:{p.port}" for p in value]
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
