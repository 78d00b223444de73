"""The language of `scripts/*.txt`: a story per file, commands and the transcript they must give.

A file is a sequence of blocks: comments and commands, a line `----`, the transcript, an empty line.
Nodes are numbers. The commands:

    cluster voters=1,2,3 [learners=4] [log.1=1,1,2] [term.1=3] [vote.1=2]
            [flush=manual] [setting=..]
        log.N are the terms of N's first entries, one position each; settings are RaftConfig's
    lead 1                     elect 1 and let everybody know, without a transcript
    tick [1,2] [x3]            let time pass
    run [x10]                  let time pass on all nodes and deliver everything, again and again
    quietly COMMAND            do it without a transcript
    timeout 2                  let time pass for 2 alone until it does something about it
    campaign 2                 the leader's connection closed
    deliver [1->2] [Kind] [one]   deliver what is in flight, and what that causes, until it rests
    drop [1->2] [Kind] [one]   lose what is in flight
    again [1->2] [Kind] [one]  what is in flight arrives a second time, after all the rest
    forge 1->2 TimeoutNow      put a message in flight that 1 did not send; also InstallLogStart
    partition 1|2,3            lose everything between the sides;  heal: no longer
    cut 1->2                   lose everything in one direction
    propose 1 [x3] [width=2] [bytes=100]
    flush 1                    with flush=manual: all that 1 wrote is durable
    crash 1 [survives=1]       of what is not flushed, so many entries survive
    restart 1 [keep=2] [floor=5]  keep: the first entries alone are left; floor: claimed_end_floor
    wipe 1 storage=11 [floor=5]   an empty disk, under another storage id
    join 4                     a node with an empty log that knows of no configuration
    suspend 1 [floor=5]; resume 1
    transfer 1->2; abort 1
    change 1 +voter:4 +learner:4 -3     1 proposes the configuration with these changes
    read 1; confirm 1 round=3
    trim 1 to=5                drop the log below
    status [1]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raftmq.errors import KafkaError
from raftmq.raft.core import RaftCore
from raftmq.raft.membership import Configuration
from raftmq.raft.messages import (
    AppendReply,
    AppendRequest,
    Entry,
    HardState,
    Heartbeat,
    HeartbeatReply,
    InstallLogStart,
    Message,
    PreVoteReply,
    PreVoteRequest,
    Ready,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from raftmq.types import RaftIndex, ReplicaId, Term
from tests.raft.network import Disk, Network, Node, configuration, entries_of, replica


class Block:
    """Commands and what they are to print."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.expected: list[str] = []


def parse(text: str) -> list[Block]:
    """The blocks of a script."""
    blocks: list[Block] = []
    block, is_output = Block(), False
    for line in text.splitlines():
        if line == "----":
            is_output = True
        elif is_output and not line:
            blocks.append(block)
            block, is_output = Block(), False
        elif is_output:
            block.expected.append(line)
        else:
            block.commands.append(line)
    if is_output:
        blocks.append(block)
    return blocks


def run(text: str) -> str:
    """The script with the transcript that its commands give now."""
    story = Story()
    written: list[str] = []
    for block in parse(text):
        written += [*block.commands, "----", *story.play(block.commands), ""]
    return "\n".join(written)


def short(who: ReplicaId) -> str:
    """A replica as its node's number, and its storage if that is not the first one."""
    if who == replica(who.node_id):
        return str(who.node_id)
    return f"{who.node_id}/{who.storage_id}"


def entry_text(each: Entry) -> str:
    """One entry as its range, term and kind."""
    kind = "" if not each.is_bare else f" {each.kind.name.lower()}"
    return f"[{each.start},{each.end})@{each.term}{kind}"


def members_text(members: Configuration) -> str:
    """Voters, and learners in brackets."""
    voters = ",".join(map(short, members.voters))
    learners = ",".join(map(short, members.learners))
    return f"{voters or 'nobody'}" + (f" ({learners})" if learners else "")


def message_text(message: Message) -> str:
    """One message, without what says nothing."""
    head = f"{short(message.sender)}->{short(message.to)} {type(message).__name__}"
    return f"{head} term={message.term}{_body(message)}"


