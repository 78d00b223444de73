"""Damaged bytes: what rot, a bad cable or a careless hand does to a stopped node's files."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Final

SPOTS_MAX: Final = 4
ZEROS: Final = 512
_KINDS: Final = (
    ("topics/*/partition-*/*.log", 6),
    ("topics/*/partition-*/*.index", 1),
    ("topics/*/partition-*/*.timeindex", 1),
    ("topics/*/partition-*/*.txnindex", 1),
    ("topics/*/partition-*/bare.entries", 1),
    ("meta/**/*.log", 1),
    ("state.journal", 1),
)
"""Files, and how often each kind is struck against the others."""


def spoil_bytes(data: Path, rng: Random) -> list[str]:
    """Damage some places in the files of one data folder; what was done."""
    told = []
    for _ in range(rng.randint(1, SPOTS_MAX)):
        patterns, weights = zip(*_KINDS, strict=True)
        (pattern,) = rng.choices(patterns, weights)
        files = sorted(path for path in data.glob(pattern) if path.stat().st_size)
        if files:
            told.append(_spoil(data, rng.choice(files), rng))
    return told


def _spoil(data: Path, path: Path, rng: Random) -> str:
    size = path.stat().st_size
    name = path.relative_to(data)
    position = rng.randrange(size)
    how = rng.choice(["bit", "zeros", "tail"] if path.suffix == ".log" else ["bit"])
    if how == "tail":
        cut = rng.randint(1, min(size, 4096))
        os.truncate(path, size - cut)
        return f"the last {cut} bytes of {name} are gone"
    with path.open("r+b") as file:
        file.seek(position)
        if how == "zeros":
            count = min(ZEROS, size - position)
            file.write(bytes(count))
            return f"{count} bytes of {name} at {position} are zeros"
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ (1 << rng.randrange(8))]))
        return f"a bit of {name} at {position} is flipped"
