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
    to_jvm = _socket_to_jvm()
    if to_jvm is None:
        return False
    with to_jvm:
        return _end_delays(to_jvm)


class QuickAnswers:
    """The connection to the JVM in a task that reads rows for long. A context.

    The kernel goes back to waiting by itself, so `again` is called with every batch of rows.
    """

    def __enter__(self) -> QuickAnswers:
        self._to_jvm = _socket_to_jvm()
        self.again()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._to_jvm is not None:
            self._to_jvm.close()

    def again(self) -> None:
        """Have the kernel confirm at once what the JVM writes next."""
        if self._to_jvm is not None and not _end_delays(self._to_jvm):
            self._to_jvm.close()
            self._to_jvm = None


def _socket_to_jvm() -> socket.socket | None:
    """The connection to the JVM, to be closed by the caller; None if it is none of TCP."""
    file = _file_to_jvm()
    if file is None or socket.getdefaulttimeout() is not None:
        return None  # with a default timeout, Python would make the socket of the JVM one that does not block
    try:
        to_jvm = socket.socket(fileno=os.dup(file.fileno()))
    except (OSError, ValueError):
        return None  # Spark has another kind of file there
    if to_jvm.family in (socket.AF_INET, socket.AF_INET6):
        return to_jvm
    to_jvm.close()
    return None


def _end_delays(to_jvm: socket.socket) -> bool:
    try:
        to_jvm.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _QUICK_ACK is not None:
            to_jvm.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)
        return True
    except OSError:
        return False


def _file_to_jvm() -> Any:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main" and "infile" in frame.f_locals:
            return frame.f_locals["infile"]
        frame = frame.f_back
    return None
