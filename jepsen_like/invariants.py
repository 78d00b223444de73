"""What must hold at every moment of a run, checked as it happens.

    SingleLeaderPerTerm           at most one replica leads a term (Raft §5.2)
    OneControllerPerEpoch         the same of the metadata group
    LogMatching                   same position and term: same log up to there (§5.3)
    LeaderCompleteness            a leader holds everything committed before (§5.4)
    MonotonicHighWatermark        within a replica it never falls; what is below never changes
    CommittedIsDurableAtMajority  what is committed is flushed at a majority of the voters
    LeaderCommitsOwnTerm          a leader counts copies of no entry before its election's (§5.4.2)
    FlushedSurvives               after a crash a log reaches at least as far as it was flushed
    CrashKeepsIdentity            a crash alone never makes a replica a stranger to its group
    OneChangeAtATime              a leader changes one voter, on top of what is committed
    ChangeKeepsQuorum             a majority of the voters after a change answer its leader
    LinearizableBarrier           a read barrier covers all that was committed before it

Logs are compared by a chain of digests, one per entry, so that one comparison covers a whole
prefix. The truth is what the first replica to commit a position held there. Observes only; never
steers the run. A breach raises `InvariantViolation` on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Final

from attrs import define, field

from raftmq.errors import ContainedError
from raftmq.raft.membership import majority
from raftmq.types import METADATA_GROUP, RaftGroupId, ReplicaId

OWN_MISTAKE: Final = "OwnMistake"


def name_of_finding(error: BaseException) -> str:
    """What an escaped exception is called: by its class where the product raised it. What the
    simulation itself stumbled over is another matter, and never counts as having caught a bug."""
    if isinstance(error, ContainedError) and error.__cause__ is not None:
        error = error.__cause__  # which stopped a replica alone
    frame = None
    trace = error.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    return OWN_MISTAKE if module.partition(".")[0] == "jepsen_like" else type(error).__name__


class InvariantViolation(Exception):  # a verdict on the product, not an error of ours
    """An invariant was broken."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


GENESIS = b"\0" * 8


def chain(previous: bytes, entry: bytes) -> bytes:
    """The digest of a log that goes on with `entry`."""
    return blake2b(entry, digest_size=8, key=previous).digest()


@define(slots=True)
class DurableView:
    """How far one identity's log is flushed, and its digest there."""

    flushed_end: Callable[[], int]
    digest_at: Callable[[int], bytes | None]


@define(slots=True)
class GroupTruth:
    """What is known for certain of one group."""

    group: RaftGroupId
    leaders: dict[int, ReplicaId] = field(factory=dict)
    seen: dict[tuple[int, int], bytes] = field(factory=dict)
    begin: int = 0
    committed: dict[int, bytes] = field(factory=lambda: {0: GENESIS})
    commit_end: int = 0
    commit_end_by_term: dict[int, int] = field(factory=dict)
    views: dict[ReplicaId, DurableView] = field(factory=dict)


