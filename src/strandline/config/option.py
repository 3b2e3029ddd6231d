"""One typed option: how its value is read, checked, stored and described.

`Config` is a dataclass whose fields are `Option` descriptors: the constructor takes what a user writes (`"10 min"`),
the attribute gives what the program needs (`600.0`), and a type checker knows both.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Generic, TypeVar, cast, overload

from strandline.errors import ConfigError
from strandline.redaction import has_password

In = TypeVar("In")
Out = TypeVar("Out")
MoreIn = TypeVar("MoreIn")
MoreOut = TypeVar("MoreOut")

DurationLike = str | float | timedelta
SizeLike = str | int
PathLike = str | os.PathLike[str]


class Required(Enum):
    """Marks an option that has no default."""

    REQUIRED = "required"


REQUIRED = Required.REQUIRED


@dataclass(frozen=True)
class Kind(Generic[In, Out]):
    """A kind of values: which are allowed, and how they are read. Users write `In`; the config stores `Out`."""

    name: str
    """The name of the kind in the reference."""
    allowed: str
    """The end of the sentence "allowed: ..."."""
    parse: Callable[[object], Out]
    """Raises `ValueError` for a value that is not allowed. It returns its own results unchanged."""
    from_flink: Callable[[object], object] = lambda value: value
    """Translates a value that is written under a Flink key."""
    secret: bool = False
    """Whether messages must not show a value."""


class Option(Generic[In, Out]):
    """One option of `Config`: a data descriptor that checks and converts a value when it is set."""

    name: str

    def __init__(
        self, default: In | Required, kind: Kind[In, Out], keys: tuple[str, ...], doc: str, unset: str, missing: str
    ) -> None:
        self.default = default
        self.kind = kind
        self.keys = keys
        self.doc = doc
        self.unset = unset
        self.missing = missing
        self.__doc__ = doc  # help() shows it beside the option's name

    def __repr__(self) -> str:
        """The default, because an option is the default value in the signature of `Config`."""
        return self.default_text.replace("`", "")

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Option[In, Out]: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Out: ...

    def __get__(self, instance: object, owner: type | None = None) -> Out | Option[In, Out]:
        if instance is None:
            return self
        try:
            return cast(Out, vars(instance)[self.name])
        except KeyError:
            raise AttributeError(self.name) from None

    def __set__(self, instance: object, value: In) -> None:
        # If an argument is left out, the dataclass passes the class attribute, which is this descriptor.
        given: object = value
        vars(instance)[self.name] = self.read(self.default if given is self else given)

    def read(self, value: object, key: str | None = None) -> Out:
        """Returns the stored form of `value`. A `ConfigError` names the option, or the Flink `key` that set it."""
        if value is REQUIRED:
            raise ConfigError(f"{self.name} is required: {self.missing}")
        name = self.name if key is None or key == self.name else f"{key} (option {self.name})"
        try:
            return self.kind.parse(value if key is None or key == self.name else self.kind.from_flink(value))
        except (ValueError, OverflowError) as e:
            raise ConfigError(
                f"{name} = {self.shown(value)} is not valid{because(e)}; allowed: {self.kind.allowed}"
            ) from None

    def shown(self, value: object) -> str:
        """`value` as messages may show it."""
        return "..." if self.kind.secret else repr(value)

    @property
    def default_text(self) -> str:
        """The default as the reference shows it."""
        if self.default is REQUIRED:
            return "required"
        if self.default is None:
            return self.unset
        if isinstance(self.default, (Mapping, tuple)):
            return "empty"
        return f"`{str(self.default).lower() if isinstance(self.default, bool) else self.default}`"


def option(
    default: In | Required,
    kind: Kind[In, Out],
    *,
    keys: tuple[str, ...] = (),
    doc: str,
    unset: str = "not set",
    missing: str = "",
) -> Option[In, Out]:
    """Declare an option.

    `keys` are its Flink keys, older spellings first. `unset` says in the reference what a default of None means.
    `missing` tells the user of a required option what to write.
    """
    return Option(default, kind, keys, doc, unset, missing)


# --- durations -----------------------------------------------------------------------------------

_SECONDS = {
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "m": 60.0, "min": 60.0, "minute": 60.0, "minutes": 60.0,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "ms": 1e-3, "milli": 1e-3, "millis": 1e-3, "millisecond": 1e-3, "milliseconds": 1e-3,
    "us": 1e-6, "µs": 1e-6, "micro": 1e-6, "micros": 1e-6, "microsecond": 1e-6, "microseconds": 1e-6,
    "ns": 1e-9, "nano": 1e-9, "nanos": 1e-9, "nanosecond": 1e-9, "nanoseconds": 1e-9,
}  # fmt: skip
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Zµ]*)\s*", re.ASCII)


def parse_duration(value: object) -> float:
    """Seconds from `"1s"`, `"500 ms"`, a number of seconds or a `timedelta`; `ValueError` for anything else."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if unit and unit.lower() not in _SECONDS:
            raise ValueError(f"unknown unit {unit!r}")
        # Divide where the unit is a fraction: 0.1 and "100ms" must be the same float.
        factor = _SECONDS[unit.lower()] if unit else 1.0
        seconds = float(number) * factor if factor >= 1 else float(number) / round(1 / factor)
    else:
        raise ValueError
    if not math.isfinite(seconds):
        raise ValueError("not a finite time")
    if seconds < 0:
        raise ValueError("a duration cannot be negative")
    return seconds


