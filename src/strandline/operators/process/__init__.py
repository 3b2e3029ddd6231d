"""User code per key (`KeyedProcessor`) and per table of many keys (`ArrowProcessor`), and the operators that run it.

`job`, `operators/spark` and `testing` import it; it imports `operators/columns`, `operators/timed` and `state`.
"""
