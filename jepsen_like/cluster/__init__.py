"""Whole nodes in one world of virtual time, with Kafka clients around them."""
