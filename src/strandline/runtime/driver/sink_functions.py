"""Refuses calls that would wait for the function of a sink which makes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from strandline.errors import StrandlineError

_here = threading.local()


@contextmanager
def in_sink_function(job: str) -> Iterator[None]:
    """Meanwhile, this thread carries out the function of a sink of a job."""
    _here.job = job
    try:
        yield
    finally:
        _here.job = None


def refuse_in_sink_function(job: str, call: str) -> None:
    """Raises `StrandlineError` in the function of a sink of the job, because `call` would wait for that function."""
    if getattr(_here, "job", None) == job:
        raise StrandlineError(
            f"job {job!r}: {call} was called by the function of a sink, and would wait for this function to end. Call "
            "it from another thread; to end the run from here, raise an error"
        )
