"""Per-key and per-batch user code: `KeyedProcessor` and `ArrowProcessor`, and the operators that run them.

`job`, `operators/spark` and the runtime import it.
"""
