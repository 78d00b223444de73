"""Each invariant rejects what it must reject."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest

from jepsen_like.disk import SimDisk
from jepsen_like.invariants import (
    GENESIS,
    OWN_MISTAKE,
    DurableView,
    Invariants,
    InvariantViolation,
    chain,
    name_of_finding,
)
from raftmq.raft.membership import quorum_end
from raftmq.types import METADATA_GROUP, NodeId, RaftGroupId, ReplicaId, StorageId, TopicId

GROUP = RaftGroupId(TopicId(UUID(int=9)), 0, 1)
A, B, C = (ReplicaId(NodeId(n), StorageId(1)) for n in (1, 2, 3))
VOTERS = (A, B, C)
X = chain(GENESIS, b"x")
Y = chain(GENESIS, b"y")


def views(invariants: Invariants, **flushed: int) -> None:
    for name, replica in (("a", A), ("b", B), ("c", C)):
        end = flushed.get(name, 0)
        invariants.truth(GROUP).views[replica] = DurableView(lambda end=end: end, lambda _: X)  # type: ignore[misc]


def committed(invariants: Invariants) -> None:
    views(invariants, a=5, b=5)
    invariants.committed(GROUP, A, 5, X, VOTERS, 1)


def two_leaders(invariants: Invariants) -> None:
    invariants.leads(GROUP, A, 3)
    invariants.leads(GROUP, B, 3)


def two_controllers(invariants: Invariants) -> None:
    invariants.leads(METADATA_GROUP, A, 3)
    invariants.leads(METADATA_GROUP, B, 3)


def logs_differ(invariants: Invariants) -> None:
    invariants.appended(GROUP, A, 5, 1, X)
    invariants.appended(GROUP, B, 5, 1, Y)


def leader_lacks(invariants: Invariants) -> None:
    committed(invariants)
    invariants.holds_committed(GROUP, C, 2, lambda _: Y)


def commit_differs(invariants: Invariants) -> None:
    committed(invariants)
    invariants.committed(GROUP, B, 5, Y, VOTERS, 1)


def prefix_changes(invariants: Invariants) -> None:
    invariants.knows_committed(GROUP, [(4, X)])
    invariants.knows_committed(GROUP, [(4, Y)])


def minority_flushed(invariants: Invariants) -> None:
    views(invariants, a=5, b=4)
    invariants.committed(GROUP, A, 5, X, VOTERS, 1)


def other_bytes_flushed(invariants: Invariants) -> None:
    views(invariants, a=5, b=5)
    invariants.truth(GROUP).views[B] = DurableView(lambda: 5, lambda _: Y)
    invariants.committed(GROUP, A, 5, X, VOTERS, 1)


def begins_elsewhere(invariants: Invariants) -> None:
    committed(invariants)
    invariants.starts_at(GROUP, C, 4)


def counts_old_term(invariants: Invariants) -> None:
    invariants.leader_commits(GROUP, A, 5, 5)


def changes_on_top_of_a_change(invariants: Invariants) -> None:
    invariants.changes_voters(GROUP, A, (A, B), (A, B, C), is_settled=False, answering=VOTERS)


def changes_two_voters(invariants: Invariants) -> None:
    invariants.changes_voters(GROUP, A, (A, B), (A, C), is_settled=True, answering=VOTERS)


def changes_to_the_silent(invariants: Invariants) -> None:
    invariants.changes_voters(GROUP, A, (A, B), (A, B, C), is_settled=True, answering=[A])


def forgets_itself(invariants: Invariants) -> None:
    invariants.booted(GROUP, A, B, 5, 5)


def loses_flushed(invariants: Invariants) -> None:
    invariants.booted(GROUP, A, A, 5, 4)


def claims_too_much(invariants: Invariants) -> None:
    invariants.opened(GROUP, A, 5, [4, 9])


def claims_beside_what_was_known(invariants: Invariants) -> None:
    invariants.opened(GROUP, A, 9, [4, 6], known=[(4, 6)])


def stale_read(invariants: Invariants) -> None:
    invariants.barrier(GROUP, 4, 5)


@pytest.mark.parametrize(
    ("name", "breach"),
    [
        ("SingleLeaderPerTerm", two_leaders),
        ("OneControllerPerEpoch", two_controllers),
        ("LogMatching", logs_differ),
        ("LogMatching", begins_elsewhere),
        ("LeaderCompleteness", leader_lacks),
        ("MonotonicHighWatermark", commit_differs),
        ("MonotonicHighWatermark", prefix_changes),
        ("CommittedIsDurableAtMajority", minority_flushed),
        ("CommittedIsDurableAtMajority", other_bytes_flushed),
        ("LeaderCommitsOwnTerm", counts_old_term),
        ("OneChangeAtATime", changes_on_top_of_a_change),
        ("OneChangeAtATime", changes_two_voters),
        ("ChangeKeepsQuorum", changes_to_the_silent),
        ("CrashKeepsIdentity", forgets_itself),
        ("FlushedSurvives", loses_flushed),
        ("ClaimsAreFlushed", claims_too_much),
        ("ClaimsAreFlushed", claims_beside_what_was_known),
        ("LinearizableBarrier", stale_read),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_breach_is_rejected(name: str, breach: Callable[[Invariants], None]) -> None:
    with pytest.raises(InvariantViolation) as caught:
        breach(Invariants())
    assert caught.value.name == name


def test_what_is_right_is_accepted() -> None:
    invariants = Invariants()
    invariants.leads(GROUP, A, 1)
    invariants.leads(GROUP, A, 1)
    invariants.leads(GROUP, B, 2)
    committed(invariants)
    invariants.committed(GROUP, B, 5, X, VOTERS, 1)
    invariants.holds_committed(GROUP, B, 2, lambda _: X)
    # Elected in an earlier term and told late: what was committed since is not its matter.
    invariants.holds_committed(GROUP, C, 1, lambda end: GENESIS if end == 0 else None)
    assert invariants.starts_at(GROUP, C, 0) == GENESIS
    assert invariants.starts_at(GROUP, C, 5) == X
    invariants.barrier(GROUP, 5, 5)
    invariants.changes_voters(GROUP, A, (A, B), (A, B, C), is_settled=True, answering=VOTERS)
    invariants.changes_voters(GROUP, A, (A, B), (A, B, C), is_settled=True, answering=[A, B])
    invariants.changes_voters(GROUP, A, (A, B, C), (A, B), is_settled=True, answering=[A, B])
    invariants.changes_voters(GROUP, A, (A, B), (A, B), is_settled=True, answering=[A])
    invariants.changes_voters(GROUP, A, (A, B), (A, B), is_settled=True, answering=VOTERS)
    invariants.booted(GROUP, A, A, 5, 6)
    # Torn above its claim and not mended since: nothing was promised, and later ones were written.
    invariants.opened(GROUP, A, 9, [4], known=[(4, 6)])
    invariants.opened(GROUP, A, 5, [5, 9])
    invariants.opened(GROUP, A, 5, [])


def test_a_mistake_of_the_simulation_is_not_taken_for_one_of_the_product() -> None:
    with pytest.raises(AssertionError) as product:
        quorum_end([])
    assert name_of_finding(product.value) == "AssertionError"
    with pytest.raises(KeyError) as own:
        SimDisk(Random(1)).content("nothing")
    assert name_of_finding(own.value) == OWN_MISTAKE
