"""The log of one replica on disk, and the journal of hard states that a node's replicas share.

`replicated_log.py` is what replicas call: batches in segments, bare entries beside them, and the
only place where a Raft index becomes an offset. `reader.py` is its reading side, `recovery.py` what
opening it does, `journal.py` the journal. (What a node tells operators is in `raftmq/logs.py`.)
"""
