"""Writes histories by hand: one method per operation, complete or left open."""

from __future__ import annotations

from typing import Any

from jepsen_like.checkers import Options, Report, check_events
from jepsen_like.history_events import Event, Recorder, Value

KEY = "t-0"
Rows = dict[int, Value]


class Scribe:
    """A history that grows event by event; time passes by itself."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._now = 0
        self.recorder = Recorder(self.events.append, self._clock)
        self.invoke = self.recorder.invoke
        self.ok, self.fail, self.info = self.recorder.ok, self.recorder.fail, self.recorder.info
        self.note = self.recorder.note

    def _clock(self) -> int:
        self._now += 1000
        return self._now

    def pass_by(self, ns: int) -> None:
        """Let time pass."""
        self._now += ns

    def begin_append(self, process: int, *values: Value, key: str = KEY, **more: Any) -> Event:
        return self.invoke(
            process, "append", records={key: [(-1, value) for value in values]}, **more
        )

    def end_append(self, invoked: Event, rows: Rows, key: str = KEY) -> None:
        self.ok(invoked, records={key: list(rows.items())})

    def append(self, process: int, rows: Rows, key: str = KEY, **more: Any) -> Event:
        invoked = self.begin_append(process, *rows.values(), key=key, **more)
        self.end_append(invoked, rows, key)
        return invoked

    def poll(
        self,
        process: int,
        rows: Rows | list[tuple[int, Value]],
        key: str = KEY,
        *,
        start: int | None = None,
        moved: tuple[str, ...] = (),
        f: str = "poll",
    ) -> Event:
        invoked = self.invoke(process, f, offsets={} if start is None else {key: start})
        told = list(rows.items()) if isinstance(rows, dict) else rows
        self.ok(invoked, records={key: told} if told else {}, partitions=list(moved))
        return invoked

    def assign(self, process: int, **offsets: int) -> None:
        wanted = {key.replace("_", "-"): offset for key, offset in offsets.items()}
        self.ok(self.invoke(process, "assign", offsets=wanted))

    def commit(self, process: int, offset: int, generation: int = -1, key: str = KEY) -> Event:
        invoked = self.invoke(
            process, "commit", group="g", generation=generation, offsets={key: offset}
        )
        self.ok(invoked)
        return invoked

    def committed(self, process: int, offset: int, key: str = KEY) -> Event:
        invoked = self.invoke(process, "committed", group="g", partitions=[key])
        self.ok(invoked, offsets={key: offset})
        return invoked

    def assigned(self, process: int, generation: int, *keys: str, **offsets: int) -> None:
        at = {key.replace("_", "-"): offset for key, offset in offsets.items()}
        self.note(
            process,
            "assigned",
            group="g",
            generation=generation,
            partitions=list(keys),
            offsets=at,
        )

    def subscribe(self, process: int) -> None:
        self.ok(self.invoke(process, "subscribe", group="g", topics=["t"]))

    def topic(self, f: str, name: str, how: str = "ok", code: int = 0) -> None:
        invoked = self.invoke(0, f, topics=[name])
        {"ok": self.ok, "fail": self.fail, "info": self.info}[how](invoked, code=code)

    def topics(self, *names: str, stale: bool = False) -> None:
        self.ok(self.invoke(0, "list_topics", stale=stale), topics=list(names))

    def report(self, **options: Any) -> Report:
        return check_events(self.events, Options(**options))
