"""The join of two keyed streams, with or without bounds of event time.

Only `job` imports it; it imports `operators/columns`, `operators/timed` and `state`.
"""
