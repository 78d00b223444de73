"""Planted bugs: each must be caught, or the simulation is too kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from attrs import define

from jepsen_like.cluster.commands_watch import CommandsWatch, _Listener
from jepsen_like.cluster.run import Verdict
from jepsen_like.invariants import BlindInvariants, Invariants, InvariantViolation
from jepsen_like.planted import BUGS, hunt, hunt_with
from raftmq.metadata.apply import STALE_SEQUENCE
from raftmq.metadata.commands import Envelope, GroupMember, NoOperation
from raftmq.metadata.image import GroupImage, GroupsImage
from raftmq.metadata.results import GroupDone
from raftmq.metadata.transactions import NO_TRANSACTIONS
from raftmq.types import NodeId, Offset


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught(name: str) -> None:
    catch = hunt(name, seeds=200)
    assert catch.is_caught, str(catch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "ack-before-fsync",
        "agreeing-suffix-truncated",
        "damage-served-to-clients",
        "half-is-a-majority",
        "nothing-was-aborted",
        "read-without-quorum",
        "rubbish-ends-the-node",
        "snapshot-without-groups",
    ],
)
def test_a_planted_bug_is_caught_soon(name: str) -> None:
    """One for each of eight promises, that a few seeds find; all of them are for the soak, and for
    `python -m jepsen_like planted`, which CI runs."""
    catch = hunt(name, seeds=10)
    assert catch.is_caught, str(catch)


# ---- the hunt itself ----


@define
class Run:
    """What a hunt is told of a run."""

    verdict: Verdict
    name: str


class Product:
    """Has a bug while one is planted, and perhaps another all the time."""

    def __init__(self, *, is_always_bad: bool = False) -> None:
        self.is_planted = False
        self.is_always_bad = is_always_bad

    @contextmanager
    def plant(self) -> Iterator[None]:
        self.is_planted = True
        yield
        self.is_planted = False

    def run(self, seed: int) -> Run:
        if self.is_planted and seed == 2:
            return Run(Verdict.ANOMALY, "SomethingElse")
        if (self.is_planted or self.is_always_bad) and seed >= 3:
            return Run(Verdict.ANOMALY, "Named")
        return Run(Verdict.CLEAN, "")


def test_only_what_is_named_counts_as_caught() -> None:
    product = Product()
    catch = hunt_with("bug", product.plant, ("Named",), product.run, range(1, 9))
    assert (catch.is_caught, catch.seeds, catch.found) == (True, 3, "Named")
    assert catch.others == ("SomethingElse at 2",)
    assert "caught at seed 3 by Named" in str(catch)
    assert not hunt_with("bug", product.plant, ("Other",), product.run, range(1, 9)).is_caught


def test_a_seed_that_is_not_clean_without_the_bug_shows_nothing() -> None:
    product = Product(is_always_bad=True)
    catch = hunt_with("bug", product.plant, ("Named",), product.run, range(1, 9))
    assert not catch.is_caught
    assert "NOT CLEAN without it" in str(catch)


def test_a_hunt_ends_in_time() -> None:
    product, seconds = Product(), iter(range(0, 1000, 25))
    catch = hunt_with(
        "bug", product.plant, ("None",), product.run, range(1, 99), clock=lambda: next(seconds)
    )
    assert not catch.is_caught
    assert catch.seeds == 2
    assert "ESCAPED 2 seeds" in str(catch)


# ---- invariants of commands ----


def _envelope(sequence: int) -> Envelope:
    return Envelope(
        version=1, node_id=NodeId(1), incarnation=7, sequence=sequence, command=NoOperation()
    )


def test_a_command_takes_effect_once() -> None:
    watch = CommandsWatch(Invariants())
    watch.applied(_envelope(1), GroupDone(), Offset(5))
    watch.applied(_envelope(1), GroupDone(), Offset(5))  # another node applies the same
    watch.applied(_envelope(1), STALE_SEQUENCE, Offset(6))
    watch.applied(_envelope(2), GroupDone(), Offset(7))
    with pytest.raises(InvariantViolation, match="CommandsApplyOnce"):
        watch.applied(_envelope(1), GroupDone(), Offset(8))
    blind = CommandsWatch(BlindInvariants())
    blind.applied(_envelope(1), GroupDone(), Offset(5))
    blind.applied(_envelope(1), GroupDone(), Offset(8))


_MEMBER = GroupMember(member_id="m", session_timeout_ms=1, rebalance_timeout_ms=1)


def _groups(*names: str, members: int = 0) -> GroupsImage:
    image = GroupsImage()
    for name in names:
        group = GroupImage(name, members=(_MEMBER,) * members)
        image = attrs.evolve(image, groups=image.groups.set(name, group))
    return image


def _image(groups: GroupsImage) -> Any:
    return SimpleNamespace(groups=groups, transactions=NO_TRANSACTIONS)


def test_a_group_is_forgotten_once_and_only_when_it_is_empty() -> None:
    told: list[str] = []
    watch = CommandsWatch(Invariants(), told.append)
    for offset in (5, 5, 9):
        watch.forgot_group("g", Offset(offset))
    assert told == ["g", "g"], "of two lives, each told by the first node that applied its end"
    watch.groups_changed(_groups("a", "b"), _groups("b"))
    watch.groups_changed(_groups("a", members=1), _groups("a"))
    with pytest.raises(InvariantViolation, match="GroupsEndEmpty: a had 1 members"):
        watch.groups_changed(_groups("a", members=1), _groups())


def test_groups_are_judged_command_by_command() -> None:
    """The last member left and the group was forgotten before an image was published, so the one
    before had members, and the one after not the group (seed 9100023)."""
    machine: Any = SimpleNamespace(image=_image(_groups("a", members=1)))
    listener = _Listener(CommandsWatch(Invariants()), machine)
    before = machine.image
    for sequence, groups in enumerate((_groups("a"), _groups())):
        machine.image = _image(groups)
        listener.command_applied(_envelope(sequence), GroupDone(), Offset(sequence))
    listener.image_changed(before, machine.image)
    machine.image = before
    listener.state_restored(before)
    machine.image = _image(_groups())
    with pytest.raises(InvariantViolation, match="GroupsEndEmpty: a had 1 members"):
        listener.command_applied(_envelope(3), GroupDone(), Offset(3))
