"""Batches that lie, and what brokers answer to them."""
