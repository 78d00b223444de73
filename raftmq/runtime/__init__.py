"""The real machine: sockets, threads, disks, clocks, faults and links between nodes, on trio."""
