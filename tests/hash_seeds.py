"""What a run prints under other orders of sets and dicts of strings."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.tree import ROOT


def printed_under_hash_seeds(code: str) -> set[str]:
    """What `code` prints in processes with different PYTHONHASHSEEDs."""
    return {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "77")
    }
