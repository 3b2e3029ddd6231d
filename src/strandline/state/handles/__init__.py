"""The handles of a key's state: value, list, map, reducing and aggregating states, timers, time to live, queries.

Operators and slots import it. It is the top of `state`: nothing else in `state` imports it.
"""
