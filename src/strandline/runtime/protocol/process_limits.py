"""What a process of a run asks of the operating system when it starts: privacy of its files, and enough descriptors."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

_PRIVATE_UMASK = 0o077


def set_up_process() -> None:
    """Makes what this process writes readable for its user alone, and raises its limit of open files.

    For task managers and slots. The driver is the user's own process, and keeps its umask.
    """
    os.umask(_PRIVATE_UMASK)
    raise_descriptor_limit()


def raise_descriptor_limit() -> None:
    """Lets this process open as many files and connections as the administrator allows.

    The usual limit of 1,024 is meant for programs that use `select`. RocksDB and connections need more.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports a limit that it does not accept
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
