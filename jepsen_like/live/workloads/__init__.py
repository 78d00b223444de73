"""What clients do while the cluster suffers; each kind of client is a module."""
