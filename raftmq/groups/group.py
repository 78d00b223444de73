"""One consumer group as its coordinator sees it: the classic protocol's state machine.

Owns members, their parked JoinGroup and SyncGroup requests, and the deadlines. Pure: time comes in
as monotonic milliseconds, answers and commands go out by `take_effects`, and the coordinator
performs them *after* a step is complete. It never says that a generation stands: SyncGroup stays
parked until the `Generation` command with its assignments was applied (`generation_applied`).

Invariants: the phase changes only as TRANSITIONS allows, in `_enter`; the generation only rises; a
parked request is answered exactly once; in CompletingRebalance no member knows its assignment.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define, field

from raftmq.errors import ErrorCode
from raftmq.groups.model import (
    TRANSITIONS,
    Effects,
    GroupConfig,
    JoinedMember,
    JoinRequest,
    JoinResult,
    Member,
    Phase,
    SyncResult,
    common_protocols,
)
from raftmq.groups.offsets import is_same_subscription
from raftmq.metadata.commands import Generation, GroupMember, ReplaceMember
from raftmq.metadata.image import GroupImage
from raftmq.promise import Promise


@define(slots=True, eq=False)
class Group:
    """One group while this node coordinates it."""

    name: str
    config: GroupConfig
    coordinator_epoch: int = 0
    phase: Phase = Phase.EMPTY
    generation: int = 0
    protocol_type: str = ""
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(factory=dict)  # in the order in which they came
    pending: dict[str, float] = field(factory=dict)  # ids given out, with their deadlines
    quiet_since_ms: float = 0.0
    _join_at_ms: float | None = None  # an empty group waits for more members (KIP-134)
    _has_grown: bool = False
    _rebalance_by_ms: float = 0.0
    _sync_by_ms: float | None = None
    _stored_generation: int = 0  # the last one that the metadata group knows
    _effects: Effects = field(factory=Effects)

    @classmethod
    def load(cls, state: GroupImage, config: GroupConfig, now_ms: float) -> Group:
        """Go on with a persisted generation; every member gets a full session timeout."""
        group = cls(
            state.name,
            config,
            coordinator_epoch=state.coordinator_epoch,
            phase=Phase.STABLE if state.members else Phase.EMPTY,
            generation=state.generation,
            protocol_type=state.protocol_type,
            protocol=state.protocol,
            leader=state.leader,
            quiet_since_ms=now_ms,
        )
        group._stored_generation = state.generation
        for saved in state.members:
            request = JoinRequest(
                saved.member_id,
                saved.instance_id,
                saved.client_id,
                saved.client_host,
                saved.session_timeout_ms,
                saved.rebalance_timeout_ms,
                state.protocol_type,
                ((state.protocol or "", saved.subscription),),
            )
            member = Member(saved.member_id, request, assignment=saved.assignment, is_new=False)
            member.has_synced = True
            member.hear(now_ms)
            group.members[saved.member_id] = member
        return group

    def take_effects(self) -> Effects:
        """What the last steps left for the coordinator to do."""
        effects, self._effects = self._effects, Effects()
        return effects

    def static_member(self, instance_id: str) -> Member | None:
        """The member of that group.instance.id."""
        for member in self.members.values():
            if member.instance_id == instance_id:
                return member
        return None

    # ---- joining ----

    def join(self, request: JoinRequest, new_id: str, now_ms: float) -> Promise[JoinResult]:
        """A consumer wants to be a member; `new_id` is its id should it need one."""
        promise: Promise[JoinResult] = Promise()
        error = self._join_error(request)
        if error is not ErrorCode.NONE:
            self._answer(promise, JoinResult(error, request.member_id))
        elif request.member_id == "":
            self._join_unknown(request, new_id, promise, now_ms)
        else:
            self._join_known(request, promise, now_ms)
        return promise

    def _join_error(self, request: JoinRequest) -> ErrorCode:
        if self.phase is Phase.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        is_static = request.instance_id is not None and self.static_member(request.instance_id)
        is_counted = request.member_id in self.members or bool(is_static)
        if not is_counted and request.member_id not in self.pending:
            if request.member_id and request.instance_id is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if len(self.members) + len(self.pending) >= self.config.size_max:
                return ErrorCode.GROUP_MAX_SIZE_REACHED
        others = [m.request for m in self._others(request)]
        if sum(one.size_bytes for one in (request, *others)) > self.config.bytes_max:
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if not self._supports(request):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    def _others(self, request: JoinRequest) -> list[Member]:
        """All members but the one that asks."""
        others = [m for m in self.members.values() if m.member_id != request.member_id]
        if request.instance_id is not None:
            others = [m for m in others if m.instance_id != request.instance_id]
        return others

    def _supports(self, request: JoinRequest) -> bool:
        """True when a protocol remains that every member speaks."""
        if not request.protocol_type or not request.protocols:
            return False
        others = self._others(request)
        if not others:
            return True
        if self.protocol_type and self.protocol_type != request.protocol_type:
            return False
        return bool(common_protocols([*(m.request.protocols for m in others), request.protocols]))

    def _join_unknown(
        self, request: JoinRequest, new_id: str, promise: Promise[JoinResult], now_ms: float
    ) -> None:
        if request.instance_id is not None:
            known = self.static_member(request.instance_id)
            if known is not None:
                self._rejoin_static(known, request, new_id, promise, now_ms)
                return
        elif request.requires_member_id:
            # Else a consumer that lost the answer would come again as one more member (KIP-394).
            self.pending[new_id] = now_ms + request.session_timeout_ms
            self.quiet_since_ms = now_ms
            self._answer(promise, JoinResult(ErrorCode.MEMBER_ID_REQUIRED, new_id))
            return
        self._add(request, new_id, promise, now_ms)

    def _join_known(
        self, request: JoinRequest, promise: Promise[JoinResult], now_ms: float
    ) -> None:
        if self.pending.pop(request.member_id, None) is not None:
            self._add(request, request.member_id, promise, now_ms)
            return
        member, error = self._find(request.member_id, request.instance_id)
        if member is None:
            self._answer(promise, JoinResult(error, request.member_id))
            return
        is_unchanged = member.request.protocols == request.protocols
        is_leader = member.member_id == self.leader
        if self.phase is Phase.COMPLETING and is_unchanged:
            self._repeat_join(member, promise, now_ms)  # its answer was lost
        elif self.phase is Phase.STABLE and is_unchanged and not is_leader:
            self._repeat_join(member, promise, now_ms)
        else:  # a leader joins again when it wants a new assignment
            self._park_join(member, request, promise, now_ms)
            self._rebalance(now_ms)

    def _repeat_join(self, member: Member, promise: Promise[JoinResult], now_ms: float) -> None:
        member.hear(now_ms)
        self._answer(promise, self._join_result(member))

    def _add(
        self, request: JoinRequest, member_id: str, promise: Promise[JoinResult], now_ms: float
    ) -> None:
        member = Member(member_id, request)
        if not self.members:
            self.protocol_type = request.protocol_type
        self.members[member_id] = member
        if self.leader is None:
            self.leader = member_id
        self._has_grown = True
        # It sends no heartbeats before it knows its generation, so its session starts later.
        member.deadline_ms = now_ms + self.config.new_member_join_timeout_ms
        self._park_join(member, request, promise, now_ms)
        self._rebalance(now_ms)

    def _park_join(
        self, member: Member, request: JoinRequest, promise: Promise[JoinResult], now_ms: float
    ) -> None:
        member.request = request
        member.hear(now_ms)
        if member.join is not None:  # the client gave up on that one
            self._answer(member.join, JoinResult(ErrorCode.REBALANCE_IN_PROGRESS, member.member_id))
        member.join = promise

    def _rejoin_static(
        self,
        known: Member,
        request: JoinRequest,
        new_id: str,
        promise: Promise[JoinResult],
        now_ms: float,
    ) -> None:
        """A static member is back under a new id; its old id is fenced (KIP-345)."""
        old_id = known.member_id
        if known.join is not None:
            self._answer(known.join, JoinResult(ErrorCode.FENCED_INSTANCE_ID, old_id))
        if known.sync is not None:
            self._answer(known.sync, SyncResult(ErrorCode.FENCED_INSTANCE_ID))
        known.join = known.sync = None
        before = known.metadata(self.protocol)
        known.member_id, known.request = new_id, request
        self.members = {member.member_id: member for member in self.members.values()}
        was_leader = self.leader == old_id
        if was_leader:
            self.leader = new_id
        known.hear(now_ms)
        if self.phase is not Phase.STABLE or self._changes_group(known, before):
            self._park_join(known, request, promise, now_ms)
            self._rebalance(now_ms)
            return
        self._effects.commands.append(
            ReplaceMember(
                group=self.name,
                coordinator_epoch=self.coordinator_epoch,
                generation=self.generation,
                instance_id=request.instance_id or "",
                old_member_id=old_id,
                new_member_id=new_id,
                client_id=request.client_id,
                client_host=request.client_host,
                session_timeout_ms=request.session_timeout_ms,
                rebalance_timeout_ms=request.rebalance_timeout_ms,
            )
        )
        known.join = promise

    def _changes_group(self, member: Member, before: bytes) -> bool:
        """True when a static member that is back speaks for another protocol or other topics.

        The rest of its subscription (generation, what it owned) is another in every process.
        """
        if self._select_protocol() != self.protocol:
            return True
        return not is_same_subscription(self.protocol_type, before, member.metadata(self.protocol))

    # ---- rebalancing ----

    def _rebalance(self, now_ms: float) -> None:
        """Ask all members to join again, or look whether all have."""
        if self.phase is not Phase.PREPARING:
            for member in self.members.values():
                if member.sync is not None:
                    self._answer(member.sync, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
                    member.sync = None
            longest_ms = self._rebalance_timeout_ms()
            self._rebalance_by_ms = now_ms + longest_ms
            if self.phase is Phase.EMPTY:
                delay_ms = min(self.config.initial_rebalance_delay_ms, longest_ms)
                self._join_at_ms = now_ms + delay_ms
                self._has_grown = False
            self._sync_by_ms = None
            self._enter(Phase.PREPARING)
        self._complete_if_all_joined(now_ms)

    def _rebalance_timeout_ms(self) -> int:
        return max((m.request.rebalance_timeout_ms for m in self.members.values()), default=0)

    def _complete_if_all_joined(self, now_ms: float) -> None:
        if self.phase is not Phase.PREPARING:
            return
        if self._join_at_ms is not None:
            if now_ms < self._join_at_ms and self.members:
                return
            if self._has_grown and now_ms < self._rebalance_by_ms and self.members:
                self._has_grown = False
                self._join_at_ms = min(
                    now_ms + self.config.initial_rebalance_delay_ms, self._rebalance_by_ms
                )
                if now_ms < self._join_at_ms:
                    return
            self._complete_join(now_ms)
            return
        all_joined = all(member.join is not None for member in self.members.values())
        if (all_joined and not self.pending) or now_ms >= self._rebalance_by_ms:
            self._complete_join(now_ms)

    def _complete_join(self, now_ms: float) -> None:
        for member in list(self.members.values()):
            if member.join is None and member.instance_id is None:
                del self.members[member.member_id]
        joined = [m for m in self.members.values() if m.join is not None]
        if self.members and not joined:
            # Only static members are left and none is back: wait on, their sessions decide.
            self._rebalance_by_ms = now_ms + self._rebalance_timeout_ms()
            return
        self._join_at_ms = None
        self.generation += 1
        if not self.members:
            self._become_empty(now_ms)
            return
        if self.leader not in [m.member_id for m in joined]:
            self.leader = joined[0].member_id
        self.protocol = self._select_protocol()
        self._sync_by_ms = now_ms + self._rebalance_timeout_ms()
        self._enter(Phase.COMPLETING)
        for member in self.members.values():
            member.is_new = False
            member.has_synced = False
            member.assignment = b""
        for member in joined:
            promise, member.join = member.join, None
            member.hear(now_ms)
            assert promise is not None, "joined"
            self._answer(promise, self._join_result(member))

    def _become_empty(self, now_ms: float) -> None:
        self.protocol = self.leader = None
        self.quiet_since_ms = now_ms
        self._sync_by_ms = None
        self._enter(Phase.EMPTY)
        self._effects.commands.append(self._generation_command({}))

    def _select_protocol(self) -> str:
        """Each member votes for the first of its protocols that all speak; most votes win."""
        lists = [member.request.protocols for member in self.members.values()]
        common = common_protocols(lists)
        assert common, "members without a common protocol are refused when they join"
        votes = dict.fromkeys(common, 0)
        for protocols in lists:
            votes[next(name for name, _ in protocols if name in votes)] += 1
        return max(common, key=lambda name: votes[name])  # the first of equals

    def _join_result(self, member: Member, *, skip_assignment: bool = False) -> JoinResult:
        is_leader = member.member_id == self.leader
        members = self.members.values() if is_leader else ()
        return JoinResult(
            ErrorCode.NONE,
            member.member_id,
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            tuple(
                JoinedMember(m.member_id, m.instance_id, m.metadata(self.protocol)) for m in members
            ),
            skip_assignment,
        )

    # ---- syncing ----

    def sync(
        self,
        generation: int,
        member_id: str,
        instance_id: str | None,
        assignments: Iterable[tuple[str, bytes]],
        now_ms: float,
        *,
        protocol_type: str | None = None,
        protocol: str | None = None,
    ) -> Promise[SyncResult]:
        """A member asks for its assignment; the leader brings all of them."""
        promise: Promise[SyncResult] = Promise()
        member, error = self._find(member_id, instance_id)
        if member is None:
            self._answer(promise, SyncResult(error))
        elif generation != self.generation:
            self._answer(promise, SyncResult(ErrorCode.ILLEGAL_GENERATION))
        elif protocol_type not in (None, self.protocol_type) or protocol not in (
            None,
            self.protocol,
        ):
            self._answer(promise, SyncResult(ErrorCode.INCONSISTENT_GROUP_PROTOCOL))
        elif self.phase is Phase.PREPARING:
            self._answer(promise, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
        elif self.phase is Phase.STABLE:
            member.hear(now_ms)
            member.has_synced = True
            self._answer(promise, self._sync_result(member))
        else:
            given = dict(assignments)
            if sum(map(len, given.values())) > self.config.bytes_max:
                self._answer(promise, SyncResult(ErrorCode.GROUP_MAX_SIZE_REACHED))
            else:
                self._park_sync(member, promise, given, now_ms)
        return promise

    def _park_sync(
        self,
        member: Member,
        promise: Promise[SyncResult],
        assignments: dict[str, bytes],
        now_ms: float,
    ) -> None:
        assert self.phase is Phase.COMPLETING, "an empty group has no member that could sync"
        is_first = not member.has_synced
        member.hear(now_ms)
        member.has_synced = True
        if member.sync is not None:
            self._answer(member.sync, SyncResult(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync = promise
        if member.member_id == self.leader and is_first:
            self._effects.commands.append(self._generation_command(assignments))

    def _generation_command(self, assignments: dict[str, bytes]) -> Generation:
        return Generation(
            group=self.name,
            coordinator_epoch=self.coordinator_epoch,
            generation=self.generation,
            protocol_type=self.protocol_type,
            protocol=self.protocol,
            leader=self.leader,
            members=tuple(
                GroupMember(
                    member_id=member.member_id,
                    instance_id=member.instance_id,
                    client_id=member.request.client_id,
                    client_host=member.request.client_host,
                    session_timeout_ms=member.request.session_timeout_ms,
                    rebalance_timeout_ms=member.request.rebalance_timeout_ms,
                    subscription=member.metadata(self.protocol),
                    assignment=assignments.get(member.member_id, b""),
                )
                for member in self.members.values()
            ),
        )

    def generation_applied(self, command: Generation, now_ms: float) -> None:
        """The metadata group agreed: now, and not before, members may learn their assignments."""
        self._stored_generation = command.generation
        if self.phase is not Phase.COMPLETING or command.generation != self.generation:
            return  # a rebalance has begun meanwhile; no member was told
        for saved in command.members:
            member = self.members.get(saved.member_id)
            if member is not None:
                member.assignment = saved.assignment
        self._enter(Phase.STABLE)
        for member in self.members.values():
            if member.sync is not None:
                member.hear(now_ms)
                promise, member.sync = member.sync, None
                self._answer(promise, self._sync_result(member))

    def member_replaced(self, command: ReplaceMember) -> None:
        """A static member's new id is persisted: tell it its unchanged generation."""
        member = self.members.get(command.new_member_id)
        if member is None or member.join is None or self.phase is not Phase.STABLE:
            return  # it waits for the rebalance that has begun meanwhile
        promise, member.join = member.join, None
        result = self._join_result(member, skip_assignment=member.request.may_skip_assignment)
        if self.leader == member.member_id and not member.request.may_skip_assignment:
            # An older client would compute an assignment that is not wanted: it is told that its
            # former member id leads, as Kafka does.
            result = JoinResult(
                ErrorCode.NONE,
                member.member_id,
                self.generation,
                self.protocol_type,
                self.protocol,
                command.old_member_id,
            )
        self._answer(promise, result)

    def _sync_result(self, member: Member) -> SyncResult:
        return SyncResult(ErrorCode.NONE, self.protocol_type, self.protocol, member.assignment)

    # ---- staying and leaving ----

    def heartbeat(
        self, generation: int, member_id: str, instance_id: str | None, now_ms: float
    ) -> ErrorCode:
        """A member is alive, and learns whether it should join again."""
        member, error = self._find(member_id, instance_id)
        if member is None:
            if member_id in self.pending:
                return ErrorCode.UNKNOWN_MEMBER_ID
            return error
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        member.hear(now_ms)
        if self.phase is Phase.PREPARING:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def check_commit(
        self, generation: int, member_id: str, instance_id: str | None, now_ms: float
    ) -> ErrorCode:
        """May this member commit offsets now? The command is checked once more when applied."""
        if self.phase is Phase.DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.phase is Phase.EMPTY:
            return ErrorCode.NONE  # a consumer outside of group management, by any name
        member, error = self._find(member_id, instance_id)
        if member is None:
            return error
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        if generation != self._stored_generation:
            return ErrorCode.REBALANCE_IN_PROGRESS  # no member knows its assignment yet
        member.hear(now_ms)
        return ErrorCode.NONE

    def leave(self, member_id: str, instance_id: str | None, now_ms: float) -> ErrorCode:
        """A member goes, at once instead of at the end of its session."""
        if instance_id is not None and not member_id:  # an operator names the instance alone
            static = self.static_member(instance_id)
            if static is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            self._remove(static, now_ms)
            return ErrorCode.NONE
        if self.pending.pop(member_id, None) is not None:
            self._complete_if_all_joined(now_ms)
            return ErrorCode.NONE
        member, error = self._find(member_id, instance_id)
        if member is None:
            return error
        self._remove(member, now_ms)
        return ErrorCode.NONE

    def tick(self, now_ms: float) -> None:
        """Let sessions, rebalances and unused member ids run out."""
        for member_id in [m for m, deadline in self.pending.items() if now_ms >= deadline]:
            del self.pending[member_id]
        for member in list(self.members.values()):
            if not member.is_waiting and now_ms >= member.deadline_ms:
                self._remove(member, now_ms)
        if self._sync_by_ms is not None and now_ms >= self._sync_by_ms:
            self._sync_by_ms = None
            for member in list(self.members.values()):
                if not member.has_synced:
                    self._remove(member, now_ms)
        self._complete_if_all_joined(now_ms)

    @property
    def next_due_ms(self) -> float | None:
        """When `tick` has something to do, unless something happens before; None: never."""
        times = [m.deadline_ms for m in self.members.values() if not m.is_waiting]
        times += self.pending.values()
        if self._sync_by_ms is not None:
            times.append(self._sync_by_ms)
        if self.phase is Phase.PREPARING:
            at_ms = self._join_at_ms
            times.append(self._rebalance_by_ms if at_ms is None else at_ms)
        return min(times, default=None)

    def _remove(self, member: Member, now_ms: float) -> None:
        if self.members.pop(member.member_id, None) is None:
            return
        if member.join is not None:
            self._answer(member.join, JoinResult(ErrorCode.UNKNOWN_MEMBER_ID, member.member_id))
        if member.sync is not None:
            self._answer(member.sync, SyncResult(ErrorCode.UNKNOWN_MEMBER_ID))
        member.join = member.sync = None
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)
        self._rebalance(now_ms)

    def close(self, error: ErrorCode) -> None:
        """This node no longer coordinates the group: answer all that is parked."""
        for member in self.members.values():
            if member.join is not None:
                self._answer(member.join, JoinResult(error, member.member_id))
            if member.sync is not None:
                self._answer(member.sync, SyncResult(error))
            member.join = member.sync = None
        self._enter(Phase.DEAD)

    @property
    def is_quiet(self) -> bool:
        """True when there is no member, and none is about to join."""
        return self.phase is Phase.EMPTY and not self.members and not self.pending

    @property
    def session_timeout_ms_min(self) -> int | None:
        """The shortest session of its members."""
        return min((m.request.session_timeout_ms for m in self.members.values()), default=None)

    # ---- inside ----

    def _find(
        self, member_id: str, instance_id: str | None
    ) -> tuple[Member, ErrorCode] | tuple[None, ErrorCode]:
        """The member of these names, or why there is none."""
        if self.phase is Phase.DEAD:
            return None, ErrorCode.COORDINATOR_NOT_AVAILABLE
        if instance_id is not None:
            static = self.static_member(instance_id)
            if static is not None and static.member_id != member_id:
                return None, ErrorCode.FENCED_INSTANCE_ID
        member = self.members.get(member_id)
        if member is None:
            return None, ErrorCode.UNKNOWN_MEMBER_ID
        return member, ErrorCode.NONE

    def _answer(self, promise: Promise[Any], result: Any) -> None:
        self._effects.answers.append((promise, result))

    def _enter(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase
