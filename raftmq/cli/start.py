"""`raftmq start`: one node in the foreground, from a file, variables and flags.

Parsed with argparse: a node must be ready before typer and rich could even be imported. Every key
of `NodeConfig` is a flag; flags win over `RAFTMQ_*` variables, and those over the file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raftmq.cli.console import note
from raftmq.config import ConfigError, NodeConfig, documented_keys, load_config
from raftmq.errors import RaftmqError

if TYPE_CHECKING:
    from raftmq.node import Listeners

_EXAMPLES = """\
examples:
  raftmq start --config node.toml
  raftmq start --node-id 1 --data /var/lib/raftmq
  RAFTMQ_NODE_ID=2 raftmq start --config node.toml --rack b

exit codes: 0 ended as asked, 1 failed, 2 the configuration cannot be used,
4 the cluster or the data folder is ahead of this version: start a newer raftmq
"""


def start(arguments: Sequence[str]) -> int:
    """Run a node until it is told to end; gives the exit code."""
    parser = _parser()
    flags = vars(parser.parse_args(list(arguments)))
    file: str | None = flags.pop("config") or os.environ.get("RAFTMQ_CONFIG")
    try:
        config = read_config(file, os.environ, flags)
    except ConfigError as error:
        where = f"{file}: " if file else ""
        note(f"raftmq start: {where}{error}")
        if file is None:
            note("Give a file with --config; `raftmq start --help` lists keys.")
        return 2
    return run(config)


def run(
    config: NodeConfig,
    *,
    listeners: Listeners | None = None,
    on_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run a node until it is told to end, errors told in one line; gives the exit code.

    Without `listeners`, binds what the configuration names. `on_ready` tells a parent that waits.
    """
    from raftmq.node import run_node

    try:
        return run_node(config, listeners=listeners, on_ready=on_ready)
    except RaftmqError as error:
        note(f"raftmq: node {config.node_id} cannot run: {error}")
        return 1
    except OSError as error:
        note(f"raftmq: node {config.node_id} cannot run: {_explain(error)}")
        return 1
    except KeyboardInterrupt:
        return 0


def read_config(
    file: str | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> NodeConfig:
    """A node's configuration from a file, variables and flags.

    Raises:
        ConfigError: it cannot be read or used; the message says why.
    """
    text = ""
    if file is not None:
        try:
            text = Path(file).read_text()
        except OSError as error:
            raise ConfigError(error.strerror or str(error)) from error
        except UnicodeDecodeError as error:
            raise ConfigError("not a text file in UTF-8") from error
    return load_config(text, environment=environment, overrides=flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raftmq start",
        description="Run one node in the foreground.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with the keys below")
    for name, default, documentation in documented_keys():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            metavar="VALUE",
            help=f"{documentation} [{default}]".replace("%", "%%"),
        )
    return parser


def _explain(error: OSError) -> str:
    what = error.strerror or str(error)
    return f"{what}: {error.filename}" if error.filename else what
