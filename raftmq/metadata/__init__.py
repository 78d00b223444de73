"""The metadata group: its commands, the image they make, snapshots, configs, how it is formed.

A command (`commands.py`) is proposed through the port `engine.py`, brought into the group's log by
`raft_engine.py`, and applied on every node by `state_machine.py`. What it does to the image
(`image.py`) is said by `apply.py` and, for groups and transactions, `apply_groups.py` and
`apply_transactions.py`. Configs: `config_keys.py` has the keys, `configs.py` which value holds.
"""
