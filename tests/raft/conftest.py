"""The option that writes transcripts anew; seen when pytest is started on this folder."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite`; elsewhere RAFTMQ_REWRITE=1 does the same."""
    parser.addoption("--rewrite", action="store_true", help="write Raft transcripts anew")
