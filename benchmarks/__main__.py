"""`python -m benchmarks`."""

from __future__ import annotations

import signal
import sys

try:
    from benchmarks.cli import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}; what the benchmarks need comes with `uv sync --group bench`")

signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # ends the clusters, too
sys.exit(main(sys.argv[1:]))
