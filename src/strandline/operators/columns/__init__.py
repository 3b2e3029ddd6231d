"""Arrow columns for operators: gathering, checks, event times, nulls, keys, and conversion to rows and to bytes.

Operators, the side outputs in `runtime/protocol` and `testing` import it; it imports `state` and `errors` only.
"""
