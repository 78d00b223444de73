"""A broker for commands, and a way to call them as a shell would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import click
import pytest
import typer.main
from click.testing import CliRunner, Result

from raftmq.cli.app import app
from tests.client.fake_broker import FakeBroker

Call = Callable[..., Result]


@cache
def command_tree() -> click.Command:
    """All commands, made once: that takes typer 50 ms, ten times as long as a call."""
    return typer.main.get_command(app)


def invoke(
    words: Sequence[str], *, stdin: str | bytes = "", env: Mapping[str, str] | None = None
) -> Result:
    """Run a command in this process, as a shell would in its own."""
    return CliRunner().invoke(command_tree(), [*words], input=stdin, env=env)


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as fake:
        yield fake


@pytest.fixture
def call(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command against the broker: `call("topic", "list")`."""
    monkeypatch.setenv("RAFTMQ_BOOTSTRAP", broker.address)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")

    def call_it(*words: str, stdin: str | bytes = "") -> Result:
        return invoke(words, stdin=stdin)

    return call_it
