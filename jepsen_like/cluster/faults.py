"""What is to strike in a run, when, and what it should come to: drawn from the seed beforehand."""

from __future__ import annotations

from random import Random

from jepsen_like.cluster.world import ClusterWorld, Fault

STEPS: dict[str, tuple[tuple[str, str], ...]] = {
    "segment roll": (("create", ".log"),),
    "truncation": (("truncate", ".log"),),
    "bare entry": (("write", "bare.entries"), ("truncate", "bare.entries")),
    "log start": (("create", "log-start.tmp"), ("rename", "log-start"), ("write", "log-start")),
    "snapshot": (("create", "meta/log-start.tmp"), ("rename", "meta/log-start")),
    "journal": (("create", "state.journal.tmp"), ("rename", "state.journal")),
    "retention": (("remove", ".log"),),
    "index": (("create", ".index"), ("write", ".timeindex")),
    "repair": (("create", ".log.tmp"), ("create", ".fill.tmp")),
}
"""Operations of several changes to the disk, and the changes that belong to them alone."""
SELDOM = ("snapshot", "retention")
"""Those of them that a run comes to least often."""
EFFECTS = (
    "lost in a cut",
    "lost in a storm",
    "metadata kept back",
    "clients cut off",
    "done late",
    "flushed slowly",
    "no space",
    "sync failed",
    "power lost in the middle",
    "killed in the middle",
    *(f"in the middle of: {name}" for name in (*STEPS, "change")),
    "shut down",
    "crashed after voting",
    "came to rest",
    "handed over",
    "records deleted",
    "replaced",
    "folder lost",
    "segment lost",
    "index spoilt",
    "one copy spoilt",
    "promise spoilt",
    "spoilt everywhere",
)
"""What strikes are for; that one struck does not mean that there was anything to strike."""
LONGEST = 8
"""A safety phase goes on for so many times its length at most, where too little happened in it."""


ENDS = ("crash", "crash-leader", "crash-controller", "kill")
CRASHES_MIN = 4
"""A run with fewer says little; so many come early, where the odds know of any."""


def draw_faults(world: ClusterWorld) -> list[Fault]:
    """What is to strike in this run, and when."""
    options = world.options
    random = Random(f"cluster nemesis {world.seed}")
    low, high = options.fault_every_ms
    names = [name for name, _ in options.weights]
    weights = [weight for _, weight in options.weights]
    crashes = [name for name, weight in options.weights if weight > 0 and name in ENDS]
    faults: list[Fault] = []
    at_ms = 300.0
    while any(weights):
        at_ms += random.uniform(low, high)
        if at_ms >= LONGEST * options.safety_ms:
            break
        is_due = len(faults) % 4 == 1 and sum(f.name in ENDS for f in faults) < CRASHES_MIN
        name = random.choices(names, weights)[0]
        if is_due and crashes:
            name = random.choice(crashes)
        faults.append(Fault(at_ms, name, random.getrandbits(48)))
    return faults
