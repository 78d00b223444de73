"""Exactly-once export of topics to Parquet, its check and its replay (docs/export.md).

`manifest.py` says what counts, `store.py` where it lies, `archive.py` joins the two; `lease.py`
keeps a group to one export, `writer.py` writes a range, `job.py` leads a run; `verify.py` and
`replay.py` read it all back. pyarrow is needed by all of it, pyspark and Java by `runner.py` alone.
"""
