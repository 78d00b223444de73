"""Linearizability: is there an order of all operations that respects time and explains each answer?

`search.py` looks for one (Wing and Gong, with Lowe's memory of what was tried and his just-in-time
order), `models.py` says what objects do, `explain.py` cuts a failure down to what shows it, and
`checks.py` takes the operations out of a history, one object at a time.
"""
