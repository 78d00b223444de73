"""The core of one Raft group: pure decisions, without clocks, disks or sockets.

Begin with `core.py`. What it does in each role is in `election.py`, `leader.py` and `follower.py`;
what it takes and gives, `Ready` above all, in `messages.py`. `replication/` performs it.
"""
