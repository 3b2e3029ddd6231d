"""Running aggregates per key, computed on Arrow columns.

`job`, `operators/windows` and the runtime import it.
"""
