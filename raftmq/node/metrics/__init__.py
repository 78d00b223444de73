"""What a node shows to Prometheus: a table of metrics, each one line, and the scrape that reads it.

To add a metric: keep a plain number where the work is done, add one line to the table of its
collector (`node` for one number per node, other node, API or topic, `partitions` for one per
partition or group), and run `RAFTMQ_REWRITE=1 pytest tests/node/test_metrics.py`, which writes the
row in docs/metrics.md.

What needs prometheus_client is not imported before the node is ready. Reading changes nothing.
"""
