"""Live tests: real nodes, real clients, real damage.

`run` composes a run from a cluster (`cluster`), its links (`links`, `proxy`, `namespaces`), faults
(`nemeses`) and a load in a process of its own (`load`); the histories are judged by the checkers
that the simulation uses, and `report` tells what came of it. Nothing here is deterministic: what a
run found is in its histories and logs.
"""
