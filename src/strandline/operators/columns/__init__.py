"""Arrow columns for operators: gathering, checks, event times, nulls, keys, and conversion to rows and to bytes.

Operators, `job`, `testing` and the side outputs in `runtime/protocol` import it; it imports `state/coding`,
`pyspark_releases` and `errors`.
"""
