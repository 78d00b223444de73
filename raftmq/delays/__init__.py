"""Delay topics: what a record asks for, what is pending, and how it is delivered once.

Plain functions and tables over records and offsets; no partition, no clock. `headers.py` reads the
headers, `pending.py` holds what is pending in bounded memory (`runs.py` packs what is due later),
`deliveries.py` is the note that a delay partition commits before anything leaves it, and the batch
that leaves.
"""
