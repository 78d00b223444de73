"""What the members of a group bring along is bounded, all together."""

from __future__ import annotations

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.group_config import GroupConfig
from raftmq.groups.membership import JoinRequest


def test_a_group_keeps_so_many_bytes() -> None:
    group = Group("g", GroupConfig(bytes_max=1_000))

    def join(member: str, size: int, instance: str | None = None) -> ErrorCode:
        request = JoinRequest(protocols=(("range", bytes(size - 5)),), instance_id=instance)
        group.join(request, member, 0.0)
        answers = group.take_work().answers
        return answers[0][1].error if answers else ErrorCode.NONE

    assert join("a", 400, "static") is ErrorCode.NONE
    assert join("b", 600) is ErrorCode.NONE
    assert join("c", 6) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert join("a2", 401, "static") is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert set(group.members) == {"a", "b"}
