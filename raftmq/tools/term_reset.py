"""Reset of a term that no election can have reached: offline work on a stopped node's data.

A term far above the log's last epoch stops a group for good: peers refuse such a jump, and no
replica stands for election above the highest term. `read_held_term` reports term and vote on one
node's disk, as a token; `agreed_term` takes the tokens of all voters and gives the term to go on
from.

A vote is dropped with its term. Two conditions make that safe. *No candidate can still win with
it*: every voter is stopped, so there are no candidates and leaders, and a restarted node asks anew.
*Nothing was acknowledged in a term that is dropped*: an acknowledged entry is on a majority, every
two majorities share a voter, and the new term is above all epochs in the voters' logs. So the
tokens of a majority are needed, and of every voter that comes back with its data: a single one
could hold entries of a term that is used a second time. A log that lost what it had promised cannot
tell which epochs it held, so it gives no token.

Invariants: the new term is above every epoch of every log with a token, and a group's voters that
are given the same tokens go to the same term; repeating it changes nothing.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

from attrs import evolve, frozen

from raftmq.foreign import TERM_JUMP_MAX, TERM_MAX
from raftmq.log.journal import GroupState
from raftmq.metadata.formation import TermReset
from raftmq.tools.unsafe_recovery import (
    TERM_STEP,
    Place,
    RecoveryRefusedError,
    open_group,
    partition_group,
)
from raftmq.types import METADATA_TOPIC, NodeId, RaftGroupId

_DIGEST_LENGTH: Final = 8
_TOKEN: Final = re.compile(
    r"([0-9a-f]{8}):([0-9]{1,10}):([0-9]{1,20}):([0-9]{1,20}):([0-9]{1,10}(?:\.[0-9]{1,10})*)"
    r":([0-9a-f]{8})"
)


@frozen(slots=True)
class TermToken:
    """Term and voters of a group on one node's disk.

    Attributes:
        group: a digest of the group's identity.
        last_epoch: of the newest entry in its log, or before its start.
        voters: by the newest entry of its log.
        state: a digest of all that may not change until the term is set back.
    """

    group: str
    node_id: NodeId
    term: int
    last_epoch: int
    voters: tuple[NodeId, ...]
    state: str

    def __str__(self) -> str:
        """GROUP:NODE:TERM:EPOCH:VOTERS:STATE."""
        voters = ".".join(str(node_id) for node_id in self.voters)
        return f"{self.group}:{self.node_id}:{self.term}:{self.last_epoch}:{voters}:{self.state}"

    @classmethod
    def parse(cls, text: str) -> TermToken:
        """Read a token.

        Raises:
            RecoveryRefusedError: the text is no token.
        """
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise RecoveryRefusedError(f"{text!r} is no token that --dry-run printed")
        voters = tuple(NodeId(int(word)) for word in match[5].split("."))
        return cls(match[1], NodeId(int(match[2])), int(match[3]), int(match[4]), voters, match[6])

    @property
    def is_absurd(self) -> bool:
        """True when no peer would adopt the term."""
        return self.term - self.last_epoch > TERM_JUMP_MAX


@frozen(slots=True)
class HeldTerm:
    """A group's term and vote on this node's disk, with the token made of them."""

    name: str
    group: RaftGroupId
    state: GroupState
    token: TermToken


def read_held_term(place: Place, topic: str, partition: int) -> HeldTerm:
    """Report what this node's disk holds of one group.

    Raises:
        RecoveryRefusedError: it is not here, or this node's log gives no token.
        DiskError: the device failed.
    """
    name, group, folder = partition_group(place, topic, partition)
    report, log = open_group(place, name, group, folder)
    if log is None:
        raise RecoveryRefusedError(f"{name} cannot be read here: {report.note}")
    last_epoch = max(report.last_epoch, log.log_start.previous_epoch)
    end = log.end_index
    if topic == METADATA_TOPIC:
        log.close()
    state = place.journal.get(group) or GroupState()
    if state.cut_floor or report.damaged or report.is_forgotten:
        raise RecoveryRefusedError(
            f"{name} lacks something here that this node may have promised: it cannot say which "
            "epochs its log held. Let peers repair it, or see `raftmq recover --accept-loss`"
        )
    if not report.before.voters:
        raise RecoveryRefusedError(f"{name} has no voters yet, as far as this log knows")
    promised = f"{report.identity}:{state.term}:{state.vote}:{last_epoch}:{end}"
    token = TermToken(
        group=_digest(str(group)),
        node_id=place.node.node_id,
        term=state.term,
        last_epoch=last_epoch,
        voters=tuple(voter.node_id for voter in report.before.voters),
        state=_digest(promised),
    )
    return HeldTerm(name, group, state, token)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


def agreed_term(held: HeldTerm, tokens: Sequence[str], survivors: Sequence[NodeId]) -> int:
    """The term to go on from, by the tokens of all voters.

    Args:
        survivors: all nodes that ever come back with their data; empty: every voter does.

    Raises:
        RecoveryRefusedError: a voter is missing, the tokens do not fit, or there is no need.
    """
    spoken = _spoken(held, tokens)
    voters = sorted({voter for token in spoken.values() for voter in token.voters})
    missing = [v for v in voters if v not in spoken and (not survivors or v in survivors)]
    if missing:
        raise RecoveryRefusedError(
            f"nodes {_listed(missing)} vote on {held.name}, and their tokens are missing: run "
            "`raftmq recover --reset-term TOPIC PARTITION --dry-run` on the stopped data folder of "
            "every voter, and hand all tokens to --agree TOKEN,TOKEN,... A node that is lost for "
            "good is left out by --survivors, the list of all others"
        )
    for token in spoken.values():
        count = sum(voter in spoken for voter in token.voters)
        if count <= len(token.voters) // 2:
            raise RecoveryRefusedError(
                f"{count} of the voters {_listed(token.voters)} that node {token.node_id} knows "
                f"speak, a majority of them must: where it is lost, `raftmq recover --unsafe` "
                "comes first"
            )
    last_epoch = max(token.last_epoch for token in spoken.values())
    if held.token.term - last_epoch <= TERM_JUMP_MAX:
        raise RecoveryRefusedError(
            f"the term {held.token.term} of {held.name} here is no more than {TERM_JUMP_MAX} above "
            f"the last epoch {last_epoch} of its voters' logs: it stays"
        )
    if last_epoch + TERM_STEP > TERM_MAX:
        raise RecoveryRefusedError(
            f"the logs of {held.name} themselves hold the epoch {last_epoch}: no term is left"
        )
    return last_epoch + TERM_STEP


def _spoken(held: HeldTerm, tokens: Sequence[str]) -> dict[NodeId, TermToken]:
    own = held.token
    # Alone in its group a node needs no other token.
    spoken = {own.node_id: own} if own.voters == (own.node_id,) and not tokens else {}
    for text in tokens:
        token = TermToken.parse(text)
        if token.group != own.group:
            raise RecoveryRefusedError(f"{text} is about another partition than {held.name}")
        if spoken.setdefault(token.node_id, token) != token:
            raise RecoveryRefusedError(f"two tokens of node {token.node_id} differ: take new ones")
    if spoken.get(own.node_id) != own:
        raise RecoveryRefusedError(
            f"this node's own token is {own}, and it is not among those handed to --agree: if it "
            "has changed, the node ran meanwhile; stop all voters and take new tokens of all"
        )
    return spoken


def _listed(ids: Sequence[NodeId]) -> str:
    return ",".join(str(node_id) for node_id in ids)


def record_of(held: HeldTerm, new_term: int, tokens: Sequence[str]) -> TermReset:
    """The record of the reset that the data folder keeps."""
    vote = held.state.vote
    return TermReset(
        group=f"{held.group.topic_id}:{held.group.partition}:{held.group.creation_epoch}",
        term=held.state.term,
        vote="" if vote is None else f"{vote.node_id}:{vote.storage_id:016x}",
        new_term=new_term,
        tokens=tuple(tokens),
    )


def reset_term(place: Place, held: HeldTerm, new_term: int) -> None:
    """Go on from `new_term`, with no vote in it; durable on return.

    Raises:
        DiskError: do it again.
    """
    assert held.token.last_epoch < new_term < held.state.term
    assert place.journal.get(held.group) == held.state, "nothing else writes to the journal"
    place.journal.put(held.group, evolve(held.state, term=new_term, vote=None))
    place.journal.flush_now()
