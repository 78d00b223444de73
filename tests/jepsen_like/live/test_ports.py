"""Ports of nodes: each is given once, though nobody listens on it yet."""

from __future__ import annotations

import pytest

from jepsen_like.live import cluster


def test_no_port_is_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine ports of a cluster of three are asked for three at a time, before any node starts."""
    monkeypatch.setattr(cluster, "PORTS", (20_000, 20_060))
    monkeypatch.setattr(cluster, "_given", set())
    ports = [port for _ in range(10) for port in cluster.free_ports(3)]
    assert len(set(ports)) == 30
    assert all(20_000 <= port < 20_060 for port in ports)