def because(error: Exception) -> str:
    """The reason of an error in brackets, to put behind a message; nothing if the error gives no reason."""
    return f" ({error})" if str(error) else ""


def _flink_duration(value: object) -> object:
    """Flink reads a duration without a unit as milliseconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value / 1000
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]+\s*", value):
        return f"{value.strip()} ms"
    return value


def duration(*, zero: bool = False, least: float = 0.0) -> Kind[DurationLike, float]:
    """A duration, stored as seconds; `zero` says whether 0 is allowed, `least` the shortest other one."""

    def parse(value: object) -> float:
        seconds = parse_duration(value)
        if seconds == 0 and not zero:
            raise ValueError("it must be longer than 0")
        if 0 < seconds < least:
            raise ValueError(f"it must not be shorter than {least:g} s")
        return seconds

    zero_text = "0 or more" if zero else f"at least {least:g} s" if least else "more than 0"
    allowed = f'a duration of {zero_text}, like "500ms", "10s", "10 min" or "1h", a number of seconds, or a timedelta'
    return Kind("duration", allowed, parse, _flink_duration)


# --- sizes ---------------------------------------------------------------------------------------

_BYTES = {
    **dict.fromkeys(("", "b", "bytes"), 1),
    **dict.fromkeys(("k", "kb", "kib", "kibibytes"), 1 << 10),
    **dict.fromkeys(("m", "mb", "mib", "mebibytes"), 1 << 20),
    **dict.fromkeys(("g", "gb", "gib", "gibibytes"), 1 << 30),
    **dict.fromkeys(("t", "tb", "tib", "tebibytes"), 1 << 40),
}


def parse_size(value: object) -> int:
    """Bytes from `"512mb"` (1 kb is 1024 bytes) or an int of bytes; `ValueError` for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)):
        number, unit = match.groups()
        if unit.lower() not in _BYTES:
            raise ValueError(f"unknown unit {unit!r}")
        factor = _BYTES[unit.lower()]
        return int(number) * factor if number.isdigit() else int(float(number) * factor)
    raise ValueError


