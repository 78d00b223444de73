"""What a node shows to Prometheus: a table of metrics, each one line, and the scrape that reads it.

To add a metric: keep a plain number on your object, add one line to the table of its collector
(`node_metrics` for one number per node, `partitions` for one per partition, `server` for APIs and
topics, ...), and run `RAFTMQ_REWRITE=1 pytest tests/node/test_metrics.py`, which writes the row in
docs/metrics.md.

Nothing here is imported before the node is ready; reading changes nothing.
"""
