"""The changelog of a task manager's slots: uploads segments, materializes states, merges long runs of segments.

Only the task manager imports it; `Changelog` is the entrance.
"""
