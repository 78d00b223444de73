"""Error codes of transactions, as each version of a request knows them."""

from __future__ import annotations

import pytest

from raftmq.errors import ErrorCode as E
from raftmq.server.kafka.handlers.transactions import commit_code, fenced_code


@pytest.mark.parametrize(
    ("code", "version", "expected"),
    [
        (E.NONE, 0, E.NONE),
        (E.PRODUCER_FENCED, 5, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_PRODUCER_EPOCH, 0, E.INVALID_PRODUCER_EPOCH),
        (E.INVALID_TXN_STATE, 3, E.INVALID_TXN_STATE),
        (E.INVALID_TXN_STATE, 4, E.TRANSACTION_ABORTABLE),
        (E.REBALANCE_IN_PROGRESS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.REBALANCE_IN_PROGRESS, 2, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.CONCURRENT_TRANSACTIONS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.CONCURRENT_TRANSACTIONS, 5, E.COORDINATOR_LOAD_IN_PROGRESS),
        (E.COORDINATOR_LOAD_IN_PROGRESS, 1, E.COORDINATOR_NOT_AVAILABLE),
        (E.NOT_COORDINATOR, 5, E.NOT_COORDINATOR),
    ],
)
def test_codes_of_txn_offset_commit(code: E, version: int, expected: E) -> None:
    assert commit_code(code, version) is expected


def test_a_fenced_producer_as_older_versions_know_it() -> None:
    assert fenced_code(E.PRODUCER_FENCED, 1) is E.INVALID_PRODUCER_EPOCH
    assert fenced_code(E.PRODUCER_FENCED, 2) is E.PRODUCER_FENCED
    assert fenced_code(E.INVALID_TXN_STATE, 1) is E.INVALID_TXN_STATE
