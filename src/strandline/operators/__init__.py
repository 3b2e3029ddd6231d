"""Operators: the stateful steps as they run inside a slot, on Arrow batches and on the state of one subtask.

Each implements `base.Operator`. What a user names in a job is in the sub-rooms. Job, runtime and testing import it; it
imports `checkpoint`, `state`, `config`, `pyspark_releases` and `errors`.
"""
