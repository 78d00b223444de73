"""Membership in a consumer group, classic protocol: join, sync, heartbeat, leave, commit.

A state machine without clock or socket. It tells its consumer what to do by events: give partitions
up, start reading these. The eager protocol holds: before it joins again a member has given up all
it had, which the consumer confirms with `gave_up`; so no record of a partition is handed out by two
members at once. Group requests travel on a connection of their own, since a parked JoinGroup would
hold up fetches.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from raftmq.errors import ErrorCode, RemoteProtocolError
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.core.assignors import (
    ASSIGNORS,
    COOPERATIVE,
    Readers,
    Retired,
    Subscription,
    assign,
    decode_assignment,
    decode_subscription,
    encode_assignment,
    encode_subscription,
    member_data,
    readers_of,
)
from raftmq_client.core.call import Call, Finish, struct_call
from raftmq_client.core.client import coordinator_link
from raftmq_client.core.group_admin import CommittedOffset, coordinator_lookup, offset_fetch
from raftmq_client.core.group_requests import (
    Identity,
    commit_request,
    heartbeat_request,
    join_request,
    leave_request,
    read_commit,
    sync_request,
)
from raftmq_client.core.group_state import (
    COORDINATOR_CODES,
    Assigned,
    GaveUp,
    GroupEvent,
    GroupOptions,
    MemberState,
    Pending,
    expire,
    fence,
    fence_member,
    is_final,
    is_outdated,
    outdated,
    refuse,
)
from raftmq_client.core.metadata import Broker, MetadataCore, is_topic
from raftmq_client.core.trouble import Trouble
from raftmq_client.errors import (
    BrokerError,
    ClientError,
    CorruptAnswerError,
    PollIntervalError,
    UsageError,
)

_LOG: Final = logging.getLogger("raftmq_client.group")
NO_GENERATION: Final = -1
_FIND_TIMEOUT_MS: Final = 3_000.0


class GroupCore:
    """One member of one group."""

    def __init__(self, group: str, options: GroupOptions, metadata: MetadataCore) -> None:
        for name in options.assignors:
            if name not in ASSIGNORS:
                known = ", ".join(ASSIGNORS)
                raise UsageError(f"unknown assignor {name!r}; one of {known}")
        self.group = group
        self.options = options
        self.is_cooperative = all(name in COOPERATIVE for name in options.assignors)
        """Partitions that stay with this member are read on through a rebalance (KIP-429)."""
        self.state = MemberState.IDLE
        self.member_id = ""
        self.generation = NO_GENERATION
        self.protocol = ""
        self.owned: tuple[TopicPartition, ...] = ()
        self.events: deque[GroupEvent] = deque()
        self.error: ClientError | None = None
        """Why the member is not in its group."""
        self.is_shut = False
        """It never will be: `error` is told until other topics are chosen."""
        self.waits_for = ""
        """Why this member does not get on, for people."""
        self.commits_sent = 0
        """Requests that save positions, each try of one counted: a lost answer asks for another."""
        self._trouble = Trouble(_LOG)
        self._metadata = metadata
        self._topics: tuple[str, ...] = ()
        self._pattern: re.Pattern[str] | None = None
        self._is_subscribed = False
        self._giving_up: list[GaveUp] = []  # events that the consumer has not confirmed
        self._added: tuple[TopicPartition, ...] = ()
        self._must_rejoin = False
        self._coordinator: int | None = None
        self._is_finding = False
        self._is_asking = False  # a join, sync, heartbeat or lookup is on its way
        self._not_before = 0.0
        self._failures = 0
        self._heartbeat_at = 0.0
        self._polled_at = 0.0
        self._pending: deque[Pending] = deque()
        self._is_pending_sent = False
        self._members: dict[str, Subscription] = {}
        self._readers: Readers = {}  # of what this leader has assigned
        self._is_leader = False
        self._owned_in = NO_GENERATION
        self._metadata_version = -1
        self._wake_at = 0.0

    # What consumers do.

    def subscribe(self, topics: Iterable[str] | re.Pattern[str], now: float) -> None:
        """Be a member that reads these topics, or all whose whole name a pattern matches."""
        self._pattern = None
        self._is_subscribed = True
        if self.is_shut:
            self.is_shut, self.error = False, None
        if isinstance(topics, re.Pattern):
            self._pattern = topics
            self._metadata.want_all()
            self._topics = self._matching()
        else:
            self._topics = tuple(sorted(set(topics)))
            self._metadata.want(self._topics)
        self._polled_at = now
        self._rejoin(is_lost=False)

    def polled(self, now: float) -> None:
        """The consumer is alive; without this for `max_poll_interval_ms` the member leaves."""
        self._polled_at = now
        if self.state is MemberState.IDLE and self._is_subscribed and self.error is None:
            self.state = MemberState.UNJOINED

    def gave_up(self, event: GaveUp | None = None) -> None:
        """The consumer stopped reading what `event` told it to; None: all that it was told."""
        done = [item for item in self._giving_up if event is None or item is event]
        self._giving_up = [item for item in self._giving_up if not _is_in(item, done)]
        given = dict.fromkeys(key for item in done for key in item.partitions)
        self.owned = tuple(key for key in self.owned if key not in given)
        fence(self._pending, given)
        if self.state is not MemberState.GIVING_UP or self._giving_up:
            return
        if self._added:
            self.state = MemberState.LOOKING_UP
        else:
            self._must_rejoin = False
            self.state = MemberState.UNJOINED

    @property
    def is_lost(self) -> bool:
        """True while this member was put out: others may read what it had."""
        return self._is_subscribed and self.generation == NO_GENERATION

    def commit(self, offsets: Mapping[TopicPartition, CommittedOffset], now: float) -> Pending:
        """Save positions; fenced by the generation the member has when it is sent.

        A member without a generation saves nothing: nobody could tell that it was put out.
        """
        pending = Pending(
            lambda who: commit_request(who, offsets),
            read_commit,
            ApiKey.OFFSET_COMMIT,
            now + self.options.request_timeout_ms,
            frozenset(offsets),
            self._is_subscribed,
        )
        if self.is_lost:
            pending.settle(None, outdated(f"group {self.group!r} has no such member now"))
        else:
            self._pending.append(pending)
        return pending

    def commit_call(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> Call | None:
        """Save positions at the end, without waiting; None where it cannot be sent at once."""
        if not offsets or self.is_lost or self._coordinator is None:
            return None
        request = commit_request(self.identity, dict(offsets))
        return self._call(ApiKey.OFFSET_COMMIT, request, lambda _response, _error, _now: None)

    def committed(self, partitions: Sequence[TopicPartition], now: float) -> Pending:
        """Look committed offsets up."""
        request, read = offset_fetch(self.group, partitions)
        pending = Pending(
            lambda _: request,
            read,
            ApiKey.OFFSET_FETCH,
            now + self.options.request_timeout_ms,
        )
        self._pending.append(pending)
        return pending

    def leave(self, finish: Finish) -> Call | None:
        """Leave the group now, so that others need not wait for the session's end."""
        was_member = self.member_id != "" and self._coordinator is not None
        call = self._leave_call(finish) if was_member and not self.options.instance_id else None
        self._unsubscribe()
        return call

    def _unsubscribe(self) -> None:
        self._topics, self._pattern, self._is_subscribed = (), None, False
        self._forget_member()
        self.state = MemberState.IDLE

    @property
    def identity(self) -> Identity:
        """Who this member is in the generation it has."""
        instance = self.options.instance_id
        return Identity(self.group, self.generation, self.member_id, instance)

    # What drivers ask.

    def calls(self, now: float) -> list[Call]:
        """The requests that are due."""
        self._wake_at = float("inf")
        self._wake(expire(self._pending, now))
        if self.state is MemberState.IDLE and not self._pending:
            return []
        calls: list[Call] = []
        if self.state in (MemberState.STABLE, MemberState.LOOKING_UP):
            calls.extend(self._check_polls(now))
        if self._not_before > now:
            self._wake(self._not_before)
            return calls
        if self._coordinator is None:
            return [*calls, *self._find_coordinator()]
        if self._pending and not self._is_pending_sent:
            calls.append(self._send_pending(self._pending[0]))
        if not self._is_asking:
            calls.extend(self._member_calls(now))
        return calls

    def deadline(self) -> float:
        """When `calls` should next be asked."""
        return self._wake_at

    def _member_calls(self, now: float) -> list[Call]:
        if self.state is MemberState.STABLE:
            self._watch_metadata()
        if self.state is MemberState.UNJOINED:
            if self._pattern is not None:
                if self._metadata.version == 0:
                    return []  # it is on its way
                self._topics = self._matching()
            dropped = tuple(key for key in self.owned if key.topic not in self._topics)
            if dropped:  # a cooperative member; others may get these as soon as it joins (KIP-429)
                self._give_up(dropped, is_lost=False)
                return []
            return [self._join()]
        if self.state is MemberState.ASSIGNING:
            return self._assign()
        if self.state is MemberState.LOOKING_UP:
            return [self._look_up()]
        if self.state in (MemberState.STABLE, MemberState.GIVING_UP) and self.member_id:
            if now >= self._heartbeat_at:
                return [self._heartbeat(now)]
            self._wake(self._heartbeat_at)
        return []

    # Coordinator.

    def _find_coordinator(self) -> list[Call]:
        if self._is_finding:
            return []
        self._is_finding = True
        request, read = coordinator_lookup(self.group)

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._is_finding = False
            try:
                if error is not None:
                    raise error
                node, host, port = read(response)
            except ClientError as failure:
                if is_final(failure):
                    self._shut_out(failure)
                else:
                    self._failed(failure, now)
                return
            self._metadata.brokers.setdefault(node, Broker(node, host, port))
            self._coordinator = node

        return [
            struct_call(
                ApiKey.FIND_COORDINATOR,
                request,
                finish,
                timeout_ms=min(self.options.request_timeout_ms, _FIND_TIMEOUT_MS),
                is_expendable=True,
            )
        ]

    def _call(
        self, api: int, request: Any, finish: Finish, timeout_ms: float | None = None
    ) -> Call:
        assert self._coordinator is not None
        return struct_call(
            api,
            request,
            finish,
            node=coordinator_link(self._coordinator),
            timeout_ms=timeout_ms or self.options.request_timeout_ms,
        )

    def _ask(
        self,
        api: int,
        request: Any,
        answered: Callable[[Struct, float], None],
        timeout_ms: float | None = None,
    ) -> Call:
        """One of the member's own requests; failures are judged in one place."""
        self._is_asking = True

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._is_asking = False
            if error is None and getattr(response, "error_code", None):
                name = ApiKey(api).title
                error = BrokerError(response.error_code, about=f"{name} of group {self.group!r}")
            if self.state is MemberState.IDLE:
                return  # left meanwhile
            if error is not None:
                self._refused(error, response, now)
                return
            self._failures = 0
            answered(response, now)
            if self.state is MemberState.STABLE:
                self._gets_on()

        return self._call(api, request, finish, timeout_ms)

    def _refused(self, error: ClientError, response: Any, now: float) -> None:
        code = error.code if isinstance(error, BrokerError) else None
        if code is ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = response.member_id  # KIP-394
            self.state = MemberState.UNJOINED
        elif code is ErrorCode.REBALANCE_IN_PROGRESS:
            if self.state is not MemberState.GIVING_UP:
                self._rejoin(is_lost=False)
        elif code in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.ILLEGAL_GENERATION):
            if code is ErrorCode.UNKNOWN_MEMBER_ID:
                self.member_id = ""
            self.generation = NO_GENERATION
            self._lose()
            self._rejoin(is_lost=True)
        elif is_final(error):
            self._shut_out(error)
        else:
            if self.state in (MemberState.JOINING, MemberState.SYNCING):
                self.state = MemberState.UNJOINED
            self._failed(error, now)

    def _failed(self, error: ClientError, now: float) -> None:
        """Try again later; the coordinator is looked up anew unless it merely loads."""
        if not isinstance(error, BrokerError) or error.code in COORDINATOR_CODES:
            self._coordinator = None
        if self._failures:  # a single one is everyday life
            self.waits_for = f"group {self.group!r} does not get on: {error}"
            self._trouble.tell("", self.waits_for, now)
        if self._pending:
            self._pending[0].last_error = error
        backoff = self.options.backoff_ms * 2 ** min(self._failures, 8)
        self._failures += 1
        self._not_before = now + min(backoff, self.options.backoff_max_ms)
        self._wake(self._not_before)

    # Joining.

    def _rejoin(self, *, is_lost: bool) -> None:
        if self.is_cooperative and not is_lost:
            if self.state is MemberState.GIVING_UP:
                self._must_rejoin = True
            else:
                self._added = ()
                self.state = MemberState.UNJOINED
        elif self.owned:
            self._give_up(self.owned, is_lost=is_lost)
        else:
            self._added = ()
            self.state = MemberState.UNJOINED

    def _give_up(self, partitions: tuple[TopicPartition, ...], *, is_lost: bool) -> None:
        if is_lost or not self.is_cooperative:
            self._added = ()
        self._ask_for(partitions, is_lost=is_lost)
        self.state = MemberState.GIVING_UP

    def _ask_for(self, partitions: Iterable[TopicPartition], *, is_lost: bool) -> None:
        """Tell the consumer to give up those of these that it was not told of yet."""
        told = {key for event in self._giving_up for key in event.partitions}
        rest = tuple(key for key in partitions if key not in told)
        if rest:
            event = GaveUp(rest, is_lost)
            level = logging.WARNING if is_lost else logging.INFO
            what = "lost" if is_lost else "gives up"
            _LOG.log(level, "group %r: member %s %s", self.group, what, rest)
            self.events.append(event)
            self._giving_up.append(event)

    def _lose(self) -> None:
        """The group goes on without this member: what is being given up is lost, too."""
        for event in self._giving_up:
            event.is_lost = True
        fence_member(self._pending)

    def _join(self) -> Call:
        self.state = MemberState.JOINING
        options = self.options
        request = join_request(
            self.identity,
            options.assignors,
            encode_subscription(self._subscription()),
            session_timeout_ms=options.session_timeout_ms,
            rebalance_timeout_ms=options.rebalance_timeout_ms,
        )
        timeout = max(options.rebalance_timeout_ms, options.session_timeout_ms) + 5_000
        return self._ask(ApiKey.JOIN_GROUP, request, self._joined, timeout)

    def _subscription(self) -> Subscription:
        if not self.is_cooperative:
            return Subscription(self._topics, member_data(None))
        # Of two members that claim a partition, the one of the later generation has it.
        return Subscription(self._topics, member_data(self._owned_in), self.owned)

    def _joined(self, response: Struct, now: float) -> None:
        self.member_id = response.member_id
        self.generation = response.generation_id
        self.protocol = response.protocol_name or ""
        if self.state is not MemberState.JOINING:
            return  # other topics were chosen meanwhile: the next join says so
        self._heartbeat_at = now + self.options.heartbeat_interval_ms
        self._is_leader = response.leader == response.member_id
        self._members = {}
        if self._is_leader:
            try:
                self._members = {
                    item.member_id: decode_subscription(bytes(item.metadata))
                    for item in response.members
                }
            except RemoteProtocolError as error:
                self._fall_out(CorruptAnswerError(f"a member's subscription: {error}"))
                return
            self._metadata.want(self._all_topics())
            self._metadata.invalidate()
            self._metadata_version = self._metadata.version
        self.state = MemberState.ASSIGNING

    def _assign(self) -> list[Call]:
        """Send SyncGroup: with everybody's partitions from the leader, empty from the others."""
        assignments: list[Struct] = []
        if self._is_leader:
            if not self._is_metadata_fresh():
                return []  # it is on its way
            counts, retired = self._known_counts(), self._known_retired()
            self._readers = readers_of(self._members, counts, retired)
            try:
                result = assign(self.protocol, self._members, counts, retired)
            except RemoteProtocolError as error:
                self._fall_out(CorruptAnswerError(str(error)))
                return []
            assignments = [
                Struct(member_id=member, assignment=encode_assignment(partitions))
                for member, partitions in result.items()
            ]
        self.state = MemberState.SYNCING
        request = sync_request(self.identity, self.protocol, assignments)
        timeout = self.options.rebalance_timeout_ms + 5_000
        return [self._ask(ApiKey.SYNC_GROUP, request, self._synced, timeout)]

    def _synced(self, response: Struct, now: float) -> None:
        if self.state is not MemberState.SYNCING:
            return  # as above
        try:
            assigned = decode_assignment(bytes(response.assignment or b""))
            if not all(is_topic(key.topic) for key in assigned):
                raise RemoteProtocolError("an assignment names what no topic is called")
        except RemoteProtocolError as error:
            self._failed(CorruptAnswerError(str(error)), now)
            self.state = MemberState.UNJOINED
            return
        self._heartbeat_at = now + self.options.heartbeat_interval_ms
        self._metadata.want(dict.fromkeys(key.topic for key in assigned))
        self._owned_in = self.generation
        if not self.is_cooperative:
            self.owned = self._added = assigned
        else:
            self._added = tuple(key for key in assigned if key not in self.owned)
            revoked = tuple(key for key in self.owned if key not in assigned)
            if revoked:
                self._must_rejoin = True  # so that others get them
                self._give_up(revoked, is_lost=False)
                return
        if self._added:
            self.state = MemberState.LOOKING_UP
        else:
            self._settled({})

    def _settled(self, committed: Mapping[TopicPartition, CommittedOffset]) -> None:
        """All that was assigned can be read from now on."""
        added, self._added = self._added, ()
        if self.is_cooperative:
            self.owned = (*self.owned, *added)
        self._gets_on()
        _LOG.info("group %r, generation %d: assigned %s", self.group, self.generation, added)
        self.events.append(Assigned(added, committed, self.is_cooperative))
        self.state = MemberState.UNJOINED if self._must_rejoin else MemberState.STABLE
        self._must_rejoin = False

    def _gets_on(self) -> None:
        self.waits_for = ""
        self._trouble.over("", f"group {self.group!r} gets on")

    def _look_up(self) -> Call:
        request, read = offset_fetch(self.group, self._added)
        self._is_asking = True

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._is_asking = False
            if self.state is not MemberState.LOOKING_UP:
                return
            try:
                if error is not None:
                    raise error
                found = read(response)
            except ClientError as failure:
                self._refused(failure, response, now)
                return
            self._failures = 0
            self._settled(found)

        return self._call(ApiKey.OFFSET_FETCH, request, finish)

    def _all_topics(self) -> list[str]:
        """What any member wants; a name that no topic can have gets nobody anything."""
        topics = {topic for item in self._members.values() for topic in item.topics}
        return sorted(filter(is_topic, topics))

    def _is_metadata_fresh(self) -> bool:
        metadata = self._metadata
        return metadata.version != self._metadata_version and all(
            topic in metadata.topics or topic in metadata.errors for topic in self._all_topics()
        )

    def _known_counts(self) -> dict[str, int]:
        counts = {}
        for topic in self._all_topics():
            count = self._metadata.partition_count(topic)
            if count is not None and topic not in self._metadata.errors:
                counts[topic] = count
        return counts

    def _known_retired(self) -> dict[str, Retired]:
        """What topics list no more: who reads them is to read that, too, while it is there."""
        known = self._metadata.topics
        found = {}
        for topic in self._known_counts():
            if rest := known[topic].retired:
                numbers = tuple(item.partition for item in rest)
                found[topic] = Retired(known[topic].retired_view, numbers)
        return found

    def _are_others_to_read(self) -> bool:
        """Whether there is something else to read than what was assigned, or for others."""
        counts, retired = self._known_counts(), self._known_retired()
        return readers_of(self._members, counts, retired) != self._readers

    def _watch_metadata(self) -> None:
        """A topic that appeared or grew calls for a new assignment. One that shrank does not, where
        the same members may read on what it lists no more.

        The group's leader sees those of all members; a member with a pattern its own.
        """
        if self._metadata.version == self._metadata_version:
            return
        self._metadata_version = self._metadata.version
        matching = self._matching() if self._pattern is not None else self._topics
        if matching != self._topics:
            self._topics = matching
            self._rejoin(is_lost=False)
        elif self._is_leader and self._are_others_to_read():
            self._rejoin(is_lost=False)

    def _matching(self) -> tuple[str, ...]:
        assert self._pattern is not None
        matches = self._pattern.fullmatch
        topics = self._metadata.topics.values()
        return tuple(sorted(t.name for t in topics if not t.is_internal and matches(t.name)))

    # Staying, and leaving.

    def _heartbeat(self, now: float) -> Call:
        self._heartbeat_at = now + self.options.heartbeat_interval_ms
        request = heartbeat_request(self.identity)
        timeout = min(self.options.session_timeout_ms / 2, self.options.request_timeout_ms)
        return self._ask(ApiKey.HEARTBEAT, request, lambda _response, _now: None, timeout)

    def _check_polls(self, now: float) -> list[Call]:
        """Leave the group when the consumer stopped polling: others shall read its partitions."""
        limit = self._polled_at + self.options.max_poll_interval_ms
        if now < limit:
            self._wake(limit)
            return []
        calls: list[Call] = []
        if self.member_id and self._coordinator is not None and not self.options.instance_id:
            calls.append(self._leave_call(lambda _response, _error, _now: None))
        interval = f"{self.options.max_poll_interval_ms:.0f} ms (max_poll_interval_ms)"
        self._fall_out(PollIntervalError(f"no poll for {interval}: left group {self.group!r}"))
        return calls

    def _fall_out(self, error: ClientError) -> None:
        """Be no member any more: what it had is lost, which is told before the reason."""
        waiting, self.events = self.events, deque()
        self._giving_up = [event for event in self._giving_up if not _is_in(event, waiting)]
        self._lose()
        self._ask_for(self.owned, is_lost=True)
        self.owned = self._added = ()
        self.error = error
        self._forget_member()
        self.state = MemberState.IDLE

    def _shut_out(self, error: BrokerError) -> None:
        """No coordinator will ever be told: be no member, and wait for nothing."""
        refuse(self._pending, error)
        if self._is_subscribed:
            self._fall_out(error)
            self._unsubscribe()
            self.is_shut = True

    def _forget_member(self) -> None:
        self.member_id = ""
        self.generation = NO_GENERATION
        self._is_leader = False
        fence_member(self._pending)

    def _leave_call(self, finish: Finish) -> Call:
        return self._call(ApiKey.LEAVE_GROUP, leave_request(self.identity), finish, 5_000)

    # Commits and lookups that the consumer asked for, in order.

    def _send_pending(self, pending: Pending) -> Call:
        self._is_pending_sent = True

        def finish(response: Any, error: ClientError | None, now: float) -> None:
            self._is_pending_sent = False
            result = None
            try:
                if error is not None:
                    raise error
                result = pending.read(response)
            except ClientError as failure:
                if pending.may_try_again(failure):
                    pending.last_error = failure
                    self._failed(failure, now)
                    return
                error = failure
            if pending in self._pending:
                self._pending.remove(pending)
            pending.settle(result, error)
            if error is None:
                self._failures = 0
            elif is_outdated(error):
                self._heartbeat_at = now  # which tells this member what it has missed
            self._wake(now)

        self.commits_sent += pending.api == ApiKey.OFFSET_COMMIT
        pending.was_sent_before = pending.was_sent
        pending.call = self._call(pending.api, pending.request(self.identity), finish)
        return pending.call

    def _wake(self, at: float) -> None:
        self._wake_at = min(self._wake_at, at)


def _is_in(event: GroupEvent, events: Iterable[GroupEvent]) -> bool:
    """Whether it is one of these, and not merely equal to one."""
    return any(event is item for item in events)
