"""Hostile bytes for the three ports of a node, made from its own grammar and then spoiled."""
