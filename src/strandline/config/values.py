"""The types of a job's options: short names for type checkers, and kinds of values with Flink's spellings of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from strandline.config import option as kinds
from strandline.config.option import DurationLike, Option, SizeLike
from strandline.config.rocksdb import PROFILES, RocksDBOptions

Duration = Option[DurationLike, float]
Size = Option[SizeLike, int]
Int = Option[int, int]
Flag = Option[bool, bool]
Choice = Option[str, str]
Location = Option[kinds.PathLike, str]
OptionalLocation = Option[kinds.PathLike | None, str | None]

RocksDBLike = RocksDBOptions | str | Mapping[str, object]
RocksDBFactory = Callable[..., Any]


def _parse_factory(value: object) -> RocksDBFactory | str:
    if isinstance(value, str):
        module, _, function = value.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *function.split("."))):
            raise ValueError
        return value
    if not callable(value):
        raise ValueError
    return cast(RocksDBFactory, value)


ROCKSDB: kinds.Kind[RocksDBLike, RocksDBOptions] = kinds.Kind(
    "`RocksDBOptions`, name of a profile, or mapping",
    f"a RocksDBOptions, a profile ({', '.join(PROFILES)}), or a mapping of options to values",
    RocksDBOptions.of,
)
ROCKSDB_FACTORY: kinds.Kind[RocksDBFactory | str, RocksDBFactory | str] = kinds.Kind(
    "function", 'a function of (rocksdict.Options, info), or the text "module:function" that names one', _parse_factory
)
_BACKENDS = {
    "hashmap": "heap",
    "filesystem": "heap",
    "jobmanager": "heap",
    **{f"{name}statebackend{end}": "heap" for name in ("hashmap", "fs", "memory") for end in ("", "factory")},
    **{f"{name}statebackend{end}": "rocksdb" for name in ("embeddedrocksdb", "rocksdb") for end in ("", "factory")},
}
_RETENTION = {
    "retain_on_cancellation": "retain",
    "delete_on_cancellation": "delete",
    "no_externalized_checkpoints": "delete",
}
_RESTARTS = {
    "exponential": "exponential-delay",
    "exponentialdelay": "exponential-delay",
    "fixed": "fixed-delay",
    "fixeddelay": "fixed-delay",
    "off": "none",
    "disable": "none",
    "false": "none",
}

POSITIVE = kinds.duration()
BACKEND = kinds.choice("rocksdb", "heap", also=_BACKENDS)
RETENTION = kinds.choice("retain", "delete", also=_RETENTION)
RESTART_STRATEGY = kinds.choice("exponential-delay", "fixed-delay", "none", also=_RESTARTS)
