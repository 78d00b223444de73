"""Consumer groups on the node that coordinates them.

Handlers ask `coordinator.py`; `group.py` is the state machine of one group, `model.py` its values,
`owned_groups.py` how a node comes to coordinate a group, `offsets.py` the way of commits. What is
kept of groups is metadata: `metadata/apply_groups.py`.
"""
