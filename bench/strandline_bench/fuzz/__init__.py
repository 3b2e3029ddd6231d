"""The fuzz machine: mutated files of every format, and what the readers make of them.

`strandline chaos fuzz` runs it. `formats.py` has the formats, `mutation.py` changes inputs, and `machine.py` runs a
worker process and survives its crashes.
"""
