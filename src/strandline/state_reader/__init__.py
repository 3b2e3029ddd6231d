"""State as a table: reads the states of a checkpoint or savepoint as Arrow batches, without the job.

`strandline` and `admin` import it. It reads files as a restore does, and never writes to durable storage.
"""
