"""The folders of a node's replicas below `topics/`: their names, and which partition each is of.

A number of a topic may have several partitions, one after the other. Each of these lives is a Raft
group with a creation epoch of its own. The folder of the first life is `NAME-TOPICID/partition-N`,
as it was in versions without later lives, so each version opens the folders of the other. That of a
later life is `NAME-TOPICID/partition-N@EPOCH`.

Invariant: a folder's name never changes, and two lives never have the same one.
"""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

from attrs import frozen

from raftmq.ports import Disk
from raftmq.types import RaftGroupId, TopicId

_FOLDER: Final = re.compile(r"partition-([0-9]+)(?:@([0-9]+))?")
FIRST_LIFE: Final = -1
"""In the place of a creation epoch: whichever the first partition of a number had."""


def topic_folder(name: str, topic_id: TopicId) -> str:
    """The folder of a topic, below `topics/`."""
    return f"{name}-{topic_id}"


def partition_folder(partition: int, life: int) -> str:
    """The folder of a replica, in that of its topic; `life` is its creation epoch or FIRST_LIFE."""
    return f"partition-{partition}" if life == FIRST_LIFE else f"partition-{partition}@{life}"


def read_partition_folder(name: str) -> tuple[int, int] | None:
    """Number and life that the name of a folder says; None for anything else."""
    match = _FOLDER.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), FIRST_LIFE if match[2] is None else int(match[2])


@frozen(slots=True, order=True)
class ReplicaFolder:
    """One that was found.

    Attributes:
        path: below `topics/`.
        life: the creation epoch that its name says, or FIRST_LIFE.
    """

    topic_id: TopicId
    partition: int
    life: int
    path: str

    @property
    def topic(self) -> str:
        """The name that the topic has, as the folder says."""
        return self.path.partition("/")[0][: -len(str(self.topic_id)) - 1]

    @property
    def key(self) -> RaftGroupId:
        """The group of a later life; the first one's has FIRST_LIFE in the place of its epoch."""
        return RaftGroupId(self.topic_id, self.partition, self.life)


def find_folders(disk: Disk, root: str) -> list[ReplicaFolder]:
    """All below the folder `topics/`, in the order of their names."""
    found = []
    for name in sorted(disk.list(root)):
        try:
            topic_id = TopicId(UUID(name[-36:]))
        except ValueError:
            continue
        for child in sorted(disk.list(f"{root}/{name}")):
            read = read_partition_folder(child)
            if read is not None:
                found.append(ReplicaFolder(topic_id, *read, f"{name}/{child}"))
    return found
