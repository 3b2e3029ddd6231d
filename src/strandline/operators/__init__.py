"""Operators: the stateful steps as they run inside a slot, on Arrow batches and on the state of one subtask.

Each implements `Operator`; per-key user code goes through `process`, running values per key through `aggregate`.
Job and runtime may import it; it imports only state and errors.
"""
