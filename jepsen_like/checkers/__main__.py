"""`python -m jepsen_like.checkers HISTORY` judges a history; exit 0 valid, 1 invalid, 2 unknown."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from jepsen_like.checkers.compose import Options, check_file
from jepsen_like.checkers.linear.checks import Bounds


def main() -> int:
    """Parse arguments, check, print."""
    parser = argparse.ArgumentParser(prog="jepsen_like.checkers", description=__doc__)
    parser.add_argument("history", type=Path, help="JSON lines, or the same compressed (.zst)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--no-final-polls", action="store_true", help="records may be unread")
    parser.add_argument("--gaps", action="store_true", help="offsets may have gaps (transactions)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for linearizability searches")
    chosen = parser.parse_args()
    deadline: list[float] = []

    def is_over() -> bool:
        """Time begins with the first search that is long enough to ask."""
        if not deadline:
            deadline.append(time.monotonic() + chosen.seconds)
        return time.monotonic() > deadline[0]

    options = Options(
        must_see_all=not chosen.no_final_polls,
        gaps_allowed=chosen.gaps,
        bounds=Bounds.until(is_over),
    )
    report = check_file(chosen.history, options)
    sys.stdout.write(report.to_json().decode() if chosen.json else report.to_text())
    sys.stdout.write("\n")
    return report.exit_code


if __name__ == "__main__":
    sys.exit(main())
