"""What Kafka means by a partition, on top of one replica: append, read, acknowledge, producers."""
