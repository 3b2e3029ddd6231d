"""Windows of event time: tumbling, sliding and session windows of aggregates.

`job` and the runtime import it; it builds on `operators/aggregate` and `operators/timed`.
"""
