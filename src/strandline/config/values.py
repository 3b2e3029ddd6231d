"""The types of a job's options: short names for type checkers, and kinds of values with Flink's spellings of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
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


_RANGE = re.compile(r"\s*([0-9]{1,5})(?:\s*-\s*([0-9]{1,5}))?\s*", re.ASCII)
_LAST_PORT = 65535
_OFF = "off"


def _parse_ports(value: object) -> int | str:
    if value is None or value is False or (isinstance(value, str) and value.strip().lower() == _OFF):
        return _OFF
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError
    found = _RANGE.fullmatch(str(value))
    if found is None:
        raise ValueError
    first, last = int(found[1]), int(found[2] or found[1])
    if last > _LAST_PORT or first > last or (first == 0 and found[2]):
        raise ValueError("out of range")
    return first if first == last else f"{first}-{last}"


def ports_of(rest_port: int | str) -> range | None:
    """The ports to try for `Config.rest_port`, in this order; only port 0 for any free one, None if it is off."""
    if rest_port == _OFF:
        return None
    first, _, last = str(rest_port).partition("-")
    return range(int(first), int(last or first) + 1)


def _parse_token(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{8,200}", value):
        raise ValueError
    return value


def _parse_hosts(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, Sequence) or isinstance(names, bytes):
        raise ValueError
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9._:\[\]-]{1,253}", name):
            raise ValueError(f"{name!r} is no name of a host")
    return tuple(names)


HOSTS: kinds.Kind[Sequence[str], tuple[str, ...]] = kinds.Kind(
    "list of names", "a list of names of hosts, without a scheme", _parse_hosts
)
PORTS: kinds.Kind[int | str | None, int | str] = kinds.Kind(
    "port or range", f'a port from 0 to {_LAST_PORT}, a range such as "8081-8130", or "off"', _parse_ports
)
TOKEN: kinds.Kind[str, str] = kinds.Kind(
    "str", "a text of 8 to 200 ASCII characters without spaces", _parse_token, secret=True
)
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
