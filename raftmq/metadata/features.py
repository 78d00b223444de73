"""Features with levels (as KIP-584): what all nodes of a cluster can do, agreed on in its metadata.

A broker registers the ranges that its version supports. A command finalizes a level once every
registered broker supports it; from then on nodes may write what came with that level, and a broker
that does not support it cannot be part of the cluster. Owns names, ranges and rules; `apply.py`
keeps the levels, `controller.py` decides requests.

`raftmq.level` covers everything that nodes store or say together: metadata commands and snapshots
(a version of theirs is a level), and formats between nodes. 1: all that nodes of peer format 5
know; 2: levels themselves, snapshots that hold them, and journals that hold each record twice; 3:
transactions; 4: moves of replicas that are planned and cancelled, and states of nodes; 5: rules of
who may do what, and users; 6: topics that shrink, and views over what they retire;
7: delay topics; 8: views with conditions; 9: topics that shrink get aliases, what is known of
producers outlives a partition, nodes say on whose behalf they ask the controller, delay topics
without retries have dead topics, and what targets do not take for long comes to dead topics.
`transaction.version` tells clients which protocol to speak (2: KIP-890's); what a
broker does goes by the version of each request, never by this level.

Invariants: what `apply.py` uses of this module depends on the image alone, never on what this
version supports, and never changes its meaning, since nodes of several versions apply the same
commands. At level 1 nothing is applied otherwise than before there were levels. Each level of
`raftmq.level` has a peer format of its own, so nodes that do not support it are refused when they
connect, before they are sent anything that they cannot read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from raftmq.errors import AheadError, ErrorCode
from raftmq.metadata.broker_messages import (
    FORMAT_MAX,
    FeatureRequest,
    Outcome,
    Outcomes,
    UpdateFeaturesCall,
)
from raftmq.metadata.commands import FeatureUpdate, UpdateFeatures
from raftmq.metadata.image import LEVEL_OF_TRANSACTIONS, RAFTMQ_LEVEL, MetadataImage

Range = tuple[int, int]
Ranges = Mapping[str, Range]

TRANSACTION_VERSION: Final = "transaction.version"
SUPPORTED: Final[dict[str, Range]] = {RAFTMQ_LEVEL: (1, 9), TRANSACTION_VERSION: (0, 2)}
"""What this version supports: the lowest and the highest level of each feature."""
FORMATS: Final = {1: 5, 2: 6, 3: 7, 4: 8, 5: 9, 6: 10, 7: 11, 8: 12, 9: 13}
"""The oldest format that nodes speak to each other at each level of `raftmq.level`."""
LEVEL_OF_WITNESSED_JOURNALS: Final = 2
"""From it on journals of hard states may have format 2, which earlier versions refuse."""
UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = 1, 2, 3
LEVEL_MAX: Final = (1 << 15) - 1
_BEFORE_LEVELS: Final[dict[str, Range]] = {RAFTMQ_LEVEL: (1, 1)}
_NAMED: Final = re.compile(r"([a-z][a-z.]{0,60}):([0-9]{1,5})-([0-9]{1,5})")

StoredNeed = Callable[[MetadataImage], int]
STORED_NEEDS: Final[dict[str, StoredNeed]] = {}
"""The least level that what is stored needs, by feature; 0 for those that are not named. Never
asked for `raftmq.level`: commands of a level stay in the log."""


class UnsupportedLevelError(AheadError):
    """The cluster's level of a feature is none that this version supports."""


# ---- what a broker registers ----


def named(ranges: Ranges) -> tuple[str, ...]:
    """Ranges as they are registered."""
    return tuple(f"{name}:{low}-{high}" for name, (low, high) in sorted(ranges.items()))


def ranges_of(features: Iterable[str]) -> dict[str, Range]:
    """The ranges that a broker registered; nodes from before there were levels name none."""
    ranges = dict(_BEFORE_LEVELS)
    for text in features:
        if (match := _NAMED.fullmatch(text)) is not None:
            ranges[match[1]] = int(match[2]), int(match[3])
    return ranges


# ---- rules that commands are applied by ----


def outside(levels: Mapping[str, int], ranges: Ranges) -> str:
    """Say which of these levels is outside of the supported ranges; "" when none is."""
    for name in sorted(levels):
        low, high = ranges.get(name, (0, 0))
        if not low <= levels[name] <= high:
            span = f"{low} to {high}" if high else "none"
            return f"{name} is {levels[name]}, supported: {span}"
    return ""


