"""The controller, which is the leader of the metadata group, and each node's side of its work.

The leader's: `controller.py` decides, with pure functions for checks (`topic_validation.py`),
places (`placement.py`), moves of replicas (`moves.py`, of which `mover.py` proposes what is due)
and replacements (`replacement.py`). On every node: `control_plane.py` composes all of it and
answers other brokers, `broker_lifecycle.py` registers and says that the node lives, `leaders.py`
knows which node leads each partition, `reconciler.py` what is to be started and stopped.
"""
