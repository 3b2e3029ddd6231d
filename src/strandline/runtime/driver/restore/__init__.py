"""How a driver takes a job over: the job log, the choice of a checkpoint, savepoint folders, position, sink files.

The driver and `admin` import it.
"""
