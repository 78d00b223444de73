"""The real machine: sockets, threads, disks, clocks, faults and links between nodes, on trio.

What `raftmq/ports.py` and other ports ask for is implemented here; the simulation has its own of
each, in `jepsen_like/`.
"""
