"""How a driver takes a job over: the job's log, what to go on from, the source's position, the sinks' files.

The driver and `admin` import it.
"""
