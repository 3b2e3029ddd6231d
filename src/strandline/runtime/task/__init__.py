"""What runs inside Spark's Python workers: the relay, the Parquet writer, the launcher of task managers.

The driver imports it, to put it into Spark's plan.
"""
