"""From "no order exists" to the few operations that show it.

The part of the history that matters begins where last nothing was under way: there the search knows
every state that could have been, and ends at the return that no order reached past. Reads that are
not needed for the contradiction are dropped one by one; leaving a read out never makes a history
worse, so what remains contradicts itself too. Writes stay: without them
reads would miss their cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from jepsen_like.checkers.linear.search import FOREVER, Action, Call, Failure, Model, Search, State

WINDOW_MAX = 60
STARTS_MAX = 16
STEPS_MAX = 20_000
TOLD_MAX = 8


@frozen
class Begun:
    """A model that begins in another state."""

    model: Model
    initial: State

    @property
    def overwrites(self) -> bool:
        """As the model says."""
        return self.model.overwrites

    def step(self, state: State, action: Action) -> State | None:
        """As the model does."""
        return self.model.step(state, action)


@frozen
class Window:
    """What shows that no order exists."""

    call: Call
    states: tuple[State, ...]
    """What could have been the state when the window began."""
    calls: tuple[Call, ...]
    """What was under way in it, with all that is needed and little else."""

    @property
    def ops(self) -> tuple[int, ...]:
        """The operation that nothing explains first, then those around it."""
        others = (call.op for call in self.calls if call.op != self.call.op)
        return (self.call.op, *dict.fromkeys(others))[:TOLD_MAX]

    def __str__(self) -> str:
        states = " or ".join(map(str, self.states[:TOLD_MAX]))
        others = [str(call) for call in self.calls if call is not self.call]
        told = ", ".join(others[-TOLD_MAX:]) or "nothing"
        if len(others) > TOLD_MAX:
            told = f"{len(others) - TOLD_MAX} more, {told}"
        return f"no order explains {self.call}; state before: {states}; meanwhile: {told}"


def explain(model: Model, search: Search, failure: Failure) -> Window:
    """Cut a failed search down to a window."""
    plan = search.plan
    begin_at = max(at for at in search.quiet if at <= failure.at)
    starts = list(search.quiet[begin_at])
    begin = plan.moments[begin_at - 1].call.end if begin_at else -1
    window: list[Call] = []
    for index, call in enumerate(plan.calls):
        if call.begin > failure.call.end or call.end <= begin:
            continue
        is_used = all(mask & plan.bits[index] for mask, _ in starts)
        if call.end == FOREVER and call.begin < begin and is_used:
            continue
        if call.end > failure.call.end:
            if call.is_read:
                continue
            call = evolve(call, end=FOREVER)
        window.append(call)
    states = tuple(dict.fromkeys(state for _, state in starts))
    if len(window) <= WINDOW_MAX and len(states) <= STARTS_MAX:
        window = _drop_reads(model, states, window, failure.call)
    last = next((call for call in window if call.op == failure.call.op), failure.call)
    return Window(last, states, tuple(window))


def _drop_reads(model: Model, states: Sequence[State], calls: list[Call], last: Call) -> list[Call]:
    """Leave out each read without which the rest still has no order, whatever the state before."""
    if not _is_impossible(model, states, calls):
        return calls  # more is allowed here than in the whole: unknown operations that were used up
    for call in [call for call in calls if call.is_read and call.op != last.op]:
        fewer = [other for other in calls if other is not call]
        if _is_impossible(model, states, fewer):
            calls = fewer
    return calls


def _is_impossible(model: Model, states: Sequence[State], calls: Sequence[Call]) -> bool:
    return all(
        Search(Begun(model, state), calls, steps_max=STEPS_MAX).run().is_linearizable is False
        for state in states
    )
