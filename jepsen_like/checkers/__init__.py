"""Checkers: histories in, verdicts with evidence out.

A checker reads events (jepsen_like/history_events.py) once, in order, and says valid, invalid or
unknown, how often it saw its anomaly and the operations of the first few. Checkers know no cluster,
no clock and no network, so that a history of the simulation, of live clients or written by hand is
the same to them. `compose.py` runs all of them over one history.
"""

from jepsen_like.checkers.compose import Options, check_events, check_file
from jepsen_like.checkers.verdict import Example, Report, Validity, Verdict

__all__ = ["Example", "Options", "Report", "Validity", "Verdict", "check_events", "check_file"]
