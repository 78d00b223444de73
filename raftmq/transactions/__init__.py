"""Transactions on one node: the coordinator that clients ask, and what leaders of partitions owe.

`coordinator.py` serves requests, `leader.py` lets batches in and writes markers where this node
leads, `expiry.py` is the controller's part. What a transaction is, and how it moves, is a matter of
`metadata/transactions.py` and `metadata/apply_transactions.py`.
"""
