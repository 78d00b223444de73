"""A message queue that speaks the Kafka protocol: one Raft group per partition.

docs/ARCHITECTURE.md tells what each package holds and how a produce, a fetch and a transaction's
commit go through the files; CONTRIBUTING.md says which files to touch to add something.
"""
