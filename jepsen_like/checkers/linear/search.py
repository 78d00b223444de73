"""The search for a linearization.

Wing and Gong's backtracking over operations that may come next, with two things of Lowe's ("Testing
for linearizability", 2017): configurations that were tried are remembered, and operations are put
in order just in time, that is when one of them returns and has to stand in the order by then. A
configuration is (next return, operations under way that were already ordered, state).

What keeps it small, and why nothing is missed by it:

- A read that the present state allows is taken at once: it changes nothing, so any order in which
  it comes later is one in which it comes now.
- Of equal operations under way the one that returns first is taken first; they are interchangeable.
- An operation without an end (`info`) may never have happened. It is tried last, and not at all
  where it would change nothing or nobody could tell; as a read it is left out by whoever builds
  the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

from attrs import define, field, frozen

FOREVER = 1 << 62
STEPS_MAX = 2_000_000
ASK_EVERY = 1024

State = Hashable
Action = Hashable


class Model(Protocol):
    """A sequential object. States and actions are hashable; an action includes its answer."""

    @property
    def initial(self) -> State:
        """Where it begins."""
        ...

    def step(self, state: State, action: Action) -> State | None:
        """The state after `action`; None where it cannot happen, or not with that answer."""
        ...

    @property
    def overwrites(self) -> bool:
        """True where the state after a write does not depend on the one before, nor whether it can
        happen: then a write that may not have happened matters only to a read of just its state."""
        ...


@frozen(eq=False)
class Call:
    """One operation on one object; `begin` and `end` are moments, `end` FOREVER if unknown."""

    op: int
    action: Action
    begin: int
    end: int = FOREVER
    is_read: bool = False
    """Its step never changes the state."""

    def __str__(self) -> str:
        action = self.action
        said = " ".join(map(str, action)) if isinstance(action, tuple) else str(action)
        return f"op {self.op} ({said}{'' if self.end < FOREVER else ', unknown'})"


@frozen
class Failure:
    """Where every order ends: nothing explains `call`, which is the return number `at`."""

    call: Call
    at: int
    states: tuple[State, ...]


@frozen
class Found:
    """What came of a search: True, False or None where it was given up."""

    is_linearizable: bool | None
    steps: int
    failure: Failure | None = None
    order: tuple[Call, ...] = ()
    """One order that explains all, of a history that has one."""


@define(eq=False)
class Moment:
    """One return, and what is under way just before it."""

    call: Call
    bit: int
    writes: tuple[int, ...]
    """Certain writes under way, the next to return first; itself among them if it is one."""
    reads: tuple[int, ...]
    unknown_count: int
    """How many operations without an end have begun."""
    is_quiet: bool
    """Nothing certain was under way just before the earliest that is now."""


@define(eq=False)
class Plan:
    """Calls turned into moments; a bit per call under way, used again after its return."""

    calls: list[Call]
    moments: list[Moment] = field(factory=list)
    bits: list[int] = field(factory=list)
    unknown: list[int] = field(factory=list)
    twins: dict[int, int] = field(factory=dict)
    """By operation without an end: the one before it with the same action, to be taken first."""


def make_plan(calls: Sequence[Call]) -> Plan:
    """Lay out which calls are under way at each return."""
    ordered = sorted(calls, key=lambda call: call.begin)
    plan = Plan(ordered, bits=[0] * len(ordered))
    returns = sorted(
        (index for index, call in enumerate(ordered) if call.end < FOREVER),
        key=lambda index: ordered[index].end,
    )
    free: list[int] = []
    slots = 0
    begun = 0
    last_of: dict[Action, int] = {}
    under_way: dict[int, None] = {}
    for returning in returns:
        is_quiet = not under_way
        while begun < len(ordered) and ordered[begun].begin < ordered[returning].end:
            if free:
                slot = free.pop()
            else:
                slot, slots = slots, slots + 1
            plan.bits[begun] = 1 << slot
            if ordered[begun].end < FOREVER:
                under_way[begun] = None
            else:
                twin = last_of.get(ordered[begun].action)
                if twin is not None:
                    plan.twins[begun] = twin
                last_of[ordered[begun].action] = begun
                plan.unknown.append(begun)
            begun += 1
        now = sorted(under_way, key=lambda index: ordered[index].end)
        plan.moments.append(
            Moment(
                ordered[returning],
                plan.bits[returning],
                tuple(index for index in now if not ordered[index].is_read),
                tuple(index for index in now if ordered[index].is_read),
                len(plan.unknown),
                is_quiet,
            )
        )
        del under_way[returning]
        free.append(plan.bits[returning].bit_length() - 1)
    return plan


@define(eq=False)
class Branch:
    """A configuration with what is left to try in it."""

    at: int
    mask: int
    state: State
    choices: list[int]
    ordered: list[Call]
    """What was ordered to come here from the branch before."""


class Search:
    """One search over one object's calls."""

    def __init__(
        self,
        model: Model,
        calls: Sequence[Call],
        *,
        steps_max: int = STEPS_MAX,
        is_over: Callable[[], bool] | None = None,
    ) -> None:
        self.plan = make_plan(calls)
        self.quiet: dict[int, dict[tuple[int, State], None]] = {}
        """By return before which all was quiet: configurations that came there."""
        self._step = model.step
        self._initial = model.initial
        self._overwrites = model.overwrites
        self._steps_max = steps_max
        self._is_over = is_over
        self._steps = 0
        self._turns = 0
        self._tried: set[tuple[int, int, State]] = set()
        self._furthest = -1
        self._stuck: dict[State, None] = {}

    def run(self) -> Found:
        """Search until an order is found, none is left, or the bound is reached."""
        trail: list[Branch] = []
        branch = self._go_on(0, 0, self._initial, [], 0)
        while True:
            if branch is None:  # tried before, or a dead end
                while trail and not trail[-1].choices:
                    trail.pop()
                if not trail:
                    return Found(False, self._steps, self._failure())
            elif branch.at == len(self.plan.moments):
                order = [call for each in (*trail, branch) for call in each.ordered]
                return Found(True, self._steps, order=tuple(order))
            else:
                trail.append(branch)
            if self._must_stop():
                return Found(None, self._steps)
            branch = self._take(trail[-1]) if trail[-1].choices else None

    def _must_stop(self) -> bool:
        self._turns += 1
        if self._steps > self._steps_max:
            return True
        return self._is_over is not None and self._turns % ASK_EVERY == 0 and self._is_over()

    def _failure(self) -> Failure:
        call = self.plan.moments[self._furthest].call
        return Failure(call, self._furthest, tuple(self._stuck))

    def _take(self, branch: Branch) -> Branch | None:
        """Order the next choice of a branch and go on from there."""
        chosen = branch.choices.pop()
        call = self.plan.calls[chosen]
        self._steps += 1
        state = self._step(branch.state, call.action)
        assert state is not None, "choices are possible"
        moment = self.plan.moments[branch.at]
        if call is moment.call:
            return self._go_on(branch.at + 1, branch.mask, state, [call], branch.at + 1)
        mask = branch.mask | self.plan.bits[chosen]
        return self._go_on(branch.at, mask, state, [call], branch.at + 1)

    def _go_on(
        self, at: int, mask: int, state: State, ordered: list[Call], arrived: int
    ) -> Branch | None:
        """Pass all returns that need no choice; None where this was tried before.

        Returns from `arrived` on are new to this order; before that one it had begun to choose.
        """
        moments, step = self.plan.moments, self._step
        while at < len(moments):
            moment = moments[at]
            if moment.is_quiet and at >= arrived:
                self.quiet.setdefault(at, {})[mask, state] = None
            if mask & moment.bit:
                mask &= ~moment.bit
                at += 1
                continue
            if not moment.call.is_read:
                break
            self._steps += 1
            if step(state, moment.call.action) is None:
                break
            ordered.append(moment.call)
            at += 1
        else:
            return Branch(at, mask, state, [], ordered)
        mask = self._take_reads(moments[at], mask, state, ordered)
        key = (at, mask, state)
        if key in self._tried:
            return None
        self._tried.add(key)
        if at > self._furthest:
            self._furthest = at
            self._stuck.clear()
        if at == self._furthest:
            self._stuck[state] = None
        return Branch(at, mask, state, self._choices(moments[at], mask, state), ordered)

    def _take_reads(self, moment: Moment, mask: int, state: State, ordered: list[Call]) -> int:
        for index in moment.reads:
            bit = self.plan.bits[index]
            call = self.plan.calls[index]
            if mask & bit or call is moment.call:
                continue
            self._steps += 1
            if self._step(state, call.action) is not None:
                mask |= bit
                ordered.append(call)
        return mask

    def _choices(self, moment: Moment, mask: int, state: State) -> list[int]:
        """Writes that may come next, the best guess last."""
        calls, bits, step = self.plan.calls, self.plan.bits, self._step
        good: list[int] = []
        poor: list[int] = []
        seen: set[Action] = set()
        for index in moment.writes:
            action = calls[index].action
            if mask & bits[index] or action in seen:
                continue
            seen.add(action)
            self._steps += 1
            after = step(state, action)
            if after is not None:
                (good if self._allows(moment, after) else poor).append(index)
        unknown: list[int] = []
        for index in self.plan.unknown[: moment.unknown_count]:
            if mask & bits[index]:
                continue
            twin = self.plan.twins.get(index)
            if twin is not None and not mask & bits[twin]:
                continue
            self._steps += 1
            after = step(state, calls[index].action)
            if after is None or after == state:
                continue
            if self._overwrites and not self._is_awaited(moment, mask, after):
                continue
            (poor if self._allows(moment, after) else unknown).append(index)
        return [*reversed(unknown), *reversed(poor), *reversed(good)]

    def _is_awaited(self, moment: Moment, mask: int, state: State) -> bool:
        """True where a read under way would be explained by `state`."""
        for index in moment.reads:
            if not mask & self.plan.bits[index]:
                self._steps += 1
                if self._step(state, self.plan.calls[index].action) is not None:
                    return True
        return False

    def _allows(self, moment: Moment, state: State) -> bool:
        """True where the returning read would be explained by `state`."""
        if not moment.call.is_read:
            return True
        self._steps += 1
        return self._step(state, moment.call.action) is not None
