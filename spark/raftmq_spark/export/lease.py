"""One export at a time for a group: membership in a consumer group as a lease.

An export joins as the group's static member `raftmq-export` (KIP-345). Whoever finds that member
alive stops; one whose process is gone is replaced at once, one on another machine is waited for
until its session ends. Since there can be but one member of that name, of two that join at the same
moment the earlier is fenced. Offsets are committed with the generation of the joining and no other:
an export that was paused past its session commits nothing. Other members in the group are refused:
the group would be handed records that the export has yet to write.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from attrs import frozen

from raftmq.errors import ErrorCode
from raftmq.protocol import ApiKey, Struct
from raftmq.types import TopicPartition
from raftmq_client.blocking.engine import Engine, now_ms
from raftmq_client.core.admin import Operation, Route
from raftmq_client.core.admin_flow import AdminFlows
from raftmq_client.core.assignors import decode_assignment
from raftmq_client.core.build import build_client
from raftmq_client.core.group import GroupCore
from raftmq_client.core.group_admin import (
    CommittedOffset,
    GroupDescription,
    GroupMember,
    describe_group,
)
from raftmq_client.core.group_requests import Identity, commit_request, heartbeat_request
from raftmq_client.core.group_state import GroupOptions, MemberState
from raftmq_client.errors import BrokerError, ClientError, check_code
from raftmq_spark.export.errors import BusyError
from raftmq_spark.security import ClientSettings

INSTANCE: Final = "raftmq-export"
SESSION_MS: Final = 15_000
_JOIN_MS: Final = 60_000.0
_POLL_S: Final = 0.25
_GONE: Final = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
_FENCED: Final = frozenset(
    {
        ErrorCode.FENCED_INSTANCE_ID,
        ErrorCode.UNKNOWN_MEMBER_ID,
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.REBALANCE_IN_PROGRESS,
    }
)


@frozen
class Holder:
    """Which process an export is, as its client id tells."""

    host: str
    pid: int
    started: int
    """The kernel's time of its start, so that a reused pid is not taken for it."""

    @classmethod
    def this(cls) -> Self:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), _started(os.getpid()) or 0)

    @classmethod
    def read(cls, client_id: str) -> Self | None:
        """The process of a member; None if it is no export."""
        parts = client_id.split("|")
        if len(parts) != 4 or parts[0] != INSTANCE or not (parts[2] + parts[3]).isdecimal():
            return None
        return cls(parts[1], int(parts[2]), int(parts[3]))

    @property
    def client_id(self) -> str:
        """What brokers show of it."""
        return f"{INSTANCE}|{self.host}|{self.pid}|{self.started}"

    @property
    def is_gone(self) -> bool | None:
        """Whether the process ended; None if it is of another machine."""
        if self.host != socket.gethostname():
            return None
        return self == Holder.this() or _started(self.pid) != self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Lease:
    """A group's only export: `with Lease(client, group) as lease: ... lease.commit(...)`."""

    def __init__(
        self,
        client: ClientSettings,
        group: str,
        *,
        session_ms: int = SESSION_MS,
        tell: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.group = group
        self._session_ms = session_ms
        self._tell = tell
        self._me = Holder.this()
        core = build_client(client.bootstrap, self._me.client_id, client.security())
        self._engine = Engine(core, name=INSTANCE)
        self._flows = AdminFlows(self._engine.client, now_ms, client.timeout_ms)
        self._core = GroupCore(
            group,
            GroupOptions(
                session_timeout_ms=session_ms,
                heartbeat_interval_ms=session_ms / 5,
                max_poll_interval_ms=float("inf"),
                assignors=("range", "roundrobin"),
                instance_id=INSTANCE,
            ),
            self._engine.client.metadata,
        )
        self._identity: Identity | None = None

    def __enter__(self) -> Self:
        self._engine.start()
        try:
            self._wait_for_others()
            self._join()
        except BaseException:
            self._engine.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._leave()
        finally:
            self._engine.close()

    def check(self) -> None:
        """Ask the coordinator whether this export still has the group.

        Raises:
            BusyError: it lost it: another export took over, or somebody joined.
        """
        assert self._identity is not None

        def read(response: Struct) -> None:
            check_code(response.error_code, about=f"group {self.group!r}")

        request = heartbeat_request(self._identity)
        self._ask(Operation(ApiKey.HEARTBEAT, request, read, Route.COORDINATOR, self.group))

    def commit(self, offsets: Mapping[TopicPartition, CommittedOffset]) -> list[TopicPartition]:
        """Commit offsets as the member that joined; gives partitions that are gone meanwhile.

        Raises:
            BusyError: this export lost the group; nothing was committed.
            ClientError: the outcome is unknown, or the cluster does not answer.
        """
        assert self._identity is not None
        gone: list[TopicPartition] = []

        def read(response: Struct) -> None:
            gone.clear()
            for topic in response.topics:
                for item in topic.partitions:
                    if item.error_code in _GONE:
                        gone.append(TopicPartition(topic.name, item.partition_index))
                    else:
                        about = f"commit of {topic.name}-{item.partition_index}"
                        check_code(item.error_code, about=about)

        operation = Operation(
            ApiKey.OFFSET_COMMIT,
            commit_request(self._identity, offsets),
            read,
            Route.COORDINATOR,
            self.group,
        )
        self._ask(operation)
        return gone

    def _ask(self, operation: Operation[None]) -> None:
        """Something that the coordinator answers to the member alone that joined here."""
        try:
            self._engine.run(self._flows.run(operation))
        except BrokerError as error:
            if error.code in _FENCED:
                raise self._lost(error) from error
            raise

    # Taking and giving back.

    def _wait_for_others(self) -> None:
        """Return once nobody is in the group who may be alive.

        Raises:
            BusyError: somebody is.
        """
        deadline = time.monotonic() + self._session_ms / 1000 + 10
        is_told = False
        while True:
            waits_for: Holder | None = None
            for member in self._members():
                waits_for = self._judge(member) or waits_for
            if waits_for is None:
                return
            if time.monotonic() > deadline:
                raise BusyError(
                    f"group {self.group!r} is being exported by {waits_for}; one export at a time"
                )
            if not is_told:
                seconds = self._session_ms // 1000
                self._tell(f"an export by {waits_for} has the group; waiting {seconds} s for it")
                is_told = True
            time.sleep(_POLL_S)

    def _judge(self, member: GroupMember) -> Holder | None:
        """A member that may be a dead export elsewhere, or none; whoever is alive is an error."""
        holder = Holder.read(member.client_id) if member.instance_id == INSTANCE else None
        if holder is None:
            who = f"{member.client_id!r} at {member.client_host}"
            raise BusyError(
                f"group {self.group!r} has a member, {who}: an export needs a group of its own"
                " (--until committed follows a group of consumers)"
            )
        if holder.is_gone is None:
            return holder
        if not holder.is_gone:
            raise BusyError(
                f"group {self.group!r} is being exported by {holder}; one export at a time"
            )
        return None

    def _join(self) -> None:
        engine, core = self._engine, self._core
        with engine.lock:
            engine.client.cores.append(core)
            core.subscribe((), now_ms())  # of no topics: nothing to hand out, nothing to revoke
            engine.wake()
            is_in = engine.wait_for(
                lambda: core.state is MemberState.STABLE or core.error is not None,
                now_ms() + _JOIN_MS,
            )
            if core.error is not None:
                raise self._lost(core.error)
            if not is_in:
                raise BusyError(f"group {self.group!r} let nobody join for {_JOIN_MS / 1000:.0f} s")
            self._identity = self._now_identity()
        for member in self._members():
            if member.member_id != self._identity.member_id:
                self._leave()
                raise BusyError(
                    f"group {self.group!r} was joined by {member.client_id!r} at the same moment;"
                    " an export needs a group of its own"
                )

    def _leave(self) -> None:
        """Leave, so that the next export need not wait; static members are asked to by name."""
        identity, self._identity = self._identity, None
        if identity is None:
            return
        member = Struct(member_id=identity.member_id, group_instance_id=INSTANCE)
        request = Struct(group_id=self.group, members=[member])

        def read(response: Struct) -> None:
            check_code(response.error_code, about=f"leaving group {self.group!r}")

        with self._engine.lock:
            self._core.leave(lambda _response, _error, _now: None)
        operation = Operation(
            ApiKey.LEAVE_GROUP, lambda _: request, read, Route.COORDINATOR, self.group, 3
        )
        try:
            self._engine.run(self._flows.run(operation))
        except ClientError as error:
            # All is done and said; the session ends by itself.
            self._tell(f"the group is not left yet, its session ends by itself: {error}")

    def _members(self) -> tuple[GroupMember, ...]:
        try:
            found: GroupDescription = self._engine.run(
                self._flows.run(describe_group(self.group, decode_assignment))
            )
        except BrokerError as error:
            if error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                return ()
            raise
        return found.members

    def _now_identity(self) -> Identity:
        core = self._core
        return Identity(self.group, core.generation, core.member_id, INSTANCE)

    def _lost(self, reason: object) -> BusyError:
        why = f" ({reason})" if reason else ""
        return BusyError(
            f"this export lost group {self.group!r} to another export or consumer{why}; what its"
            " manifest does not list does not count, and the next run goes on from there"
        )


def _started(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
