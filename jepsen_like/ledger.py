"""Which seeds of a long run are done, so that it can go on after an interruption.

One line of JSON per seed, for the code as it is: a run with other code begins anew, since what a
seed does changes with any line. Keeps what a summary needs and no history, so that memory stays
bounded however many seeds there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import msgspec

from jepsen_like.cluster.run import ClusterResult, Verdict
from jepsen_like.cluster.world import Counts

ROOT = Path(__file__).parents[1]


def code_digest() -> str:
    """Names the code of product and simulation."""
    digest = blake2b(digest_size=6)
    for folder in ("raftmq", "jepsen_like"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Line(msgspec.Struct, frozen=True):
    """What is kept of one run."""

    seed: int
    verdict: str
    name: str
    trace_hash: str
    seconds: float
    counts: dict[str, Any]


class Ledger:
    """The runs that are done, in a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def read(self) -> Iterator[ClusterResult]:
        """What is done; a line that an interruption cut off is taken away."""
        if not self._path.exists():
            return
        whole, _, rest = self._path.read_bytes().rpartition(b"\n")
        if rest:
            self._path.write_bytes(whole + b"\n")
        for text in whole.splitlines():
            line = msgspec.json.decode(text, type=Line)
            yield ClusterResult(
                line.seed,
                Verdict[line.verdict],
                line.name,
                counts=Counts(**line.counts),
                trace_hash=line.trace_hash,
                seconds=line.seconds,
            )

    def add(self, result: ClusterResult) -> None:
        """One more is done."""
        counts = {
            key: value for key, value in attrs.asdict(result.counts).items() if key != "faults"
        }
        line = Line(
            result.seed, result.verdict.name, result.name, result.trace_hash, result.seconds, counts
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
