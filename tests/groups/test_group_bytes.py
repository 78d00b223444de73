"""What the members of a group bring along, and what their leader gives them, is bounded."""

from __future__ import annotations

import pytest
from attrs import evolve

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.model import GroupConfig, JoinRequest
from tests.groups.driver import completing
from tests.groups.test_coordinator import join_alone, position, request
from tests.groups.world import Nodes, got


def test_a_group_keeps_so_many_bytes() -> None:
    group = Group("g", GroupConfig(bytes_max=1_000))

    def join(member: str, size: int, instance: str | None = None) -> ErrorCode:
        request = JoinRequest(
            protocols=(("range", bytes(size - 5 - len("consumer") - len(instance or ""))),),
            instance_id=instance,
        )
        group.join(request, member, 0.0)
        answers = group.take_effects().answers
        return answers[0][1].error if answers else ErrorCode.NONE

    assert join("a", 400, "static") is ErrorCode.NONE
    assert join("b", 600) is ErrorCode.NONE
    assert join("c", 14) is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert join("a2", 401, "static") is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert set(group.members) == {"a", "b"}


def test_assignments_have_so_many_bytes_together() -> None:
    driver = completing()
    driver.group.config = evolve(driver.group.config, bytes_max=1_000)
    assert driver.group.leader == "m1"
    too_much = {"m1": bytes(600), "m2": bytes(401)}
    assert driver.sync("m1", too_much).result().error is ErrorCode.GROUP_MAX_SIZE_REACHED
    assert driver.commands == [], "nothing of it is kept"
    fits = {"m1": bytes(600), "m2": bytes(400)}
    synced = [driver.sync("m1", fits), driver.sync("m2")]  # it may ask again with less
    driver.apply()
    assert [len(one.result().assignment) for one in synced] == [600, 400]


LONGEST_INSTANCE, LONGEST_MEMBER = "i" * 249, "m" * 1_024


def test_an_instance_id_has_so_many_characters() -> None:
    home = Nodes(1).of("g")
    joined = got(home.join("g", request(instance_id=LONGEST_INSTANCE)))
    assert joined.error is ErrorCode.NONE
    assert joined.member_id.startswith(LONGEST_INSTANCE)
    assert len(joined.member_id) <= home.config.member_id_length_max
    refused = got(home.join("other", request(instance_id=LONGEST_INSTANCE + "i")))
    assert refused.error is ErrorCode.INVALID_REQUEST
    assert home._engine.image.groups.get("other") is None, "no group was made for it"


@pytest.mark.parametrize(
    ("member_id", "instance_id"), [(LONGEST_MEMBER + "m", None), ("m", LONGEST_INSTANCE + "i")]
)
def test_nobody_has_a_longer_id(member_id: str, instance_id: str | None) -> None:
    nodes = Nodes(1)
    home = nodes.of("g")
    unknown = ErrorCode.UNKNOWN_MEMBER_ID
    before = len(nodes.log.entries)
    assert got(home.heartbeat("g", 1, member_id, instance_id)) is unknown
    assert got(home.sync("g", 1, member_id, instance_id, [])).error is unknown
    # Outside of group management any member may commit: nobody looks for it in a group.
    assert got(home.commit("g", -1, member_id, instance_id, [position(3)])) == (unknown,)
    if instance_id is None:
        assert got(home.join("g", request(member_id))).error is unknown
    assert len(nodes.log.entries) == before, "nothing of it enters the metadata log"
    assert got(home.commit("g", -1, LONGEST_MEMBER, LONGEST_INSTANCE, [position(3)])) == (
        ErrorCode.NONE,
    )


def test_a_member_id_of_a_long_client_id_is_cut() -> None:
    home = Nodes(1).of("g")
    joined = got(home.join("g", request(client_id="c" * 5_000)))
    assert len(joined.member_id) == home.config.member_id_length_max
    assert join_alone(home, "h") != join_alone(home, "k")
