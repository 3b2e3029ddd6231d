"""Has TCP pass on at once what Spark's JVM and a Python worker of it write to each other.

Spark leaves Nagle's algorithm on. So the JVM holds back the first rows of a task until the worker's kernel confirms
what came before them, and that kernel waits 40 ms, in case the worker has something to say. Both delays are ended here.

Private Spark API: the socket of the worker is in the variable `infile` of `pyspark.worker.main`. Without it, rows are
late as they are in any Python function of Spark's. Sockets of the Unix domain know no such delay.
"""

from __future__ import annotations

import os
import socket
import sys
from types import FrameType
from typing import Any

_QUICK_ACK = getattr(socket, "TCP_QUICKACK", None)
"""Only Linux has it."""


def pass_on_at_once() -> bool:
    """Called in every task of ours, in the thread that Spark calls, before the first row is read.

    Returns whether the task talks to the JVM by TCP, and the delays are off. The next task has to call it again.
    """
    file = _file_to_jvm()
    if file is None or socket.getdefaulttimeout() is not None:
        return False  # with a default timeout, Python would make the socket of the JVM one that does not block
    try:
        with socket.socket(fileno=os.dup(file.fileno())) as to_jvm:
            if to_jvm.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            to_jvm.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _QUICK_ACK is not None:
                to_jvm.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
            return True
    except (OSError, ValueError):
        return False  # Spark has another kind of file there


def _file_to_jvm() -> Any:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            return frame.f_locals["infile"]
        frame = frame.f_back
    return None
