"""The machine that finds faults: `strandline chaos` runs `cli.app`.

A trial runs a small job with one fault at one operation, and an oracle looks at what is left. The machine
(`machine.py`) has no JVM; it gives trials to a worker process (`worker.py`), which has one for many trials.
"""
