"""Spark's daemon of Python workers, which has imported what its workers need before it forks them.

The name of Spark's module stays the first argument: a task manager knows Spark's workers by it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

NEEDED = {
    "pyspark.worker": ("pyspark.worker", "strandline.runtime.task.launcher", "strandline.runtime.task.stream_relay")
}
"""What several workers need that run a module of Spark's; other modules are run by one worker."""


def main() -> None:
    # A process with threads is not to be forked: NumPy would start one of a pool when it is imported.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.path.insert(0, os.getcwd())
    for module in NEEDED.get(sys.argv[-1], ()):
        importlib.import_module(module)
    del os.environ["OPENBLAS_NUM_THREADS"]
    del sys.argv[0]
    runpy.run_module("pyspark.daemon", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
