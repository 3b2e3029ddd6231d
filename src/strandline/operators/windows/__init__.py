"""Windows of event time: tumbling, sliding and session windows, and the aggregates of their rows.

Only `job` imports it; it imports `operators/aggregate`, `operators/columns`, `operators/timed` and `state`.
"""
