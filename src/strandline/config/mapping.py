"""Reads options from a mapping or a YAML file: our names, and Flink's keys in both spellings."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from strandline.config import option as kinds
from strandline.config.option import Option
from strandline.config.rocksdb import SETTINGS, RocksDBOptions
from strandline.errors import ConfigError, UnknownOptionError

if TYPE_CHECKING:
    import yaml

FIXED_KEYS: Mapping[str, str] = {
    "state.backend.changelog.storage": "filesystem",
    "state.changelog.storage": "filesystem",
    "state.checkpoint-storage": "filesystem",
    "execution.checkpointing.storage": "filesystem",
    "execution.checkpointing.mode": "exactly_once",
    "execution.checkpointing.unaligned": "false",
    "execution.checkpointing.unaligned.enabled": "false",
    "state.backend.rocksdb.memory.managed": "true",
}
"""Flink keys for which Strandline has only one behaviour: this value is accepted, every other value is refused."""

_S3_KEYS = {
    "s3.endpoint": "endpoint",
    "s3.endpoint.region": "region",
    "s3.region": "region",
    "s3.access-key": "access_key_id",
    "s3.access.key": "access_key_id",
    "s3.secret-key": "secret_access_key",
    "s3.secret.key": "secret_access_key",
}
_PATH_STYLE = ("s3.path.style.access", "s3.path-style-access")
_OWN_STORAGE = "storage_options."
_OWN_ROCKSDB = "rocksdb."
_USE_FILTERS = "state.backend.rocksdb.use-bloom-filter"

_MAX_LENGTH, _MAX_BRACKETS = 250_000, 200
"""The time that a YAML file takes grows with the square of its nesting."""
_MAX_KEYS = 10_000
"""Aliases in a YAML file could otherwise multiply its keys without end."""


def read_mapping(
    mapping: Mapping[str, object],
    options: Mapping[str, Option[object, object]],
    rocksdb: RocksDBOptions = RocksDBOptions(),  # noqa: B008 - frozen
) -> dict[str, object]:
    """Returns the `options` that `mapping` sets: our names with their stored values.

    Single settings of RocksDB change those of `rocksdb`, unless the mapping names a profile, too.

    Raises `UnknownOptionError` for an unknown key, and `ConfigError` for a wrong value or for two keys that set one
    option to different values.
    """
    by_key = {key: opt for opt in (*options.values(), *SETTINGS.values()) for key in (opt.name, *opt.keys)}
    values: dict[str, object] = {}
    written_as: dict[str, str] = {}
    settings: dict[str, object] = {}
    unused = _unused_restart_keys(mapping, options["restart_strategy"])
    for key, value in mapping.items():
        if key in FIXED_KEYS:
            if str(value).strip().lower() != FIXED_KEYS[key]:
                raise ConfigError(f"{key} = {value!r} is not supported; allowed: {FIXED_KEYS[key]}")
        elif key in _S3_KEYS:
            settings[_S3_KEYS[key]] = value
        elif key in _PATH_STYLE:
            settings["virtual_hosted_style_request"] = str(value).strip().lower() != "true"
        elif key.startswith(_OWN_STORAGE):
            settings[key.removeprefix(_OWN_STORAGE)] = value
        elif key == _USE_FILTERS:
            continue
        elif key not in by_key:
            raise unknown_option(key, [*by_key, *FIXED_KEYS, *_S3_KEYS, *_PATH_STYLE, _USE_FILTERS])
        else:
            opt = by_key[key]
            stored = opt.read(value, key)
            if key in unused:
                continue
            if opt.name in values and values[opt.name] != stored:
                raise ConfigError(
                    f"{written_as[opt.name]} = {opt.shown(mapping[written_as[opt.name]])} and {key} = "
                    f"{opt.shown(value)} set the same option, {opt.name}, to different values; keep one of them"
                )
            values[opt.name] = stored
            written_as[opt.name] = key
    if settings:
        own = values.get("storage_options", {})
        values["storage_options"] = {**settings, **(own if isinstance(own, Mapping) else {})}
    tuned = {name: values.pop(name) for name in list(values) if name.startswith(_OWN_ROCKSDB)}
    if _USE_FILTERS in mapping and not _flag(_USE_FILTERS, mapping[_USE_FILTERS]):
        tuned["rocksdb.bloom_bits_per_key"] = 0
    if tuned:
        profile = cast(RocksDBOptions, values.get("rocksdb", rocksdb))
        changes: dict[str, Any] = {name.removeprefix(_OWN_ROCKSDB): value for name, value in tuned.items()}
        values["rocksdb"] = dataclasses.replace(profile, **changes)
    return values


def read_file(path: str | PathLike[str]) -> dict[str, object]:
    """Returns the flat keys of a YAML file; raises `ConfigError` if it cannot be read or holds no mapping."""
    import yaml  # here, because slots and task managers read no file

    try:
        text = Path(path).read_text(encoding="utf-8")
        if len(text) > _MAX_LENGTH or text.count("[") + text.count("{") > _MAX_BRACKETS:
            raise ConfigError(f"{path} is too large for a config file; write one `option: value` per line")
        content: object = yaml.safe_load(text)
    except OSError as e:
        raise ConfigError(f"cannot read the config file {path}: {e.strerror or e}; check the path") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        # The text of the error quotes the file, which may hold secrets. `from None` keeps it out of the traceback, too.
        raise ConfigError(f"the config file {path} is not valid YAML{_where(e)}") from None
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"the config file {path} holds no mapping; write one `option: value` per line")
    try:
        return _flatten(content)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    except RecursionError:
        raise ConfigError(f"{path}: a mapping contains itself, or mappings are nested too deeply") from None


def _where(error: yaml.YAMLError | ValueError | RecursionError) -> str:
    """The place of an error in a YAML file, without a word of the file."""
    import yaml

    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        # Other kinds of errors quote names from the file.
        known = isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        problem = f": {error.problem}" if known and error.problem else ""
        return f"; look at line {mark.line + 1}, column {mark.column + 1}{problem}"
    if isinstance(error, UnicodeDecodeError):
        return f"; byte {error.start + 1} is not UTF-8"
    return ""


def _flatten(content: Mapping[object, object], prefix: str = "") -> dict[str, object]:
    """Joins nested keys with dots; `storage_options` and `rocksdb` keep their mappings.

    Raises `ConfigError` for a key that is written both flat and nested.
    """
    flat: dict[str, object] = {}
    for part, value in content.items():
        key = f"{prefix}{part}"
        nests = isinstance(value, Mapping) and key not in ("storage_options", "rocksdb")
        nested = _flatten(cast("Mapping[object, object]", value), f"{key}.") if nests else {key: value}
        for name, leaf in nested.items():
            if len(flat) >= _MAX_KEYS:
                raise ConfigError(f"there are more than {_MAX_KEYS} keys")
            if name in flat:
                raise ConfigError(f"{name} is set twice, once flat and once nested; keep one of them")
            flat[name] = leaf
    return flat


_SPARKS_WORDS = {
    "checkpointlocation": "checkpoint_dir",
    "processingtime": "batch_interval",
    "trigger": "batch_interval",
    "shufflepartitions": "parallelism",
}
"""What people write who come from Spark: the last part of the name, in small letters; and our name for it."""


def unknown_option(name: str, known: Iterable[str]) -> UnknownOptionError:
    """The error for an option that does not exist: it names the nearest of the `known` ones."""
    for word, ours in _SPARKS_WORDS.items():
        if re.sub("[^a-z]", "", name.lower()).endswith(word):
            return UnknownOptionError(f"unknown option {name!r}; here it is {ours!r}")
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
    return UnknownOptionError(f"unknown option {name!r}; the nearest one is {nearest!r}")


def _flag(key: str, value: object) -> bool:
    try:
        return kinds.FLAG.parse(value)
    except ValueError:
        raise ConfigError(f"{key} = {value!r} is not valid; allowed: {kinds.FLAG.allowed}") from None


def _unused_restart_keys(mapping: Mapping[str, object], strategy: Option[object, object]) -> set[str]:
    """Keys of restart strategies that are not the chosen one: a Flink config may carry the settings of several."""
    written = [key for key in (strategy.name, *strategy.keys) if key in mapping]
    chosen = strategy.read(mapping[written[0]], written[0]) if written else strategy.read(strategy.default)
    strategies = ("fixed-delay", "exponential-delay")
    if chosen not in strategies or not written:
        return set()
    others = tuple(f"restart-strategy.{other}." for other in strategies if other != chosen)
    return {key for key in mapping if key.startswith(others)}
