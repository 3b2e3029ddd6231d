"""Calls the user's `rocksdb_factory`, which has the last word on RocksDB's options, in a slot."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

from rocksdict import Cache, Options

from strandline.errors import UserCodeError
from strandline.operators.user_code import NOT_BY_USER_CODE, call_failed
from strandline.runtime.protocol.messages import SlotSpec
from strandline.state.backends.rocksdb_setup import RocksDBMemory
from strandline.state.backends.rocksdb_tuning import Tune


@dataclass(frozen=True, slots=True)
class DatabaseInfo:
    """Which database is opened. `cache` belongs to all databases of the slot: own table options should use it, too."""

    job: str
    operator: str
    subtask: int
    cache: Cache


def tuning(spec: SlotSpec, operator: str, memory: RocksDBMemory | None) -> Tune | None:
    """A function that calls the user's factory for one operator's database; None if there is no factory.

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
        except NOT_BY_USER_CODE:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever user code raises
            raise call_failed(where, "rocksdb_factory", error) from None
        if tuned is not None and not isinstance(tuned, Options):
            raise UserCodeError(
                f"{where}: rocksdb_factory returned {tuned!r}; it must return rocksdict.Options, or None after "
                "changing those it got"
            )
        return options if tuned is None else tuned

    return tune
