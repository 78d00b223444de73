"""Views with a condition: what a record must have to be shown, and where such records stand.

Plain functions and tables over batches and offsets; no partition, no clock. `conditions.py` parses
what an operator wrote, `batches.py` asks it of the records of a batch and keeps those that match,
`index.py` remembers in which batches of a partition there are any, `filling.py` has the jobs of
workers for both.
"""
