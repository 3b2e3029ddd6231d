"""The join of two keyed streams.

`job` and the runtime import it; it builds on `operators/timed`.
"""
