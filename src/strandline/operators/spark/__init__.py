"""Runs Spark's own `StatefulProcessor` classes, unchanged, on Strandline's states and timers.

`job` and `testing` import it; it imports `operators/process`, `operators/columns` and `state`.
"""
