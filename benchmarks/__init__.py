"""raftmq measured beside Apache Kafka: `python -m benchmarks --help`, docs/benchmarks.md.

Every workload drives any Kafka bootstrap, with stock clients where a client is part of what is
measured and with raw frames where it would be in the way. Nothing in the product imports this.
"""
