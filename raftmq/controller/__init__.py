"""What the leader of the metadata group does: topics, placement, brokers' lives, leaders, moves."""
