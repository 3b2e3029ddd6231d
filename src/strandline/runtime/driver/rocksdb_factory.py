"""Finds the user's `rocksdb_factory`, and pickles it for the slots."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from strandline.errors import ConfigError


def pickle_factory(factory: Callable[..., Any] | str) -> bytes:
    """The function as bytes. A string names the function as `module:function`.

    A function of the user's main script is pickled by value, because slots cannot import that script. Raises
    `ConfigError` if there is no such function, or if it cannot be pickled.
    """
    from pyspark import cloudpickle  # private Spark API: see design note 009

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
            f"rocksdb_factory = {name!r} is not there: {error}; write `module:function` with a module that the driver "
            "and the executors can import"
        ) from error
    if not callable(found):
        raise ConfigError(f"rocksdb_factory = {name!r} is {found!r}, which cannot be called; name a function")
    return found  # type: ignore[no-any-return]  # a callable of unknown signature
