"""What a shell offers for a word: names and numbers that the cluster knows.

A person is typing meanwhile: it takes a second at most, and shows no error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

import typer

from raftmq.cli.common import bootstrap_of, check_reachable, client_security, secured_by
from raftmq.errors import RaftmqError
from raftmq_client.blocking.admin import Admin
from raftmq_client.core.admin import ResourceType

PATIENCE_S: Final = 1.0

Complete: TypeAlias = Callable[[typer.Context, str], list[str]]


def _offered(ask: Callable[[Admin], Iterable[object]]) -> Complete:
    """Offers what `ask` finds that begins as the word does."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        begun = time.monotonic()
        try:
            with secured_by(ctx.params.get("security")) as said:
                bootstrap = bootstrap_of(ctx, said)
                check_reachable(bootstrap, 0)
                left_s = max(0.1, PATIENCE_S - (time.monotonic() - begun))
                with Admin(
                    bootstrap,
                    security=client_security(),
                    client_id="raftmq-cli",
                    timeout_ms=left_s * 1000,
                ) as admin:
                    found = [str(item) for item in ask(admin)]
        except (RaftmqError, OSError, ExceptionGroup):
            return []
        return [word for word in found if word.startswith(incomplete)]

    return complete


def _config_names(admin: Admin) -> list[str]:
    for broker in admin.brokers()[:1]:
        entries = admin.describe_configs(ResourceType.BROKER, str(broker.node_id))
        return [entry.name for entry in entries]
    return []


def _settable(admin: Admin) -> list[str]:
    for broker in admin.brokers()[:1]:
        entries = admin.describe_configs(ResourceType.BROKER, str(broker.node_id))
        return [f"{entry.name}=" for entry in entries if not entry.is_read_only]
    return []


topics: Final = _offered(
    lambda admin: sorted(t.name for t in admin.cluster().topics if not t.is_internal)
)
groups: Final = _offered(lambda admin: (item.group for item in admin.list_groups()))
transactional_ids: Final = _offered(
    lambda admin: (item.transactional_id for item in admin.list_transactions())
)
nodes: Final = _offered(lambda admin: (broker.node_id for broker in admin.brokers()))
stuck: Final = _offered(
    lambda admin: [
        "node",
        *(f"{t.name}/{p.partition}" for t in admin.cluster().topics for p in t.partitions),
    ]
)
settings: Final = _offered(_config_names)
settable: Final = _offered(_settable)
