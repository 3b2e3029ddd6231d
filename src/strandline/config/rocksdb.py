"""Settings of RocksDB for keyed state: point reads of small values, a flush at every barrier, bounded memory."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self, TypeVar, cast

from strandline.config import option as kinds
from strandline.config.option import Kind, Option
from strandline.errors import ConfigError, UnknownOptionError

_In = TypeVar("_In")
_Out = TypeVar("_Out")

_COMPRESSIONS: Final = ("none", "snappy", "lz4", "zstd")
_FLINK: Final = "state.backend.rocksdb."
_MB: Final = 1 << 20
_GB: Final = 1 << 30


# --- kinds of values -----------------------------------------------------------------------------

_COMPRESSION: Final = kinds.choice(
    *_COMPRESSIONS, also={"no_compression": "none", **{f"{name}_compression": name for name in _COMPRESSIONS}}
)


def _parse_compressions(value: object) -> tuple[str, ...]:
    names = [part for part in value.split(";") if part.strip()] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple)):
        raise ValueError
    return tuple(_COMPRESSION.parse(name) for name in names)


def _parse_open_files(value: object) -> int:
    count = kinds.integer(-1).parse(value)
    if -1 < count < 20 or count > 1 << 30:
        raise ValueError("out of range")
    return count


def _whole(value: object) -> object:
    """Flink writes the bits of a filter as a float."""
    text = str(value).strip()
    return text.removesuffix(".0") if isinstance(value, (str, float)) else value


_COMPRESSION_LIST: Kind[tuple[str, ...], tuple[str, ...]] = Kind(
    "list of compressions", f"a list of compressions, each one {_COMPRESSION.allowed}", _parse_compressions
)
_OPEN_FILES: Kind[int, int] = Kind("int", "-1 (all files stay open), or a whole number, 20 or more", _parse_open_files)
_BITS: Kind[int, int] = Kind(
    "int", "a whole number from 0 (no filter) to 100", kinds.integer(0, 100).parse, from_flink=_whole
)


def _setting(default: _In, kind: Kind[_In, _Out], doc: str, *, key: str = "", unset: str = "not set") -> _Out:
    """Declares a field; `key` is the part of its Flink key after `state.backend.rocksdb.`."""
    option = kinds.option(default, kind, keys=(_FLINK + key,) if key else (), doc=doc, unset=unset)
    return cast(_Out, field(default=default, metadata={"setting": option}))


# --- options -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RocksDBOptions:
    """Settings of RocksDB for keyed state; the defaults suit many small values and frequent checkpoints.

    Sizes may be written as `"64mb"`. A wrong value is a `ConfigError` that names the field and what is allowed.
    """

    write_buffer_bytes: int = _setting(
        "64mb",
        kinds.size(at_least=64 << 10, at_most=64 * _GB),
        "Size of one write buffer, at most half of all write buffers' budget. A barrier flushes them anyway.",
        key="writebuffer.size",
    )
    write_buffers: int = _setting(
        3,
        kinds.integer(2, 64),
        "How many write buffers a database may have, full and being flushed ones included.",
        key="writebuffer.count",
    )
    write_buffers_to_merge: int = _setting(
        1,
        kinds.integer(1, 63),
        "How many full write buffers are merged into one file. A barrier does not wait for that many.",
        key="writebuffer.number-to-merge",
    )
    write_buffer_share: float = _setting(
        0.5,
        kinds.number(0.05, 0.95),
        "Part of RocksDB's memory that write buffers may take. More for jobs that mostly write.",
        key="memory.write-buffer-ratio",
    )
    memtable_bloom_ratio: float = _setting(
        0.0,
        kinds.number(0.0, 0.25),
        "Part of a write buffer for a filter of its keys, which saves searches for keys that are not in it.",
    )
    block_bytes: int = _setting(
        "4kb",
        kinds.size(at_least=1 << 10, at_most=16 * _MB),
        "Size of a block, the unit of reading and caching. Larger ones compress better, and cost more per read.",
        key="block.blocksize",
    )
    bloom_bits_per_key: int = _setting(
        10,
        _BITS,
        "Bits of a file's filter for each key; 0 for no filters. Flink's `use-bloom-filter: false` means 0.",
        key="bloom-filter.bits-per-key",
    )
    filters_for_hits: bool = _setting(
        False,
        kinds.FLAG,
        "Leave out the filters of the oldest data. That saves most of the filters' memory, and suits jobs whose keys "
        "are seldom new.",
    )
    partitioned_index_filters: bool = _setting(
        False,
        kinds.FLAG,
        "Cut indexes and filters into blocks that are cached one by one. Use it for state much larger than memory.",
        key="memory.partitioned-index-filters",
    )
    metadata_block_bytes: int = _setting(
        "4kb",
        kinds.size(at_least=1 << 10, at_most=16 * _MB),
        "Size of a block of an index or filter, with `partitioned_index_filters`.",
        key="block.metadata-blocksize",
    )
    compression: str = _setting(
        "lz4",
        _COMPRESSION,
        "Compression of the files. Incremental checkpoints upload the files as they are.",
    )
    compression_per_level: tuple[str, ...] = _setting(
        (),
        _COMPRESSION_LIST,
        "Compression of each level, from level 0 downwards, instead of `compression`. The last entry counts for all "
        "further levels.",
        key="compression.per.level",
    )
    bottommost_compression: str | None = _setting(
        None,
        kinds.optional(_COMPRESSION),
        "Compression of the oldest data, which is most of the state and is seldom rewritten.",
        unset="as the rest",
    )
    compaction: str = _setting(
        "universal",
        kinds.choice("universal", "level"),
        "`universal` merges files of similar size, so that an update of a few keys does not rewrite and upload the "
        "whole state every few checkpoints. `level` keeps less overwritten data, and rewrites more.",
        key="compaction.style",
    )
    level0_files: int = _setting(
        8,
        kinds.integer(1, 1000),
        "How many flushed files may wait for a merge. Every barrier flushes a small file, and merging files is what "
        "costs time. Writes slow down at 3 times and stop at 5 times as many files.",
    )
    space_amplification_percent: int = _setting(
        50,
        kinds.integer(1, 10_000),
        "How much overwritten data may exist, relative to the state, before everything is merged (universal only).",
    )
    size_ratio_percent: int = _setting(
        1,
        kinds.integer(0, 1000),
        "A file is merged with those before it if it is at most this much larger than all of them (universal only).",
    )
    min_merge_files: int = _setting(
        2,
        kinds.integer(2, 1000),
        "The least number of files of similar size in a merge; at most `level0_files` (universal only).",
    )
    level_base_bytes: int = _setting(
        "128mb",
        kinds.size(at_least=_MB, at_most=1 << 44),
        "Size of the first level after level 0 (level only).",
        key="compaction.level.max-size-level-base",
    )
    level_multiplier: float = _setting(
        10.0, kinds.number(2.0, 100.0), "How much larger each level is than the one before it (level only)."
    )
    dynamic_level_bytes: bool = _setting(
        True,
        kinds.FLAG,
        "Derive the sizes of the levels from the last one, so that little overwritten data is kept (level only).",
        key="compaction.level.use-dynamic-size",
    )
    target_file_bytes: int = _setting(
        "32mb",
        kinds.size(at_least=64 << 10, at_most=64 * _GB),
        "Size of the files that compaction writes. A checkpoint uploads and shares whole files.",
        key="compaction.level.target-file-size-base",
    )
    deletion_ratio: float = _setting(
        0.0,
        kinds.number(0.0, 1.0),
        "A file is compacted soon if more than this part of its entries are deletions; 0 turns this off. Use it for "
        "state that is purged by time to live, timers or windows, because deletions slow scans down.",
    )
    background_jobs: int = _setting(
        2,
        kinds.integer(1, 64),
        "Threads of one slot for flushes and compactions.",
        key="thread.num",
    )
    subcompactions: int = _setting(1, kinds.integer(1, 64), "Threads that share the work of one large compaction.")
    compaction_readahead_bytes: int = _setting(
        "2mb",
        kinds.size(at_least=0, at_most=_GB),
        "How much a compaction reads at once. More for spinning disks and network disks.",
    )
    rate_limit_bytes: int | None = _setting(
        None,
        kinds.optional(kinds.size(at_least=_MB, at_most=1 << 40)),
        "Bytes a second that flushes and compactions of one database may write.",
        unset="no limit",
    )
    bytes_per_sync: int = _setting(
        0,
        kinds.size(at_least=0, at_most=_GB),
        "Flush a file to disk after every so many written bytes; 0 flushes it once, at its end.",
    )
    open_files: int = _setting(
        500,
        _OPEN_FILES,
        "How many files of one database may be open; -1 opens all. That is faster and takes memory outside the budget.",
        key="files.open",
    )
    skip_stats_on_open: bool = _setting(
        False,
        kinds.FLAG,
        "Do not read statistics from files when a database opens. A large state is restored sooner, but the first "
        "compactions choose their files less well.",
    )

    def __post_init__(self) -> None:
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, setting.read(getattr(self, name)))
        if self.write_buffers_to_merge >= self.write_buffers:
            raise ConfigError(
                f"rocksdb.write_buffers_to_merge = {self.write_buffers_to_merge} leaves no buffer for writes; allowed: "
                f"less than rocksdb.write_buffers = {self.write_buffers}"
            )
        if self.compaction == "universal" and self.min_merge_files > max(2, self.level0_files):
            raise ConfigError(
                f"rocksdb.min_merge_files = {self.min_merge_files} would stop writes for good, because writes "
                f"stop before so many files exist; allowed: 2, or up to rocksdb.level0_files = {self.level0_files}"
            )

    @classmethod
    def profile(cls, name: str) -> Self:
        """Returns the options of a profile: `default`, `spinning-disk`, `spinning-disk-high-memory` or `ssd`.

        Flink's names of these profiles work as well. `default` suits frequent checkpoints. The other profiles make the
        changes that Flink's profiles make. In every profile, cache and write buffers stay within `state_memory`.

        Raises `ConfigError` for an unknown name.
        """
        try:
            return cls(**PROFILES[_PROFILE.parse(name)])
        except ValueError:
            raise ConfigError(f"there is no profile {name!r} of RocksDB; allowed: {_PROFILE.allowed}") from None

    @classmethod
    def of(cls, value: object) -> Self:
        """Returns options from a `RocksDBOptions`, the name of a profile, or a mapping of fields to values.

        A mapping may name a `profile` to begin with. Raises `ConfigError` for a wrong name or value, and `ValueError`
        for any other type.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.profile(value)
        if not isinstance(value, Mapping):
            raise ValueError
        for name in value:
            if name != "profile" and name not in SETTINGS:
                nearest = difflib.get_close_matches(str(name), ["profile", *SETTINGS], n=1, cutoff=0.0)[0]
                raise UnknownOptionError(f"unknown option 'rocksdb.{name}'; the nearest one is 'rocksdb.{nearest}'")
        changes = {name: setting for name, setting in value.items() if name != "profile"}
        return replace(cls.profile(value.get("profile", "default")), **changes)

    def to_mapping(self) -> dict[str, Any]:
        """Returns the fields with plain JSON values; `of` gives equal options back."""
        values = {name: getattr(self, name) for name in SETTINGS}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


SETTINGS: Final[Mapping[str, Option[object, object]]] = {f.name: f.metadata["setting"] for f in fields(RocksDBOptions)}
"""The option behind every field, by the name of the field. Errors name the option `rocksdb.` and that name."""
for _name, _option in SETTINGS.items():
    _option.__set_name__(RocksDBOptions, f"rocksdb.{_name}")

_SPINNING: Final = {"compaction": "level", "dynamic_level_bytes": True, "background_jobs": 4, "open_files": -1}
PROFILES: Final[Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    "spinning-disk": _SPINNING,
    "spinning-disk-high-memory": {
        **_SPINNING,
        "block_bytes": 128 << 10,
        "level_base_bytes": _GB,
        "target_file_bytes": 256 * _MB,
        "write_buffer_bytes": 64 * _MB,
        "write_buffers": 4,
        "write_buffers_to_merge": 3,
    },
    "ssd": {"background_jobs": 4, "open_files": -1},
}
"""The fields that each profile changes."""
_PROFILE: Final = kinds.choice(
    *PROFILES,
    also={
        "spinning_disk_optimized": "spinning-disk",
        "spinning_disk_optimized_high_mem": "spinning-disk-high-memory",
        "flash_ssd_optimized": "ssd",
    },
)
