"""The user's function that has the last word on RocksDB's options: found in the driver, called in the slots."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rocksdict import Cache, Options

from strandline.errors import ConfigError, UserCodeError
from strandline.operators.process import user_traceback
from strandline.runtime.messages import SlotSpec
from strandline.state.rocksdb_options import RocksDBMemory
from strandline.state.rocksdb_tuning import Tune


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """Which database is opened. `cache` belongs to all databases of the slot: own table options should use it, too."""

    job: str
    operator: str
    subtask: int
    cache: Cache


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


def tuning(spec: SlotSpec, operator: str, memory: RocksDBMemory | None) -> Tune | None:
    """The slot's factory with what it must know of one operator's database; None without one.

    What the factory raises comes out as `UserCodeError`.
    """
    pickled = spec.backend.rocksdb_factory
    if pickled is None or memory is None:
        return None
    info = DatabaseInfo(spec.run.job, operator, spec.index, memory.cache)

    def tune(options: Options) -> Options:
        where = f"operator {operator!r}, subtask {spec.index}"
        try:
            tuned = pickle.loads(pickled)(options, info)
        except Exception as error:  # noqa: BLE001 - whatever user code raises
            raise UserCodeError(f"{where}: rocksdb_factory failed\n{user_traceback(error)}") from None
        if tuned is not None and not isinstance(tuned, Options):
            raise UserCodeError(
                f"{where}: rocksdb_factory returned {tuned!r}; it must return rocksdict.Options, or None after "
                "changing those it got"
            )
        return options if tuned is None else tuned

    return tune
