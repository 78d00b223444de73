"""Completion offers what the cluster knows, and is silent where it knows nothing."""

from __future__ import annotations

import socket
import time

import pytest

from raftmq.protocol import ApiKey
from tests.cli.conftest import invoke
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import Listed


def offered(words: str, bootstrap: str) -> list[str]:
    """What a shell offers for the last of these words, which may be empty."""
    done = invoke(
        [],
        env={
            "_RAFTMQ_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
            "RAFTMQ_BOOTSTRAP": bootstrap,
        },
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("raftmq topic describe ", ["clicks", "orders"]),
        ("raftmq topic describe o", ["orders"]),
        ("raftmq topic delete clicks o", ["orders"]),
        ("raftmq consume ", ["clicks", "orders"]),
        ("raftmq consume -t c", ["clicks"]),
        ("raftmq consume orders -G ", ["billing"]),
        ("raftmq produce c", ["clicks"]),
        ("raftmq leader transfer o", ["orders"]),
        ("raftmq leader transfer orders 0 ", ["1"]),
        ("raftmq export o", ["orders"]),
        ("raftmq export orders -g ", ["billing"]),
        ("raftmq group describe b", ["billing"]),
        ("raftmq group seek b", ["billing"]),
        ("raftmq group seek billing -t o", ["orders"]),
        ("raftmq txn describe b", ["billing-1"]),
        ("raftmq txn abort ", ["audit", "billing-1"]),
        ("raftmq txn abort -t o", ["orders"]),
        ("raftmq node replace ", ["1"]),
        ("raftmq node config show ", ["1"]),
        ("raftmq node config show 1 num", ["num.partitions"]),
        ("raftmq cluster config set num", ["num.partitions="]),
        ("raftmq cluster config set max", []),
        ("raftmq topic describe --boot", ["--bootstrap"]),
        ("raftmq topic desc", ["describe"]),
    ],
)
def test_names_that_the_cluster_knows(broker: FakeBroker, words: str, expected: list[str]) -> None:
    broker.make_topic("orders", 1)
    broker.make_topic("clicks", 1)
    broker.groups["billing"] = {}
    broker.listed = {"billing-1": Listed(7), "audit": Listed(8)}
    assert offered(words, broker.address) == expected


def test_the_cluster_that_is_named_in_the_words_is_asked(broker: FakeBroker) -> None:
    broker.make_topic("orders", 1)
    words = f"raftmq topic describe -b {broker.address} o"
    assert offered(words, "127.0.0.1:1") == ["orders"]


def test_silence_and_haste_where_nothing_answers(broker: FakeBroker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        refused = f"127.0.0.1:{sock.getsockname()[1]}"
    assert offered("raftmq topic describe ", refused) == []
    assert offered("raftmq topic describe ", "nonsense:port") == []
    broker.fault(ApiKey.METADATA, "hold")
    begun = time.monotonic()
    assert offered("raftmq topic describe ", broker.address) == []
    assert time.monotonic() - begun < 5
