"""`python -m benchmarks`."""

from __future__ import annotations

import signal
import sys

from benchmarks.cli import main

signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))  # ends the clusters, too
sys.exit(main(sys.argv[1:]))
