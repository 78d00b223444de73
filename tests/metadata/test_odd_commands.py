"""Commands of every kind with odd values, at `propose`: refused or applied, but nowhere raised."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from jepsen_like.fuzz.peers import Plausible, odd_struct
from raftmq.metadata.commands import (
    ALL_COMMANDS,
    AllocateProducerIds,
    ClaimGroup,
    CreateTopics,
    FeatureUpdate,
    InitProducer,
    TransactionRows,
    UpdateFeatures,
)
from raftmq.metadata.features import SUPPORTED
from raftmq.metadata.results import ProducerIds, Rejection
from raftmq.promise import Promise
from tests.controller.metadata_cluster import MetadataCluster
from tests.metadata.metadata_commands import creation, node

TRIES = 40


@pytest.mark.parametrize("asker", [1, 2], ids=["leader", "follower"])
@pytest.mark.parametrize("kind", ALL_COMMANDS, ids=lambda kind: kind.__name__)
def test_an_odd_command_is_nobodys_end(kind: type[msgspec.Struct], asker: int) -> None:
    """What `apply` cannot take never enters the log, where it would end every node for ever."""
    world = MetadataCluster(3)
    world.elect(1)
    world.run(2_000)
    levels = tuple(FeatureUpdate(name, high) for name, (_, high) in SUPPORTED.items())
    topics = (creation("topic", 1, (1, 2, 3), (1, 2, 3)),)
    row = InitProducer(transactional_id="topic", timeout_ms=1)
    claim = ClaimGroup(
        group="g", node_id=node(1), broker_epoch=world.nodes[1].engine.image.brokers[node(1)].epoch
    )
    for command in (
        UpdateFeatures(updates=levels),
        CreateTopics(topics=topics),
        TransactionRows(rows=(row,)),
        claim,
    ):
        made: Promise[object] = world.nodes[1].engine.propose(command)
        world.run(100)
        assert not isinstance(made.result(), Rejection)
    random = Random(f"{kind.__name__}/{asker}")
    image = world.nodes[1].engine.image
    plausible = Plausible(
        texts=(image.cluster_id, *image.topics, "topic", "g"),
        numbers=(1, 2, 3, 0, *(broker.epoch for broker in image.brokers.values())),
        ids=tuple(topic.topic_id for topic in image.topics.values()),
    )
    for _ in range(TRIES):
        try:
            promise: Promise[object] = world.nodes[asker].engine.propose(
                odd_struct(kind, random, plausible)
            )
        except (TypeError, ValueError, msgspec.MsgspecError):
            continue  # it cannot even be written
        world.run(100)
        assert promise.is_done
    good = world.nodes[2].engine.propose(AllocateProducerIds(node_id=node(2)))
    world.run(1_000)
    assert isinstance(good.result(), ProducerIds), "the log goes on"
    images = [one.engine.image for one in world.nodes.values()]
    assert all(image == images[0] for image in images)