def size(*, at_least: int, at_most: int | None = None) -> Kind[SizeLike, int]:
    """A size, stored as bytes."""

    def parse(value: object) -> int:
        count = parse_size(value)
        if count < at_least:
            raise ValueError("too small")
        if at_most is not None and count > at_most:
            raise ValueError("too large")
        return count

    limits = f"a size of at least {_shown(at_least)}" + (f" and at most {_shown(at_most)}" if at_most else "")
    return Kind("size", f'{limits}, like "512mb" or "1gb", or a number of bytes', parse)


def _shown(count: int) -> str:
    return f"{count >> 20}mb" if count >= 1 << 20 else f"{count} bytes"


# --- plain values --------------------------------------------------------------------------------


def integer(low: int, high: int | None = None, note: str = "") -> Kind[int, int]:
    """A whole number in `low..high`."""

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        if value < low or (high is not None and value > high):
            raise ValueError("out of range")
        return value

    limits = f"a whole number from {low} to {high}" if high is not None else f"a whole number, {low} or more"
    return Kind("int", f"{limits}{note}", parse)


def number(at_least: float, at_most: float = math.inf) -> Kind[float, float]:
    """A finite number in `at_least..at_most`."""

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise ValueError
        try:
            result = float(value)
        except ValueError:
            raise ValueError from None
        if not math.isfinite(result) or not at_least <= result <= at_most:
            raise ValueError("out of range")
        return result

    limits = f"a number from {at_least} to {at_most}" if at_most < math.inf else f"a number, {at_least} or more"
    return Kind("float", limits, parse)


def _parse_flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError


FLAG: Kind[bool, bool] = Kind("bool", "true or false", _parse_flag)


def choice(*values: str, also: Mapping[str, str] | None = None) -> Kind[str, str]:
    """One of `values`, in upper or lower case; `also` gives other spellings, in lower case.

    The name of a Java class is read without its package.
    """
    spellings = {value: value for value in values} | dict(also or {})

    def parse(value: object) -> str:
        # YAML reads a bare `off` as False, and some Flink options are booleans where ours have names.
        if not isinstance(value, (str, bool)):
            raise ValueError
        word = str(value).strip().lower().rpartition(".")[2]
        if word not in spellings:
            raise ValueError
        return spellings[word]

    quoted = [f'"{value}"' for value in values]
    return Kind(" or ".join(f"`{value}`" for value in values), f"{', '.join(quoted[:-1])} or {quoted[-1]}", parse)


def _parse_text(value: object) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value.strip():
        raise ValueError
    return value


def _parse_path(value: object) -> str:
    text = _parse_text(value)
    if has_password(text):
        raise ValueError("a URL must not hold a password: put it into storage_options")
    return text


TEXT: Kind[str, str] = Kind("str", "a text that is not empty", _parse_text)
PATH: Kind[PathLike, str] = Kind("path", "a path or URL that is not empty", _parse_path)


def _parse_paths(value: object) -> tuple[str, ...]:
    if isinstance(value, (str, os.PathLike)):
        return (_parse_path(value),)
    if not isinstance(value, Sequence):
        raise ValueError
    return tuple(map(_parse_path, value))


PATHS: Kind[Sequence[PathLike], tuple[str, ...]] = Kind("list of paths", "a list of paths or URLs", _parse_paths)


def _parse_settings(value: object) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError
    settings: dict[str, str] = {}
    for key, setting in value.items():
        if not isinstance(key, str) or not isinstance(setting, (str, int, float)):
            raise ValueError(f"{key!r} has a value that is not a text")
        settings[key] = str(setting).lower() if isinstance(setting, bool) else str(setting)
    return settings


SETTINGS: Kind[Mapping[str, str], Mapping[str, str]] = Kind(
    "mapping", "a mapping of names to texts", _parse_settings, secret=True
)


def optional(kind: Kind[MoreIn, MoreOut]) -> Kind[MoreIn | None, MoreOut | None]:
    """`kind`, or None."""
    return Kind(
        kind.name,
        f"{kind.allowed}, or None",
        lambda value: None if value is None else kind.parse(value),
        kind.from_flink,
        kind.secret,
    )