class Invariants:
    """All invariants of one run."""

    def __init__(self) -> None:
        self.groups: dict[RaftGroupId, GroupTruth] = {}

    def breach(self, name: str, detail: str) -> None:
        """Something else that must hold does not."""
        raise InvariantViolation(name, detail)

    def truth(self, group: RaftGroupId) -> GroupTruth:
        """What is known of a group."""
        found = self.groups.get(group)
        if found is None:
            found = self.groups[group] = GroupTruth(group)
        return found

    def leads(self, group: RaftGroupId, replica: ReplicaId, term: int) -> None:
        """A replica says that it leads a term."""
        truth = self.truth(group)
        other = truth.leaders.setdefault(term, replica)
        if other != replica:
            is_metadata = group == METADATA_GROUP
            self.breach(
                "OneControllerPerEpoch" if is_metadata else "SingleLeaderPerTerm",
                f"{group}: {other} and {replica} both lead term {term}",
            )

    def holds_committed(
        self,
        group: RaftGroupId,
        replica: ReplicaId,
        term: int,
        digest_at: Callable[[int], bytes | None],
    ) -> None:
        """A new leader must hold everything committed in earlier terms.

        Not in later ones: it may learn of its election when another term has long begun.
        """
        truth = self.truth(group)
        ends = [end for earlier, end in truth.commit_end_by_term.items() if earlier < term]
        end = max(ends, default=truth.begin)
        if digest_at(end) != truth.committed[end]:
            self.breach(
                "LeaderCompleteness",
                f"{group}: leader {replica} of term {term} lacks what is committed at {end}",
            )

    def appended(
        self, group: RaftGroupId, replica: ReplicaId, end: int, term: int, digest: bytes
    ) -> None:
        """A replica's log now has an entry of `term` that ends at `end`."""
        known = self.truth(group).seen.setdefault((end, term), digest)
        if known != digest:
            self.breach("LogMatching", f"{group}: {replica} differs before {end} of term {term}")

    def committed(
        self,
        group: RaftGroupId,
        replica: ReplicaId,
        end: int,
        digest: bytes | None,
        voters: tuple[ReplicaId, ...],
        term: int,
    ) -> None:
        """A replica takes everything below `end` for committed."""
        truth = self.truth(group)
        known = truth.committed.get(end)
        if known is not None and digest is not None and known != digest:
            self.breach(
                "MonotonicHighWatermark", f"{group}: {replica} committed other entries at {end}"
            )
        if end <= truth.commit_end:
            return
        if digest is None:
            self.breach(
                "MonotonicHighWatermark", f"{group}: {replica} committed {end} and lacks it"
            )
            return
        durable = [v for v in voters if self._is_durable(truth, v, end, digest)]
        if len(durable) < len(voters) // 2 + 1:
            self.breach(
                "CommittedIsDurableAtMajority",
                f"{group}: {end} is committed and flushed only at {[str(v) for v in durable]}",
            )
        truth.committed[end] = digest
        truth.commit_end = truth.commit_end_by_term[term] = end

    def knows_committed(self, group: RaftGroupId, ends: list[tuple[int, bytes]]) -> None:
        """The entries below a commit, so that later commits at their ends can be compared."""
        committed = self.truth(group).committed
        for end, digest in ends:
            if committed.setdefault(end, digest) != digest:
                self.breach(
                    "MonotonicHighWatermark", f"{group}: committed entries changed at {end}"
                )

    def begins_at(self, group: RaftGroupId, end: int) -> None:
        """The group goes on where another one ended: nothing of its own stands before `end`."""
        truth = self.truth(group)
        truth.committed.setdefault(end, GENESIS)
        truth.begin, truth.commit_end = end, max(truth.commit_end, end)

    def starts_at(self, group: RaftGroupId, replica: ReplicaId, end: int) -> bytes:
        """A replica's log begins at `end`: what stood before was committed by somebody. Returns the
        digest of that."""
        known = self.truth(group).committed.get(end)
        if known is None:
            told = f"{group}: {replica} begins at {end}, where nobody committed"
            self.breach("LogMatching", told)
        return known or GENESIS

    def leader_commits(
        self, group: RaftGroupId, replica: ReplicaId, end: int, term_start: int
    ) -> None:
        """A leader whose election entry lies at `term_start` commits `end`."""
        if end <= term_start:
            self.breach(
                "LeaderCommitsOwnTerm",
                f"{group}: {replica} commits {end}, its term begins at {term_start}",
            )

    def changes_voters(
        self,
        group: RaftGroupId,
        replica: ReplicaId,
        before: Sequence[ReplicaId],
        after: Sequence[ReplicaId],
        *,
        is_settled: bool,
        answering: Collection[ReplicaId],
    ) -> None:
        """A leader proposed other voters. `is_settled`: the ones before it and something of its own
        term are committed (Raft thesis §4.1, and the fix that followed it). `answering`: the leader
        and whom it heard within the least election timeout; with fewer than a majority of them
        among the new voters the group would stand still with the change."""
        if not is_settled or len({*before} ^ {*after}) > 1:
            why = "more than one at a time" if is_settled else "before the last change is committed"
            detail = f"{group}: {replica} changes {list(before)} to {list(after)}, {why}"
            self.breach("OneChangeAtATime", detail)
        alive = [voter for voter in after if voter in answering]
        if {*before} != {*after} and len(alive) < majority(len(after)):
            detail = f"{group}: {replica} changes {list(before)} to {list(after)}, {alive} answer"
            self.breach("ChangeKeepsQuorum", detail)

    def booted(
        self,
        group: RaftGroupId,
        before: ReplicaId,
        after: ReplicaId,
        flushed_end: int,
        log_end: int,
    ) -> None:
        """A replica came back from a crash that took nothing but power."""
        if before != after:
            self.breach("CrashKeepsIdentity", f"{group}: {before} came back as {after}")
        if log_end < flushed_end:
            self.breach(
                "FlushedSurvives",
                f"{group}: {after} had flushed up to {flushed_end}, now its log ends at {log_end}",
            )

    def opened(
        self,
        group: RaftGroupId,
        who: ReplicaId,
        claimed_offset: int,
        damaged: Sequence[int],
        known: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A replica came back on a disk whose bytes nobody spoilt, and something is damaged.

        Above its claim that may be a torn write; below it the claim was not true.

        Args:
            damaged: the offsets at which damage begins.
            known: ranges that its last process knew to be damaged: while they are not mended it
                promises nothing, and claims what it has written after them.
        """
        new = [at for at in damaged if not any(start <= at < end for start, end in known)]
        if new and new[0] < claimed_offset:
            self.breach(
                "ClaimsAreFlushed",
                f"{group}: {who} claims to have flushed up to offset {claimed_offset}, of which "
                f"{new[0]} is not there",
            )

    def barrier(self, group: RaftGroupId, index: int, known_end: int) -> None:
        """A read barrier begun when `known_end` was committed lets readers see up to `index`."""
        if index < known_end:
            self.breach(
                "LinearizableBarrier", f"{group}: a read at {index} misses up to {known_end}"
            )

    def _is_durable(self, truth: GroupTruth, voter: ReplicaId, end: int, digest: bytes) -> bool:
        view = truth.views.get(voter)
        if view is None or view.flushed_end() < end:
            return False
        held = view.digest_at(end)
        return held is None or held == digest  # None: below its log start, so committed before


class BlindInvariants(Invariants):
    """Follows the run and passes every breach over: what clients see has to tell."""

    def breach(self, name: str, detail: str) -> None:
        """Not seen."""
