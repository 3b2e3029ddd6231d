"""A sink of Delta tables: the rows of a checkpoint become one version of the table.

`sink.py` is what users write, `stager.py` writes data files in tasks, `target.py` commits them from the driver with
delta-rs. `columns.py` compares schemas, `marker.py` keeps the marker in the table's log, and `access.py` opens tables.
"""
