"""What Kafka means by a partition, on top of one replica: append, read, acknowledge, producers.

`partition.py` is what handlers call; `ports.py` says what it needs of its replica and what it
answers. Producers: `producer_state.py` is the table of what each sent last, `producers.py` keeps
that table in step with the log and judges new batches by it.
"""
