"""A sink of Parquet files: a folder that any reader can read, to which files are added by renaming them.

`sink.py` is what users write, `stager.py` writes files in tasks, `target.py` publishes them from the driver.
"""
