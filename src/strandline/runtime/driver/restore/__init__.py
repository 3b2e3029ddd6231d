"""How a driver takes a job over: job log, savepoint folders, what to go on from, source position, sink files.

The driver and `admin` import it.
"""
