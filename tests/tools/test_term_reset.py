"""A term that no election can have reached is told, and set back by the word of all voters."""

from __future__ import annotations

from random import Random

import pytest
from attrs import evolve
from structlog.testing import capture_logs

from jepsen_like.disk import SimDisk
from raftmq.foreign import TERM_JUMP_MAX, TERM_MAX
from raftmq.log.journal import GroupState, HardStateJournal
from raftmq.node.partitions import tell_of_term
from raftmq.tools.term_reset import (
    HeldTerm,
    TermToken,
    agreed_term,
    read_held_term,
    reset_term,
)
from raftmq.tools.unsafe_recovery import (
    TERM_STEP,
    Place,
    RecoveryRefusedError,
    _partition_folders,
    read_image,
)
from raftmq.tools.unsafe_recovery import partition_group as group_of_name
from raftmq.types import METADATA_GROUP, METADATA_TOPIC, NodeId, RaftGroupId, TopicPartition
from tests.log.helpers import FakeClock
from tests.tools.lost_majority import CREATED_AT, ME, fill_node, folder_of, partition_group, replica
from tests.tools.test_unsafe_recovery import leads, place_of

EPOCH = 4
"""Of every log on the node."""


def make_place(
    group: RaftGroupId, term: int, *, disk: SimDisk | None = None, cut_floor: int = 0
) -> Place:
    disk = SimDisk(Random(1)) if disk is None else disk
    disk.make_directories("data")
    journal = HardStateJournal.open(disk, "data/state.journal")
    fill_node(disk, journal)
    state = journal.get(group)
    assert state is not None
    journal.put(group, evolve(state, term=term, vote=replica(3), cut_floor=cut_floor))
    journal.flush_now()
    return Place(disk=disk, path="data", node=ME, journal=journal, clock=FakeClock())


def held_term(term: int = TERM_MAX) -> HeldTerm:
    return read_held_term(make_place(partition_group(0), term), "t", 0)


def said(token: TermToken, node_id: int, **changes: object) -> TermToken:
    return evolve(token, node_id=NodeId(node_id), state="00000000", **changes)


def agreed(held: HeldTerm, *tokens: TermToken, survivors: tuple[int, ...] = ()) -> int:
    words = [str(token) for token in (held.token, *tokens)]
    return agreed_term(held, words, [NodeId(n) for n in survivors])


# ---- what is told ----


@pytest.mark.parametrize(
    ("term", "is_absurd"),
    [(EPOCH + TERM_JUMP_MAX, False), (EPOCH + TERM_JUMP_MAX + 1, True), (1 << 62, True)],
)
def test_the_largest_jump_that_peers_believe_is_the_border(term: int, is_absurd: bool) -> None:
    assert held_term(term).token.is_absurd is is_absurd


def test_a_token_says_what_it_was_made_of() -> None:
    token = held_term().token
    assert TermToken.parse(str(token)) == token
    assert (token.node_id, token.term, token.last_epoch) == (1, TERM_MAX, EPOCH)
    assert token.voters == (1, 2, 3)
    other = read_held_term(make_place(partition_group(3), TERM_MAX), "t", 3).token
    assert other.group != token.group
    voted = make_place(partition_group(0), TERM_MAX)
    state = voted.journal.get(partition_group(0))
    assert state is not None
    voted.journal.put(partition_group(0), evolve(state, vote=None))
    assert read_held_term(voted, "t", 0).token.state != token.state


def test_metadata_has_a_term_like_any_group() -> None:
    place = make_place(METADATA_GROUP, TERM_MAX)
    held = read_held_term(place, METADATA_TOPIC, 0)
    assert (held.token.last_epoch, held.token.voters) == (EPOCH, (1, 2, 3))
    new_term = agreed(held, said(held.token, 2), said(held.token, 3))
    reset_term(place, held, new_term)
    state = place.journal.get(METADATA_GROUP)
    assert state is not None
    assert (state.term, state.vote) == (EPOCH + TERM_STEP, None)


@pytest.mark.parametrize("has_image", [True, False])
def test_each_life_of_a_number_is_looked_at_in_its_own_folder(has_image: bool) -> None:
    """The newest one is meant where a partition is named: an earlier one has ended."""
    place = make_place(partition_group(0), EPOCH)
    image = read_image(place) if has_image else None
    first, later = partition_group(0), partition_group(0)._replace(creation_epoch=CREATED_AT + 90)
    place.disk.make_directories(f"{folder_of(0)}@{later.creation_epoch}")
    place.disk.make_directories(f"{folder_of(0)}@{later.creation_epoch + 1}")  # nobody knows it
    assert next(_partition_folders(place, image)) == ("t-0", first, folder_of(0))
    place.journal.put(later, GroupState(bootstrapped=ME.storage_id))
    found = [row for row in _partition_folders(place, image) if row[0] == "t-0"]
    assert found == [
        ("t-0", first, folder_of(0)),
        ("t-0", later, f"{folder_of(0)}@{later.creation_epoch}"),
    ]
    assert group_of_name(place, "t", 0) == found[1]


