"""What a user writes and holds: a job, its streams, and the run that it becomes.

`strandline` exports the classes of this room. The room imports the driver; only `strandline` and `admin` import it.
"""
