"""Running aggregates per key, computed on Arrow columns.

`job` and `operators/windows` import it; it imports `operators/columns` and `state`.
"""
