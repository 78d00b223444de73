"""What is announced is what Kafka 4.1.2 announces; the support table in docs/ says the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raftmq.protocol import ANNOUNCED, SPOKEN, ApiKey, is_announced, is_flexible
from raftmq.protocol.api_versions import FLEXIBLE_FROM, SERVED_MIN
from tests.protocol.messages import KIO_FROM, every_message, kio_class

HERE = Path(__file__).parent
DOC = HERE.parent.parent / "docs" / "protocol-support.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def kafkas_ranges() -> dict[int, tuple[str, tuple[int, int]]]:
    """Key to (name, range), as a Kafka 4.1.2 broker announces them."""
    ranges = {}
    for line in (HERE / "data" / "kafka-4.1.2-versions.txt").read_text().splitlines():
        key, name, span = line.split()
        low, high = (int(version.removeprefix("v")) for version in span.split("-"))
        ranges[int(key)] = (name, (low, high))
    return ranges


def test_ranges_are_kafkas() -> None:
    kafka = kafkas_ranges()
    ours = {int(key): (key.title, span) for key, span in ANNOUNCED.items()}
    assert ours == {key: kafka[key] for key in ours}
    assert list(ANNOUNCED) == sorted(ANNOUNCED)
    assert sorted(SPOKEN) == sorted(ApiKey)


def test_our_client_asks_what_is_announced() -> None:
    for key, (low, high) in SPOKEN.items():
        span = ANNOUNCED[key]
        assert span[0] <= low <= high <= span[1]


def test_nothing_half_done_is_announced() -> None:
    """Clients begin to use what they see: the newer group protocol, say."""
    for key in (68, 69, 71, 72):
        assert key not in ANNOUNCED


def test_flexible_versions_are_the_schemas() -> None:
    assert list(FLEXIBLE_FROM) == sorted(SPOKEN)
    for api, version, direction in every_message():
        assert is_flexible(api, version) == kio_class(api, version, direction).__flexible__


def test_is_announced() -> None:
    assert is_announced(0, 0)
    assert is_announced(0, 13)
    assert not is_announced(0, 14)
    assert not is_announced(1, 3)
    assert not is_announced(99, 0)
    assert not is_flexible(99, 0)
    assert SERVED_MIN == KIO_FROM


NOTES = {
    ApiKey.PRODUCE: "v0 to v2 are announced and refused (UNSUPPORTED_VERSION), as Kafka does: "
    "without them librdkafka stops compressing. v13 names topics by id.",
    ApiKey.FETCH: "v13 and up name topics by id.",
    ApiKey.METADATA: "v10 and up carry topic ids.",
    ApiKey.API_VERSIONS: "Any higher version is answered with UNSUPPORTED_VERSION in a v0 body.",
    ApiKey.ADD_PARTITIONS_TO_TXN: "v4 and v5 are for brokers.",
    ApiKey.WRITE_TXN_MARKERS: "Aborts what no transactional id owns (`kafka-transactions abort`).",
    ApiKey.LIST_TRANSACTIONS: "Each id by the broker that FindCoordinator names for it.",
    ApiKey.OFFSET_FOR_LEADER_EPOCH: "Epoch 0 means 1, that of a first leader "
    "([decision 0011](decisions/0011-first-leader-epoch.md)).",
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: "Refused (UNSUPPORTED_VERSION) below `raftmq.level` 4.",
    ApiKey.CREATE_ACLS: "Refused (UNSUPPORTED_VERSION) below `raftmq.level` 5.",
    ApiKey.DESCRIBE_QUORUM: "The metadata group; any partition is a Raft group, too.",
    ApiKey.DESCRIBE_CLIENT_QUOTAS: "There are none: the answer is empty.",
    ApiKey.UPDATE_FEATURES: "All levels of a request or none; [upgrades](operations.md#upgrades).",
}


def table() -> str:
    """The generated part of docs/protocol-support.md."""
    lines = ["| key | API | versions | flexible from | notes |", "|---|---|---|---|---|"]
    for api, (low, high) in ANNOUNCED.items():
        first = FLEXIBLE_FROM[api]
        flexible = f"v{max(first, low)}" if first <= high else "never"
        lines.append(
            f"| {int(api)} | {api.title} | v{low}-v{high} | {flexible} | {NOTES.get(api, '')} |"
        )
    return "\n".join(lines) + "\n"


def test_the_support_table_is_current() -> None:
    """RAFTMQ_REWRITE=1 rewrites the table instead."""
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    found, after = rest.split(END)
    if os.environ.get("RAFTMQ_REWRITE"):
        DOC.write_text(before + BEGIN + table() + END + after)
        pytest.skip("rewritten")
    assert found == table(), "stale: run this test with RAFTMQ_REWRITE=1"
