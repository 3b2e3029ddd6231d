"""What operators with a clock share: the time indexes, timed items and late rows.

Only other operators import it; it imports `operators/base` and `state`.
"""
