"""What is measured: one module per kind of load, one function per workload."""
