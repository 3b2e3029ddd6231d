"""A sink of Iceberg tables: tasks write data files, and one snapshot per checkpoint makes them part of the table.

`sink.py` is what users write, `data_files.py` writes files (in tasks, too), `target.py` commits from the driver.
"""
