"""The command line: `main.py` begins, `app.py` registers commands, one file for each group of them.

What all commands share (options, tables or JSON, errors, exit codes) is in `common.py`.
"""
