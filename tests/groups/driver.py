"""Drives one group as its coordinator would, with time moved by hand."""

from __future__ import annotations

from raftmq.errors import ErrorCode
from raftmq.groups.group import Group
from raftmq.groups.model import GroupConfig, JoinRequest, JoinResult, Phase, SyncResult
from raftmq.metadata.commands import Generation, ReplaceMember
from raftmq.promise import Promise

CONFIG = GroupConfig(initial_rebalance_delay_ms=0, size_max=4)
RANGE = (("range", b"sub"),)


class Driver:
    """A group and its time; performs its work as a coordinator would."""

    def __init__(self, config: GroupConfig = CONFIG) -> None:
        self.group = Group("g", config, coordinator_epoch=7)
        self.now = 0.0
        self.commands: list[object] = []
        self.ids = 0

    def perform(self) -> None:
        effects = self.group.take_effects()
        self.commands += effects.commands
        for promise, result in effects.answers:
            promise.resolve(result)

    def join(self, member_id: str = "", **kwargs: object) -> Promise[JoinResult]:
        self.ids += 1
        kwargs.setdefault("protocols", RANGE)
        kwargs.setdefault("session_timeout_ms", 10_000)
        kwargs.setdefault("rebalance_timeout_ms", 60_000)
        request = JoinRequest(member_id, **kwargs)  # type: ignore[arg-type]
        promise = self.group.join(request, f"m{self.ids}", self.now)
        self.perform()
        return promise

    def sync(
        self, member_id: str, assignments: dict[str, bytes] | None = None, **kwargs: object
    ) -> Promise[SyncResult]:
        generation = kwargs.pop("generation", self.group.generation)
        instance_id = kwargs.pop("instance_id", None)
        promise = self.group.sync(
            generation,  # type: ignore[arg-type]
            member_id,
            instance_id,  # type: ignore[arg-type]
            (assignments or {}).items(),
            self.now,
            **kwargs,  # type: ignore[arg-type]
        )
        self.perform()
        return promise

    def heartbeat(self, member_id: str, generation: int | None = None) -> ErrorCode:
        generation = self.group.generation if generation is None else generation
        return self.group.heartbeat(generation, member_id, None, self.now)

    def leave(self, member_id: str, instance_id: str | None = None) -> ErrorCode:
        error = self.group.leave(member_id, instance_id, self.now)
        self.perform()
        return error

    def apply(self) -> None:
        """The metadata group applies what was proposed."""
        commands, self.commands = self.commands, []
        for command in commands:
            if isinstance(command, Generation):
                self.group.generation_applied(command, self.now)
            else:
                assert isinstance(command, ReplaceMember)
                self.group.member_replaced(command)
            self.perform()

    def wait(self, ms: float) -> None:
        self.now += ms
        self.group.tick(self.now)
        self.perform()

    def stable(self, count: int = 2) -> list[str]:
        """Bring the group to Stable with so many members; returns their ids, the leader first."""
        joins = [self.join()]
        for _ in range(count - 1):
            joins.append(self.join())
            first = joins[0].result()
            joins[0] = self.join(first.member_id)
            for i, earlier in enumerate(joins[1:-1], 1):
                joins[i] = self.join(earlier.result().member_id)
        ids = [join.result().member_id for join in joins]
        for member_id in reversed(ids):
            self.sync(member_id, {m: m.encode() for m in ids} if member_id == ids[0] else None)
        self.apply()
        assert self.group.phase is Phase.STABLE
        return ids


def empty() -> Driver:
    return Driver()


def preparing() -> Driver:
    driver = Driver()
    ids = driver.stable(2)
    assert not driver.join(ids[0]).is_done
    assert driver.group.phase is Phase.PREPARING
    return driver


def completing() -> Driver:
    driver = Driver()
    ids = driver.stable(2)
    driver.join(ids[0])
    driver.join(ids[1])
    assert driver.group.phase is Phase.COMPLETING
    return driver


def stable() -> Driver:
    driver = Driver()
    driver.stable(2)
    return driver


def dead() -> Driver:
    driver = Driver()
    driver.stable(2)
    driver.group.close(ErrorCode.NOT_COORDINATOR)
    driver.perform()
    return driver
