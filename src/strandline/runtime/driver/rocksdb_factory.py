"""Finds the user's `rocksdb_factory` and pickles it, so that it can be sent to the slots."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from strandline.errors import ConfigError


def pickle_factory(factory: Callable[..., Any] | str) -> bytes:
    """The function as bytes, by value if it is of the user's main script; a text names it as `module:function`.

    Raises `ConfigError` when there is no such function, or it cannot be pickled.
    """
    from pyspark import cloudpickle

    if isinstance(factory, str):
        factory = _named(factory)
    try:
        data: bytes = cloudpickle.dumps(factory)  # type: ignore[no-untyped-call]  # PySpark's own
    except Exception as error:
        raise ConfigError(
            f"rocksdb_factory = {factory!r} cannot be sent to the slots: {error}; use a function that refers only "
            "to what can be pickled"
        ) from error
    return data


def _named(name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rocksdb_factory = {name!r} is not there: {error}; write `module:function`, of a module that the driver "
            "and the executors can import"
        ) from error
    if not callable(found):
        raise ConfigError(f"rocksdb_factory = {name!r} is {found!r}, which cannot be called; name a function")
    return found  # type: ignore[no-any-return]  # it can be called, and no more is known