def changed(image: MetadataImage, updates: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The finalized levels after these updates; level 0 means that a feature is not finalized."""
    levels = {**image.features, **dict(updates)}
    return {name: level for name, level in levels.items() if level}


def update_error(image: MetadataImage, updates: Sequence[tuple[str, int]]) -> str:
    """Say why these levels cannot be finalized; "" when they can."""
    for name, level in updates:
        if not 0 <= level <= LEVEL_MAX:
            return f"there is no level {level} of {name}"
        if name == RAFTMQ_LEVEL and level < image.level:
            return f"{name} is {image.level}, and never lowered: commands of that level are stored"
        for node_id in sorted(image.brokers):
            low, high = ranges_of(image.brokers[node_id].features).get(name, (0, 0))
            if level and not low <= level <= high:
                span = f"supports {low} to {high}" if high else "does not know it"
                return f"{name} cannot be {level}: broker {node_id} {span}"
    levels = changed(image, updates)
    if levels.get(RAFTMQ_LEVEL, 1) < 2:
        return f"{RAFTMQ_LEVEL} is 1: it has to be 2 before levels can be stored"
    if TRANSACTION_VERSION in levels and levels[RAFTMQ_LEVEL] < LEVEL_OF_TRANSACTIONS:
        return f"{TRANSACTION_VERSION} needs {RAFTMQ_LEVEL} {LEVEL_OF_TRANSACTIONS}"
    return ""


# ---- rules of this version ----


def check_supported(image: MetadataImage, ranges: Ranges) -> None:
    """Check that this version supports all levels of the cluster.

    Raises:
        UnsupportedLevelError: it does not support one.
    """
    if reason := outside(image.features, ranges):
        raise UnsupportedLevelError(f"{reason} by this version")


def write_error(kind: str, version: int, image: MetadataImage) -> str:
    """Say why a command of this version may not be written yet; "" when it may."""
    if version <= image.level:
        return ""
    return (
        f"{kind} needs {RAFTMQ_LEVEL} {version}, this cluster is at {image.level}: once all nodes "
        f"run this version, `raftmq cluster features --raise {RAFTMQ_LEVEL}={version}`"
    )


def first_levels(ranges: Ranges, formats: Iterable[int]) -> tuple[FeatureUpdate, ...]:
    """The levels that a new cluster begins with: the newest ones.

    Args:
        ranges: what its first controller supports.
        formats: the newest format of each node that is reached, so that an older version among them
            is not turned away from the cluster that it forms.
    """
    spoken, highest = min(formats, default=FORMAT_MAX), ranges[RAFTMQ_LEVEL][1]
    level = max(level for level, least in FORMATS.items() if level <= highest and least <= spoken)
    if level == 1:
        return ()
    newest = {name: high for name, (_, high) in sorted(ranges.items())} | {RAFTMQ_LEVEL: level}
    if level < LEVEL_OF_TRANSACTIONS:
        newest.pop(TRANSACTION_VERSION, None)
    return tuple(FeatureUpdate(name, newest[name]) for name in newest)


def plan_features(
    image: MetadataImage, ranges: Ranges, request: UpdateFeaturesCall
) -> tuple[UpdateFeatures | None, Outcomes]:
    """The command for a client's request, and the outcome of each feature.

    Args:
        ranges: what the controller supports; `update_error` looks at the other brokers.
    """
    updates = [(update.name, update.level) for update in request.updates]
    errors = {update.name: _request_error(image, ranges, update) for update in request.updates}
    if len(errors) < len(updates):
        return None, tuple(_refused(name, "named more than once") for name in errors)
    if any(errors.values()):
        others = "nothing was changed, since another feature was refused"
        return None, tuple(_refused(name, errors[name] or others) for name in errors)
    done = tuple(Outcome(name=name) for name in errors)
    if all(image.feature_level(name) == level for name, level in updates):
        return None, done
    if reason := update_error(image, updates):
        return None, tuple(_refused(name, reason) for name in errors)
    if request.validate_only:
        return None, done
    return UpdateFeatures(updates=tuple(FeatureUpdate(*update) for update in updates)), done


def _request_error(image: MetadataImage, ranges: Ranges, request: FeatureRequest) -> str:
    """Say why a level is refused before brokers are asked; "" when it is not."""
    name, level, now = request.name, request.level, image.feature_level(request.name)
    if request.upgrade_type not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        return f"there is no upgrade type {request.upgrade_type}"
    if name not in ranges:
        return f"{name} is no feature of this version"
    if level < now and request.upgrade_type == UPGRADE:
        return f"{name} is {now}: lowering it to {level} wants a downgrade"
    if level > now and request.upgrade_type != UPGRADE:
        return f"{name} is {now}: raising it to {level} is no downgrade"
    need = STORED_NEEDS[name](image) if name in STORED_NEEDS else 0
    if level < min(need, now):
        return f"{name} cannot be {level}: what is stored needs {need}"
    return ""


def _refused(name: str, reason: str) -> Outcome:
    return Outcome(name=name, code=ErrorCode.INVALID_UPDATE_VERSION, message=reason)
