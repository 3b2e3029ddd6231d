"""The handles of a key's state: value, list, map, folded states, timers, time to live, queries.

Operators and slots import it.
"""
