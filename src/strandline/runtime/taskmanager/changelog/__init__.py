"""The changelog of a task manager's slots: upload, materialization, merging, and the book of what is durable.

Only the task manager imports it.
"""
