"""State backends: they keep the bytes of a subtask's state, take snapshots and restore them.

Slots, `testing` and `operators/schema_evolution` import it. Other operators use a backend through `state/batch`.
"""
