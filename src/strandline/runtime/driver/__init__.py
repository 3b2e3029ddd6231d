"""The driver: one run of a job with its generations, batches, checkpoints and its view of the cluster.

Only `job` imports it, and `admin` its `restore/`. It reaches the other processes through `protocol`, and imports `task`
to send it to Spark.
"""
