"""Rows on their way to a slot: connections, exchanges, and which row goes to which subtask.

Spark's tasks deliver rows of the sources, and slots deliver those of their steps to the next step: both import it.
"""
