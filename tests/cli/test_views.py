"""`raftmq view`, and what `raftmq topic describe` says of views."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from raftmq.cli import topics
from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey
from raftmq_client import ViewInfo
from raftmq_client.aio.admin import Admin as AioAdmin
from raftmq_client.blocking.admin import Admin
from raftmq_client.core import admin as operations
from tests.cli.conftest import Call
from tests.client.fake_broker import FakeBroker

WHERE = "tag in ('refund', 'credit')"
CREATE = ("view", "create", "refunds", "--of", "orders", "--where", WHERE)


@pytest.fixture
def made(call: Call, broker: FakeBroker) -> FakeBroker:
    broker.make_topic("orders", 2)
    done = call(*CREATE)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"view refunds of orders created: {WHERE}\n"
    return broker


def test_a_view_is_created(made: FakeBroker) -> None:
    configs = {"raftmq.view.of": "orders", "raftmq.view.where": WHERE}
    assert made.configs["refunds"] == configs


def test_creating_it_again(call: Call, made: FakeBroker) -> None:
    done = call(*CREATE)
    assert done.exit_code == 1
    assert "TOPIC_ALREADY_EXISTS" in done.stderr
    done = call(*CREATE, "--if-not-exists")
    assert (done.exit_code, done.stdout) == (0, f"view refunds of orders is there: {WHERE}\n")
    told = json.loads(call(*CREATE, "--if-not-exists", "--json").stdout)
    assert told == {"View": "refunds", "Topic": "orders", "Where": WHERE}
    other = call(*CREATE[:-1], "tag = 'x'", "--if-not-exists")
    assert other.exit_code == 1, "it is there with another condition"
    taken = call("view", "create", "orders", *CREATE[3:], "--if-not-exists")
    assert taken.exit_code == 1
    assert "no view" in taken.stderr


def test_what_could_be_created(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("orders", 2)
    done = call(*CREATE, "--validate-only")
    assert done.stdout == f"view refunds of orders could be created: {WHERE}\n"
    assert "refunds" not in broker.configs


def test_a_mistake_in_a_condition_leads_to_the_language(call: Call, broker: FakeBroker) -> None:
    broker.make_topic("orders", 2)
    broker.fault(ApiKey.CREATE_TOPICS, "refuse", ErrorCode.INVALID_CONFIG)
    done = call("view", "create", "v", "--of", "orders", "--where", "tag=")
    assert done.exit_code == 1
    assert "INVALID_CONFIG" in done.stderr
    assert "docs/views.md" in done.stderr
    assert "--configs" not in done.stderr


def test_a_view_without_a_condition_is_a_mistake(call: Call) -> None:
    done = call("view", "create", "refunds", "--of", "orders")
    assert done.exit_code == 2
    assert "--where" in done.stderr


def test_views_are_listed(call: Call, made: FakeBroker) -> None:
    made.make_topic("others", 1)
    assert call("view", "create", "b", "--of", "others", "--where", "key = 'k'").exit_code == 0
    rows = json.loads(call("view", "list", "--json").stdout)
    assert rows == [
        {"View": "b", "Topic": "others", "Where": "key = 'k'"},
        {"View": "refunds", "Topic": "orders", "Where": WHERE},
    ]
    [row] = json.loads(call("view", "list", "--of", "orders", "--json").stdout)
    assert row["View"] == "refunds"
    assert WHERE in call("view", "list").stdout


def test_our_client_lists_them(made: FakeBroker) -> None:
    found = [ViewInfo("refunds", "orders", WHERE)]
    with Admin(made.address) as admin:
        assert admin.views() == found


@pytest.mark.trio
async def test_our_client_lists_them_asynchronously(made: FakeBroker) -> None:
    async with AioAdmin(made.address) as admin:
        assert await admin.views() == [ViewInfo("refunds", "orders", WHERE)]


class FakePort:
    """Answers as the administrators' ports of two nodes."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.paths: list[str] = []

    def get_each(self, path: str) -> list[dict[str, Any]]:
        self.paths.append(path)
        return [{"views": [row]} for row in self.rows] + [{}]


def test_a_view_is_described(call: Call, made: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"view": "refunds", "partition": 0, "trouble": ""}
    port = FakePort(
        [
            {**known, "node": 1, "examined_end": 7, "lacks_bytes": 0},
            {**known, "node": 9, "examined_end": 5, "lacks_bytes": 80},
            {**known, "view": "other", "node": 1, "examined_end": 1, "lacks_bytes": 9},
        ]
    )
    monkeypatch.setattr(topics.AdminPort, "find", lambda *_: port)
    told = json.loads(call("view", "describe", "refunds", "--json").stdout)
    assert (told["View"], told["Topic"], told["Where"]) == ("refunds", "orders", WHERE)
    row, _ = told["Partitions"]
    assert (row["Partition"], row["EndOffset"], row["TopicEndOffset"]) == (0, 0, 0)
    assert (row["ExaminedEnd"], row["LacksBytes"]) == (7, 0), "what the leader says"
    assert row["Trouble"] is None
    assert port.paths == ["/topics?name=orders"]
    shown = call("view", "describe", "refunds").stdout
    assert f"Where: {WHERE}" in shown
    monkeypatch.setattr(topics.AdminPort, "find", lambda *_: None)
    told = json.loads(call("view", "describe", "refunds", "--json").stdout)
    assert told["Partitions"][0]["ExaminedEnd"] is None


def test_a_topic_names_its_views(call: Call, made: FakeBroker) -> None:
    assert "Views: refunds\n" in call("topic", "describe", "orders").stdout
    told = json.loads(call("topic", "describe", "orders", "--json").stdout)
    assert told["Views"] == ["refunds"]
    assert "Views:" not in call("topic", "describe", "refunds").stdout


def test_only_topics_that_may_be_its_views_are_asked_for(
    call: Call, made: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view has the numbers of its topic: others have other settings, but none of interest."""
    made.make_topic("narrow", 1)
    asked: list[str] = []
    describe = operations.describe_topics

    def noted(names: Sequence[str], keys: Sequence[str]) -> object:
        asked.extend(names)
        return describe(names, keys)

    monkeypatch.setattr(operations, "describe_topics", noted)
    assert "Views: refunds\n" in call("topic", "describe", "orders").stdout
    assert asked == ["orders", "refunds"]
    assert call("view", "list", "--of", "gone", "--json").stdout == "[]\n"
    assert asked[2:] == ["narrow", "orders", "refunds"], "nobody knows where it lay"


def test_only_views_are_deleted(call: Call, made: FakeBroker) -> None:
    done = call("view", "delete", "orders", "refunds", "nope")
    assert done.exit_code == 1
    assert done.stdout == "view refunds deleted\n"
    assert "view 'orders'" in done.stderr
    assert "orders" in made.topic_ids
    assert "refunds" not in made.topic_ids


def test_a_view_that_is_not_there(call: Call, made: FakeBroker) -> None:
    for words in (("describe", "orders"), ("delete", "orders")):
        done = call("view", *words)
        assert done.exit_code == 1
        assert "no view with a condition" in done.stderr
