"""Hostile bytes for the ports of a node, open or protected: made from a grammar, then spoiled."""
