"""Pauses the cyclic garbage collector while many long-lived objects are allocated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Switch the cyclic garbage collector of this process off for the block, and on again afterwards.

    For blocks of a few seconds that keep almost everything they allocate. Reference counting goes on as always. If the
    collector is off already, nothing changes.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