def test_a_log_that_lost_what_it_promised_does_not_speak() -> None:
    place = make_place(partition_group(0), TERM_MAX, cut_floor=12)
    with pytest.raises(RecoveryRefusedError, match="lacks something here that this node may"):
        read_held_term(place, "t", 0)
    with pytest.raises(RecoveryRefusedError, match="this node holds no t-2"):
        read_held_term(place, "t", 2)
    place.disk.remove_tree(folder_of(1))
    with pytest.raises(RecoveryRefusedError, match="holds no t-1"):
        read_held_term(place, "t", 1)


# ---- who must agree ----


def test_the_new_term_is_above_every_epoch_of_every_log() -> None:
    held = held_term()
    token = held.token
    assert agreed(held, said(token, 2), said(token, 3, last_epoch=90_000)) == 90_000 + TERM_STEP


def test_a_voter_that_comes_back_must_speak() -> None:
    held = held_term()
    token = held.token
    with pytest.raises(RecoveryRefusedError, match="nodes 3 vote on t-0"):
        agreed(held, said(token, 2))
    assert agreed(held, said(token, 2), survivors=(1, 2)) == EPOCH + TERM_STEP
    with pytest.raises(RecoveryRefusedError, match=r"1 of the voters 1,2,3 .* majority"):
        agreed(held, survivors=(1,))


def test_voters_that_another_log_knows_must_speak_too() -> None:
    held = held_term()
    token = held.token
    newer = said(token, 2, voters=(1, 2, 3, 4))
    with pytest.raises(RecoveryRefusedError, match="nodes 4 vote on t-0"):
        agreed(held, newer, said(token, 3))
    wide = said(token, 2, voters=(1, 2, 4, 5, 6))
    with pytest.raises(RecoveryRefusedError, match="2 of the voters 1,2,4,5,6 that node 2 knows"):
        agreed(held, wide, survivors=(1, 2))


def test_tokens_must_fit_each_other_and_this_disk() -> None:
    held = held_term()
    token = held.token
    two, three = said(token, 2), said(token, 3)
    for bad, says in (
        (said(token, 2, group="deadbeef"), "is about another partition than t-0"),
        (said(token, 2, term=7), "two tokens of node 2 differ"),
        (evolve(token, state="00000000"), "two tokens of node 1 differ"),
    ):
        with pytest.raises(RecoveryRefusedError, match=says):
            agreed(held, two, three, bad)
    with pytest.raises(RecoveryRefusedError, match="this node's own token is"):
        agreed_term(held, [str(two), str(three)], ())
    with pytest.raises(RecoveryRefusedError, match="the node ran meanwhile"):
        agreed_term(held, [str(said(token, 1)), str(two), str(three)], ())
    with pytest.raises(RecoveryRefusedError, match="this node's own token is"):
        agreed_term(held, [], ())
    with pytest.raises(RecoveryRefusedError, match="'1:2:3' is no token"):
        agreed_term(held, ["1:2:3"], ())


def test_there_must_be_a_need_and_a_way() -> None:
    held = held_term()
    token = held.token
    near = token.term - TERM_JUMP_MAX
    with pytest.raises(RecoveryRefusedError, match="it stays"):
        agreed(held, said(token, 2), said(token, 3, last_epoch=near))
    beyond = held_term(1 << 60)
    with pytest.raises(RecoveryRefusedError, match="no term is left"):
        agreed(beyond, said(token, 2, last_epoch=TERM_MAX - 1), said(token, 3))


# ---- a replica with it, and without ----


def test_a_replica_that_can_lead_no_more_leads_again() -> None:
    disk, where = SimDisk(Random(1)), (partition_group(1), folder_of(1))
    place = make_place(partition_group(1), TERM_MAX, disk=disk)  # the only voter of its group
    place.journal.close()
    found = leads(disk, *where)
    assert not found.is_leader
    with capture_logs() as lines:
        tell_of_term(TopicPartition("t", 1), found)
    (line,) = lines
    assert line["event"] == "no election can have reached this term"
    assert (line["topic"], line["partition"]) == ("t", 1)
    assert (line["term"], line["last_epoch"]) == (TERM_MAX, EPOCH)
    assert "raftmq recover --reset-term t 1" in line["way_out"]
    found.log.close()

    place = place_of(disk)
    held = read_held_term(place, "t", 1)
    reset_term(place, held, agreed_term(held, [], ()))
    place.journal.close()
    found = leads(disk, *where)
    with capture_logs() as lines:
        tell_of_term(TopicPartition("t", 1), found)
    assert lines == []
    assert found.is_writable
    assert found.leader_epoch == EPOCH + TERM_STEP + 1
