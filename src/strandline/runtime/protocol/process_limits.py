"""What a process of a run sets up when it starts: private files, descriptors, Arrow's grouping, garbage collection."""

from __future__ import annotations

import gc
import os
import resource
from contextlib import suppress

_PRIVATE_UMASK = 0o077


def set_up_process() -> None:
    """Makes what this process writes readable for its user alone, and raises its limit of open files.

    Rows that come over the network may lie anywhere in a buffer. Arrow copies such buffers before it groups rows by
    them. By default it takes them as they are, and writes a warning to the log.

    The garbage collector leaves alone what is loaded so far, some 60,000 objects that stay. Each full collection, also
    the one at the end of the process, is shorter by them.

    For task managers and slots. The driver is the user's own process, and keeps its umask.
    """
    os.umask(_PRIVATE_UMASK)
    os.environ.setdefault("ACERO_ALIGNMENT_HANDLING", "reallocate")
    raise_descriptor_limit()
    gc.freeze()
    gc.enable()


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as the administrator allows.

    The usual limit of 1,024 is meant for programs that use `select`. RocksDB and connections need more.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports a limit that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
