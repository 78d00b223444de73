"""The client's deciding code: synchronous, without sockets, threads or clocks.

Drivers (`raftmq_client.blocking`, later an async one) move bytes and time; everything that decides
stands here. Imports of this package are `raftmq.protocol`, `raftmq.records` and leaves only.
"""
