"""A correct queue, run step by step with a seed, and the history that its clients would write.

Logs, committed offsets, generations and topics are single copies, so each operation takes effect at
one moment between its begin and its end, or never, or (of unknown outcome) after its end. Processes
crash and come back under new numbers. At the end everything is read.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from attrs import define, field

from jepsen_like.history_events import OFFSET_UNKNOWN, Event, Recorder, Value

PARTITIONS = ("t-0", "t-1")
TOPICS = ("a", "b", "c")
MEMBERS = 2
PRODUCERS = 3
UNDER_WAY_MAX = 8


@define(eq=False)
class UnderWay:
    """An operation that began: its effect, and what its client is told."""

    invoked: Event
    effect: Callable[[], Callable[[], None]]
    """Takes effect; returns what tells the client so."""
    tell: Callable[[], None] | None = None
    is_given_up: bool = False


@define(eq=False)
class Client:
    """A process of some kind; its number changes when it crashes."""

    kind: str
    process: int
    is_busy: bool = False
    positions: dict[str, int] = field(factory=dict)
    generation: int = -1


class Execution:
    """Runs the queue and its clients."""

    def __init__(self, seed: int, steps: int) -> None:
        self.rng = Random(seed)
        self.events: list[Event] = []
        self._now = 0
        self.recorder = Recorder(self.events.append, self._clock)
        self.logs: dict[str, list[Value]] = {name: [] for name in PARTITIONS}
        self.committed: dict[str, int] = {}
        self.registers: dict[str, int] = {}
        self.topics: set[str] = set()
        self.generation = 0
        self._values = 0
        self._processes = 0
        self._under_way: list[UnderWay] = []
        kinds = ["produce"] * PRODUCERS + ["member"] * MEMBERS
        kinds += ["assign", "fetch", "admin", "admin", "register", "register"]
        self.clients = [Client(kind, self._new_process()) for kind in kinds]
        self._run(steps)

    def _clock(self) -> int:
        self._now += self.rng.randrange(1, 1000)
        return self._now

    def _new_process(self) -> int:
        self._processes += 1
        return self._processes

    def _run(self, steps: int) -> None:
        for client in self.clients:
            self._begin_life(client)
        for _ in range(steps):
            if self.rng.random() < 0.02 and self._may_rebalance():
                self._rebalance()
            elif self._under_way and (
                len(self._under_way) > UNDER_WAY_MAX or self.rng.random() < 0.6
            ):
                self._advance(self.rng.choice(self._under_way))
            else:
                self._begin(self.rng.choice(self.clients))
        while self._under_way:
            self._advance(self._under_way[0])
        self._read_everything()

    def _advance(self, operation: UnderWay) -> None:
        """Its effect, then its end; some clients do not wait, some crash."""
        fate = self.rng.random()
        if operation.is_given_up:
            self._under_way.remove(operation)
            if operation.tell is None and fate < 0.5:
                operation.effect()
        elif fate < 0.06 and operation.invoked.f in ("append", "commit", "create_topic"):
            self.recorder.info(operation.invoked, error="timed out")
            operation.is_given_up = True
            self._crash(operation.invoked.process)
        elif operation.tell is None:
            operation.tell = operation.effect()
        else:
            self._under_way.remove(operation)
            operation.tell()
            self._free(operation.invoked.process)

    def _free(self, process: int) -> None:
        for client in self.clients:
            if client.process == process:
                client.is_busy = False

    def _crash(self, process: int) -> None:
        """What else it had under way is unknown too."""
        for client in self.clients:
            if client.process == process:
                for other in self._under_way:
                    if other.invoked.process == process and not other.is_given_up:
                        self.recorder.info(other.invoked, error="crashed")
                        other.is_given_up = True
                self.recorder.note(process, "crash")
                client.process = self._new_process()
                client.is_busy = False
                self._begin_life(client)

    def _begin_life(self, client: Client) -> None:
        recorder, process = self.recorder, client.process
        if client.kind == "member":
            client.positions, client.generation = {}, -1
            recorder.ok(recorder.invoke(process, "subscribe", group="g", topics=["t"]))
        elif client.kind in ("assign", "fetch"):
            client.positions = {name: self.rng.randrange(2) for name in PARTITIONS}
            invoked = recorder.invoke(process, "assign", offsets=dict(client.positions))
            recorder.ok(invoked)

    def _begin(self, client: Client) -> None:
        if client.is_busy and (client.kind != "produce" or self.rng.random() < 0.5):
            return
        client.is_busy = True
        begin = {
            "produce": self._append,
            "member": self._member,
            "assign": self._poll,
            "fetch": self._fetch,
            "admin": self._administer,
            "register": self._register,
        }[client.kind]
        begin(client)

    def _start(self, invoked: Event, effect: Callable[[], Callable[[], None]]) -> None:
        self._under_way.append(UnderWay(invoked, effect))

    # ---- producers: pipelined, so effects keep the order of one process and partition ----

    def _append(self, client: Client) -> None:
        name = self.rng.choice(PARTITIONS)
        values: list[Value] = []
        for _ in range(self.rng.randrange(1, 4)):
            self._values += 1
            values.append(self._values if name == "t-0" else f"v{self._values}")
        invoked = self.recorder.invoke(
            client.process, "append", records={name: [(OFFSET_UNKNOWN, v) for v in values]}
        )

        def effect() -> Callable[[], None]:
            for earlier in self._under_way:  # what was sent before on this connection goes first
                if earlier.invoked is invoked:
                    break
                same = earlier.invoked.process == invoked.process
                if same and name in earlier.invoked.records and earlier.tell is None:
                    earlier.tell = earlier.effect()
            log = self.logs[name]
            if self.rng.random() < 0.05:
                return lambda: self._end(self.recorder.fail, invoked, code=19)
            rows = list(enumerate(values, len(log)))
            log.extend(values)
            return lambda: self._end(self.recorder.ok, invoked, records={name: rows})

        self._start(invoked, effect)

    def _end(self, end: Callable[..., bool], invoked: Event, **told: object) -> None:
        end(invoked, **told)

    # ---- consumers ----

    def _poll(self, client: Client, *, names: tuple[str, ...] = PARTITIONS) -> None:
        invoked = self.recorder.invoke(client.process, "poll")

        def effect() -> Callable[[], None]:
            records: dict[str, list[tuple[int, Value]]] = {}
            for name in names:
                position, log = client.positions.get(name, 0), self.logs[name]
                end = min(len(log), position + self.rng.randrange(6))
                if position < end:
                    records[name] = list(enumerate(log[position:end], position))
                    client.positions[name] = end
            return lambda: self._end(self.recorder.ok, invoked, records=records)

        self._start(invoked, effect)

    def _fetch(self, client: Client) -> None:
        """A direct fetch, a fresh read or the end of one partition."""
        name = self.rng.choice(PARTITIONS)
        position = self.rng.randrange(len(self.logs[name]) + 3)
        f = self.rng.choice(["poll", "read", "end_offset"])
        offsets = {} if f == "end_offset" else {name: position}
        if f == "read" and position > len(self.logs[name]):
            offsets = {name: 0}
        invoked = self.recorder.invoke(client.process, f, offsets=offsets)

        def effect() -> Callable[[], None]:
            log = self.logs[name]
            if f == "end_offset":
                end = {name: len(log)}
                return lambda: self._end(self.recorder.ok, invoked, offsets=end)
            start = invoked.offsets[name]
            if start > len(log):
                return lambda: self._end(self.recorder.fail, invoked, code=1)
            rows = list(enumerate(log[start:], start))
            if f == "poll":
                rows = rows[: self.rng.randrange(5)]
            return lambda: self._end(self.recorder.ok, invoked, records={name: rows})

        self._start(invoked, effect)

    def _may_rebalance(self) -> bool:
        members = {client.process for client in self.clients if client.kind == "member"}
        return not any(
            o.invoked.f == "poll" and o.invoked.process in members for o in self._under_way
        )

    def _rebalance(self) -> None:
        """A new generation: everybody gives up everything and gets something."""
        self.generation += 1
        members = [client for client in self.clients if client.kind == "member"]
        self.rng.shuffle(members)
        shares: dict[int, list[str]] = {member.process: [] for member in members}
        for index, name in enumerate(PARTITIONS):
            shares[members[index % len(members)].process].append(name)
        for member in members:
            mine = shares[member.process]
            if member.positions:
                self.recorder.note(
                    member.process, "revoked", group="g", partitions=sorted(member.positions)
                )
            member.positions = {name: self.committed.get(name, 0) for name in mine}
            member.generation = self.generation
            self.recorder.note(
                member.process,
                "assigned",
                group="g",
                generation=self.generation,
                partitions=mine,
                offsets=dict(member.positions),
            )

    def _member(self, client: Client) -> None:
        owned = tuple(client.positions)
        if not owned or self.rng.random() < 0.6:
            self._poll(client, names=owned)
            return
        generation = client.generation
        offsets = dict(client.positions)
        invoked = self.recorder.invoke(
            client.process, "commit", group="g", generation=generation, offsets=offsets
        )

        def effect() -> Callable[[], None]:
            if generation != self.generation:
                return lambda: self._end(self.recorder.fail, invoked, code=22)
            self.committed.update(offsets)
            return lambda: self._end(self.recorder.ok, invoked)

        self._start(invoked, effect)

    # ---- registers and topics ----

    def _register(self, client: Client) -> None:
        name = self.rng.choice(PARTITIONS)
        if self.rng.random() < 0.5:
            self._values += 1
            offsets = {name: self._values}
            invoked = self.recorder.invoke(client.process, "commit", group="r", offsets=offsets)

            def write() -> Callable[[], None]:
                self.registers.update(offsets)
                return lambda: self._end(self.recorder.ok, invoked)

            self._start(invoked, write)
            return
        group = self.rng.choice("rg")
        asked = self.recorder.invoke(client.process, "committed", group=group, partitions=[name])

        def read() -> Callable[[], None]:
            held = self.registers if group == "r" else self.committed
            told = {name: held.get(name, OFFSET_UNKNOWN)}
            return lambda: self._end(self.recorder.ok, asked, offsets=told)

        self._start(asked, read)

    def _administer(self, client: Client) -> None:
        f = self.rng.choice(["create_topic", "delete_topic", "list_topics"])
        name = self.rng.choice(TOPICS)
        invoked = self.recorder.invoke(
            client.process, f, topics=[] if f == "list_topics" else [name]
        )

        def effect() -> Callable[[], None]:
            if f == "list_topics":
                listed = sorted(self.topics)
                return lambda: self._end(self.recorder.ok, invoked, topics=listed)
            if (f == "create_topic") == (name in self.topics):
                code = 36 if f == "create_topic" else 3
                return lambda: self._end(self.recorder.fail, invoked, code=code)
            self.topics ^= {name}
            return lambda: self._end(self.recorder.ok, invoked)

        self._start(invoked, effect)

    def _read_everything(self) -> None:
        process = self._new_process()
        recorder = self.recorder
        recorder.ok(recorder.invoke(process, "assign", offsets=dict.fromkeys(PARTITIONS, 0)))
        records = {name: list(enumerate(log)) for name, log in self.logs.items() if log}
        recorder.ok(recorder.invoke(process, "poll"), records=records)
        recorder.ok(recorder.invoke(process, "list_topics"), topics=sorted(self.topics))