def _body(message: Message) -> str:
    match message:
        case PreVoteRequest() | VoteRequest():
            transfer = " transfer" if getattr(message, "is_transfer", False) else ""
            return f" log_end={message.log_end}@{message.last_term}{transfer}"
        case PreVoteReply() | VoteReply():
            return " granted" if message.granted else " refused"
        case AppendRequest():
            entries = "".join(" " + entry_text(each) for each in message.entries)
            return (
                f" prev={message.prev_end}@{message.prev_term} commit={message.commit_end}{entries}"
            )
        case AppendReply():
            promise = "" if message.is_promise else " no promise"
            if message.accepted:
                return f" flushed={message.flushed_end}{promise}"
            hint = f"hint={message.hint_end}@{message.hint_term}"
            return f" refused={message.refused_prev_end} {hint}{promise}"
        case Heartbeat():
            return f" commit={message.commit_end} round={message.round}"
        case HeartbeatReply():
            return f" round={message.round} matched={message.matched_end}"
        case InstallLogStart():
            members = members_text(Configuration.decode(message.configuration))
            return f" start={message.log_start}@{message.previous_term} members={members}"
        case TimeoutNow():
            return ""


class Story:
    """A network that writes down what happens."""

    def __init__(self) -> None:
        self.network = Network()
        self.lines: list[str] = []
        self.settings: dict[str, Any] = {}
        self.auto_flush = True
        self.network.on_send = self._on_send

    def play(self, commands: list[str]) -> list[str]:
        """Run commands; the transcript."""
        self.lines = []
        for command in commands:
            words = command.split("#")[0].split()
            if words:
                handler: Callable[..., None] = getattr(self, f"do_{words[0]}")
                handler(*words[1:])
        return self.lines or ["(nothing)"]

    def _on_send(self, message: Message, is_lost: bool) -> None:
        self.lines.append("  " + message_text(message) + (" (lost)" if is_lost else ""))

    def _on_ready(self, node: Node, ready: Ready) -> None:
        parts: list[str] = []
        if ready.hard_state is not None:
            vote = ready.hard_state.vote
            parts.append(f"term {ready.hard_state.term}")
            parts += [f"vote {short(vote)}"] if vote is not None else []
        if ready.soft_state is not None:
            leader = ready.soft_state.leader
            of = f" of {short(leader)}" if leader not in (None, node.self_id) else ""
            assert leader is None or of or ready.soft_state.role.value == "leader"
            parts.append(ready.soft_state.role.value + of)
        if ready.install is not None:
            parts.append(f"begin anew at {ready.install.log_start}")
        if ready.truncate_end is not None:
            parts.append(f"truncate to {ready.truncate_end}")
        if ready.append:
            parts.append("append " + " ".join(map(entry_text, ready.append)))
        if ready.commit_end is not None:
            parts.append(f"commit {ready.commit_end}")
        if parts:
            self.lines.append(f"{short(node.self_id)}: " + ", ".join(parts))

    def _node(self, number: str) -> Node:
        return self.network.nodes[int(number)]

    def _core(self, number: str) -> RaftCore:
        return self._node(number).core

    def _add(self, number: int, disk: Disk, **more: Any) -> Node:
        node = self.network.add(number, disk, seed=number, **{**self.settings, **more})
        node.auto_flush = self.auto_flush
        node.on_ready = self._on_ready
        return node

    def _try(self, number: str, action: Callable[[], object]) -> None:
        try:
            action()
        except KafkaError as error:
            self.lines.append(f"{number}: refused, {error.code.name}")
        self._node(number).drain()

    # Commands

    def do_cluster(self, *words: str) -> None:
        options = dict(word.split("=") for word in words)
        self.auto_flush = options.pop("flush", "auto") == "auto"
        voters = numbers(options.pop("voters"))
        learners = numbers(options.pop("learners", ""))
        base = configuration(voters, learners)
        own: dict[int, dict[str, str]] = {number: {} for number in (*voters, *learners)}
        for name, value in options.items():
            name, _, whose = name.partition(".")
            if whose:
                own[int(whose)][name] = value
            else:
                self.settings[name] = setting(value)
        for number, mine in own.items():
            entries = entries_of(numbers(mine.pop("log", "")))
            last_term = entries[-1].term if entries else 0
            vote = mine.pop("vote", None)
            hard_state = HardState(
                Term(int(mine.pop("term", last_term))), replica(int(vote)) if vote else None
            )
            commit_end = int(mine.pop("commit", 0))
            more = {name: setting(value) for name, value in mine.items()}
            self._add(
                number,
                Disk(entries, base=base, hard_state=hard_state),
                commit_end=commit_end,
                **more,
            )

    def do_tick(self, *words: str) -> None:
        count, nodes = 1, list(self.network.nodes)
        for word in words:
            if word.startswith("x"):
                count = int(word[1:])
            else:
                nodes = numbers(word)
        self.network.tick(*nodes, count=count)

    def do_lead(self, number: str) -> None:
        written = len(self.lines)
        self.network.elect(int(number))
        self.network.tick(int(number), count=2)
        self.network.settle()
        del self.lines[written:]

    def do_run(self, times: str = "x1") -> None:
        for _ in range(int(times.removeprefix("x"))):
            self.network.tick()
            self.network.settle()

    def do_quietly(self, command: str, *words: str) -> None:
        written = len(self.lines)
        getattr(self, f"do_{command}")(*words)
        del self.lines[written:]

    def do_timeout(self, number: str) -> None:
        before = len(self.lines)
        for _ in range(100):
            self.network.tick(int(number))
            if len(self.lines) > before:
                return
        self.lines.append(f"{number}: waits")

    def do_campaign(self, number: str) -> None:
        self._core(number).campaign()
        self._node(number).drain()

    def do_deliver(self, *words: str) -> None:
        wanted, is_one = chosen(words)
        if is_one:
            self.network.deliver(next(each for each in self.network.flight if wanted(each)))
        else:
            self.network.settle(wanted)

    def do_drop(self, *words: str) -> None:
        wanted, is_one = chosen(words)
        dropped = [each for each in self.network.flight if wanted(each)]
        for each in dropped[:1] if is_one else dropped:
            self.network.flight.remove(each)
            self.lines.append("  " + message_text(each) + " (dropped)")

    def do_again(self, *words: str) -> None:
        wanted, is_one = chosen(words)
        doubled = [each for each in self.network.flight if wanted(each)]
        self.network.flight += doubled[:1] if is_one else doubled

    def do_forge(self, pair: str, kind: str) -> None:
        sender, to = pair.split("->")
        core = self._core(sender)
        from_, to_ = core.self_id, self._core(to).self_id
        if kind == "TimeoutNow":
            self.network.send(TimeoutNow(core.term, from_, to_))
            return
        assert kind == "InstallLogStart"
        self.network.send(
            InstallLogStart(
                core.term,
                from_,
                to_,
                core.log_start,
                core.epochs.previous_term,
                b"log start",
                core.configurations.base.encode(),
            )
        )

    def do_partition(self, sides: str) -> None:
        self.network.partition(*[numbers(side) for side in sides.split("|")])

    def do_cut(self, pair: str) -> None:
        sender, to = pair.split("->")
        self.network.cut.append((int(sender), int(to)))

    def do_heal(self) -> None:
        self.network.heal()

    def do_propose(self, number: str, *words: str) -> None:
        width, size, count = 1, 1, 1
        for word in words:
            if word.startswith("x"):
                count = int(word[1:])
            elif word.startswith("width="):
                width = int(word[6:])
            else:
                size = int(word.removeprefix("bytes="))
        self._try(
            number,
            lambda: [self._core(number).propose(bytes(size), width) for _ in range(count)],
        )

    def do_flush(self, number: str) -> None:
        self._node(number).flush()
        self._node(number).drain()

    def do_crash(self, number: str, survives: str = "survives=0") -> None:
        self._node(number).crash(int(survives.removeprefix("survives=")))

    def do_restart(self, number: str, *words: str) -> None:
        options = dict(word.split("=") for word in words)
        node = self._node(number)
        if "keep" in options:
            del node.cache.entries[int(options["keep"]) :]
        node.restart()
        node.core.claimed_end_floor = RaftIndex(int(options.get("floor", 0)))
        node.drain()

    def do_wipe(self, number: str, *words: str) -> None:
        options = dict(word.split("=") for word in words)
        node = self._node(number)
        wiped = self._add(
            int(number),
            Disk(base=node.disk.base),
            self_id=replica(int(number), int(options["storage"])),
        )
        wiped.core.claimed_end_floor = RaftIndex(int(options.get("floor", 0)))

    def do_join(self, number: str) -> None:
        self._add(int(number), Disk())

    def do_suspend(self, number: str, floor: str = "floor=0") -> None:
        self._core(number).suspended = True
        self._core(number).claimed_end_floor = RaftIndex(int(floor.removeprefix("floor=")))

    def do_resume(self, number: str) -> None:
        self._core(number).suspended = False
        self._core(number).claimed_end_floor = RaftIndex(0)

    def do_transfer(self, pair: str) -> None:
        sender, to = pair.split("->")
        self._try(sender, lambda: self._core(sender).transfer_leadership(replica(int(to))))

    def do_abort(self, number: str) -> None:
        self._core(number).abort_transfer()

    def do_change(self, number: str, *changes: str) -> None:
        members = self._core(number).configuration
        for change in changes:
            kind, _, who = change.rpartition(":")
            if kind == "+voter":
                members = members.with_voter(named(who))
            elif kind == "+learner":
                members = members.with_learner(named(who))
            else:
                members = members.without(named(who.removeprefix("-")))
        self._try(number, lambda: self._core(number).propose_membership(members))

    def do_read(self, number: str) -> None:
        asked = self._core(number).read_index()
        said = "not now" if asked is None else f"up to {asked[1]}, after round {asked[0]}"
        self.lines.append(f"{number}: read {said}")
        self._node(number).drain()

    def do_confirm(self, number: str, round_number: str) -> None:
        wanted = int(round_number.removeprefix("round="))
        said = "confirmed" if self._core(number).read_confirmed(wanted) else "not confirmed"
        self.lines.append(f"{number}: round {wanted} {said}")

    def do_trim(self, number: str, to: str) -> None:
        self._node(number).trim(int(to.removeprefix("to=")))

    def do_status(self, *numbers_: str) -> None:
        for number in numbers_ or tuple(map(str, self.network.nodes)):
            core = self._core(number)
            members = members_text(core.configuration)
            log = f"log=[{core.log_start},{core.log_end})@{core.epochs.last_term}"
            ends = f"flushed={core.flushed_end} commit={core.commit_end}"
            claim = "" if core.is_claim_restored else " claim not restored"
            role = core.role.value
            line = f"{number}: {role} term={core.term} {log} {ends} members={members}"
            self.lines.append(line + claim)
            for who, progress in core.progress.items():
                self.lines.append(f"   {short(who)}: {progress}")


def numbers(text: str) -> list[int]:
    """1,2,3"""
    return [int(number) for number in text.split(",") if number]


def named(text: str) -> ReplicaId:
    """A replica as `short` writes it."""
    node_id, _, storage_id = text.partition("/")
    return replica(int(node_id), int(storage_id or 0))


def setting(value: str) -> int | bool:
    """A number, yes or no."""
    return {"yes": True, "no": False}[value] if value in ("yes", "no") else int(value)


def chosen(words: tuple[str, ...]) -> tuple[Callable[[Message], bool], bool]:
    """Which messages a command means, and whether only the first of them."""
    sender = to = kind = ""
    for word in words:
        if "->" in word:
            sender, to = word.split("->")
        elif word != "one":
            kind = word

    def wanted(message: Message) -> bool:
        return (
            (not sender or message.sender.node_id == int(sender))
            and (not to or message.to.node_id == int(to))
            and (not kind or type(message).__name__ == kind)
        )

    return wanted, "one" in words
