"""Takes what a Python worker has loaded out of the garbage collector's sight.

Spark's daemon collects garbage after every task. Each time Python then looks at all objects of PySpark, PyArrow and
pandas, which takes longer than a small task itself, and none of them is ever garbage.
"""

from __future__ import annotations

import gc

from strandline.runtime.task.worker_socket import pass_on_at_once

FREEZE_AT_TASK = 3
"""Later tasks import nothing that is worth another look."""

_tasks: set[int] = set()


def begin_task(attempt: int) -> None:
    """Called in every task of ours before it reads a row, perhaps several times.

    Has TCP pass on the rows at once; see `worker_socket`. In the `FREEZE_AT_TASK`th task of a worker, all objects are
    frozen. The collection after the task before has just left no garbage, so no garbage is frozen either.
    """
    pass_on_at_once()
    if len(_tasks) < FREEZE_AT_TASK:
        _tasks.add(attempt)
        if len(_tasks) == FREEZE_AT_TASK:
            gc.freeze()
