"""A broker for commands, and a way to call them as a shell would."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from click.testing import Result
from typer.testing import CliRunner

from raftmq.cli.app import app
from tests.client.fake_broker import FakeBroker

Call = Callable[..., Result]


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
    runner = CliRunner()

    def invoke(*words: str, stdin: str | bytes = "") -> Result:
        return runner.invoke(app, list(words), input=stdin)

    return invoke
