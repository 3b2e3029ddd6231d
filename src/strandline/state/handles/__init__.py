"""The handles of a key's state: value, list, map, reducing and aggregating states, timers, time to live, queries.

Operators, slots and `testing` import it. It is the top of `state`: nothing else in `state` imports it.
"""
