"""Spark's own `StatefulProcessor` classes, unchanged, on Strandline's states and timers.

`job` and the runtime import it; it builds on `operators/process`.
"""
