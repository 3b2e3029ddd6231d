"""The processes of a run: driver, Spark's tasks, task managers, slots; and the protocol between them.

`job` and `admin` import it.
"""
