"""raftmq for Spark: a batch source, and the planning and reading that exports share.

`spark.read.format("raftmq")` finds the source by itself, through the module `pyspark_raftmq`.
Importing this package needs neither Spark nor Java:

- `options.read_options(...)` checks options; `plan.make_plan(options)` fixes half-open ranges;
- `reader.read_range(client, part)` gives the records of a range as Arrow batches (needs pyarrow);
- `source.RaftmqDataSource` is what Spark runs; `session.spark_session()` says what is missing.
"""
