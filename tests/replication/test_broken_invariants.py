"""A broken invariant stops the node, wherever it is met and whoever called."""

from __future__ import annotations

from typing import Any

import pytest

from raftmq.errors import ErrorCode
from raftmq.log.replicated_log import ReplicatedLog
from raftmq.metadata.commands import NoOperation
from raftmq.metadata.raft_engine import RaftMetadataEngine
from raftmq.partition.partition import Partition
from raftmq.partition.producers import PartitionProducers
from raftmq.ports import DiskError
from raftmq.raft.core import RaftCore
from raftmq.replication.replica import Replica
from raftmq.types import Offset
from tests.controller.metadata_cluster import MetadataCluster
from tests.partition.test_partition_replica import batch, started


class PlantedError(Exception):
    """Only a bug raises it."""


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    def raises(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(owner, name, raises)


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (RaftCore, "propose", AssertionError("planted")),
        (RaftCore, "propose", PlantedError()),
        (ReplicatedLog, "append_batch", AssertionError("planted")),
        (ReplicatedLog, "append_batch", PlantedError()),
        (Replica, "_appended", PlantedError()),
        (Replica, "drain", PlantedError()),
        (PartitionProducers, "judge", AssertionError("planted")),
    ],
)
def test_one_that_an_append_meets(
    owner: Any, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started()
    plant(monkeypatch, owner, name, error)
    with pytest.raises(type(error)):
        node.produce(batch(0))
    assert {*node.broken} == {f"broken invariant: {error!r}"}


@pytest.mark.parametrize("name", ["locate", "past_holes"])
def test_one_that_a_read_meets(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node = started()
    node.produce(batch())
    node.flush()
    plant(monkeypatch, ReplicatedLog, name, AssertionError("planted"))
    with pytest.raises(AssertionError, match="planted"):
        node.partition.read(Offset(0), 1 << 20)
    assert node.broken == ["broken invariant: AssertionError('planted')"]


def test_a_bug_of_a_read_changes_nothing_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started()
    node.produce(batch())
    node.flush()
    plant(monkeypatch, ReplicatedLog, "locate", PlantedError())
    with pytest.raises(PlantedError):
        node.partition.read(Offset(0), 1 << 20)
    assert node.broken == []


def test_a_disk_that_refuses_is_no_broken_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started()
    plant(monkeypatch, ReplicatedLog, "append_batch", DiskError("planted"))
    assert node.produce(batch()).result().code is ErrorCode.KAFKA_STORAGE_ERROR
    assert node.broken == []


def test_one_that_a_commit_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    node = started()
    node.produce(batch())
    plant(monkeypatch, Partition, "committed", PlantedError())
    with pytest.raises(PlantedError):
        node.flush()
    assert {*node.broken} == {"broken invariant: PlantedError()"}


def test_one_that_a_metadata_command_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MetadataCluster.formed().nodes[1].engine
    broken: list[str] = []
    engine.on_broken_invariant = broken.append
    plant(monkeypatch, RaftMetadataEngine, "_work_came", AssertionError("planted"))
    with pytest.raises(AssertionError, match="planted"):
        engine.propose(NoOperation())
    assert broken == ["broken invariant: AssertionError('planted')"]
