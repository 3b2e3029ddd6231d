"""Starts Spark's daemon of Python workers with the installed PySpark: Python caches no bytecode of Spark's archive.

Daemon and workers of a session start with half the work. `tests/jobs/test_cluster.py` has executors with Spark's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    entries = os.environ["PYTHONPATH"].split(os.pathsep)
    path = os.pathsep.join(entry for entry in entries if Path(entry).name != "pyspark.zip")
    # The name of the module stays: a task manager knows Spark's workers by it.
    command = [sys.executable, "-m", "pyspark.daemon", *sys.argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
