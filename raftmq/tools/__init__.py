"""Work on the data of a stopped node: inspection, unsafe recovery, command skip, term reset."""
