"""Raft groups on one node: replicas, what is durable of them, membership, catch-up and repair.

`multiraft.py` drives all groups of a node; what nodes tell each other of them is encoded here, too.
Sans-IO: time, disks and ways to other nodes are lent.
"""
