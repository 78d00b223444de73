"""The two ports of a node that people and programs use: Kafka clients' and the administrators'."""
