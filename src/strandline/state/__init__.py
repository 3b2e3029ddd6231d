"""Keyed state: the ordered bytes of one operator subtask, what a batch changed in them, and their snapshots.

Backends live here behind one ABC, with the change set, the segment and the snapshot formats.
Operators, runtime, testing and job may import it; it imports only `config`, `pyspark_releases` and `errors`.
"""
