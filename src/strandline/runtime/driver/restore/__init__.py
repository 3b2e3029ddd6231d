"""How a driver takes a job over: the job log, the choice of a checkpoint, savepoint folders, position, sink files.

The driver, `job` and `admin` import it. Of the rest of the driver it imports `clock` alone.
"""
