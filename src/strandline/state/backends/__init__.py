"""State backends: where the bytes of a subtask's state are kept, and how they are frozen and restored.

Slots and `operators/schema_evolution` import it; all other operators see a backend only through `state/batch`.
"""
