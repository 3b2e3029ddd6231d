"""How RocksDB is set up for keyed state: point reads of small values, a flush at every barrier, a bounded memory."""

from __future__ import annotations

from dataclasses import dataclass

from rocksdict import (
    BlockBasedOptions,
    Cache,
    DataBlockIndexType,
    DBCompactionStyle,
    DBCompressionType,
    Options,
    ReadOptions,
    UniversalCompactOptions,
    WriteBufferManager,
    WriteOptions,
)

from strandline.errors import ConfigError

_COMPRESSIONS = {
    "none": DBCompressionType.none,
    "snappy": DBCompressionType.snappy,
    "lz4": DBCompressionType.lz4,
    "zstd": DBCompressionType.zstd,
}


class RocksDBMemory:
    """One budget for all databases of a process: a block cache to which their write buffers are charged.

    Write buffers may exceed their share by half before a flush frees them, so the shares are cut such that cache and
    buffers together stay within `total_bytes` even then.
    """

    def __init__(self, total_bytes: int, write_buffer_share: float = 0.5) -> None:
        self.total_bytes = total_bytes
        self.write_buffer_bytes = max(int(2 * total_bytes * write_buffer_share / 3), 1 << 20)
        self.cache = Cache(max(int((3 - write_buffer_share) * total_bytes / 3), 1 << 20))
        self.write_buffers = WriteBufferManager.new_write_buffer_manager_with_cache(
            self.write_buffer_bytes, False, self.cache
        )

    def used_bytes(self) -> int:
        """What the databases hold now: cached blocks, indexes, filters and write buffers."""
        return self.cache.get_usage()


@dataclass(frozen=True, slots=True)
class RocksDBOptions:
    """The settings that matter for state; the defaults suit many small values and frequent checkpoints."""

    write_buffer_bytes: int = 64 << 20
    block_bytes: int = 4 << 10
    bloom_bits_per_key: int = 10
    compression: str = "lz4"
    level0_files: int = 8
    """How many flushed files may wait: a barrier flushes a small one each time, and merging them is what costs."""
    level_base_bytes: int = 128 << 20
    target_file_bytes: int = 32 << 20
    background_jobs: int = 2
    open_files: int = 500
    compaction: str = "universal"
    """`universal` merges files of like size, so an update of a few keys does not rewrite (and upload) the whole state
    every few checkpoints; `level` keeps less that was overwritten, at the price of doing just that."""
    space_amplification_percent: int = 50
    """How much overwritten data may wait, relative to the state, before everything is merged (universal only)."""

    def to_options(self, memory: RocksDBMemory) -> Options:
        """RocksDB's own options, with cache and write buffers taken from `memory`."""
        if self.compaction not in ("universal", "level"):
            raise ConfigError(f"compaction is {self.compaction!r}; it must be universal or level")
        if self.compression not in _COMPRESSIONS:
            raise ConfigError(f"compression is {self.compression!r}; it must be one of {', '.join(_COMPRESSIONS)}")
        table = BlockBasedOptions()
        table.set_block_cache(memory.cache)
        table.set_block_size(self.block_bytes)
        table.set_format_version(5)
        table.set_bloom_filter(self.bloom_bits_per_key, False)
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        table.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
        options = Options(raw_mode=True)
        options.set_block_based_table_factory(table)
        options.set_write_buffer_manager(memory.write_buffers)
        # Small enough that the budget holds several, or one database would flush at every few writes of another.
        options.set_write_buffer_size(min(self.write_buffer_bytes, max(memory.write_buffer_bytes // 2, 1 << 20)))
        options.set_max_write_buffer_number(3)
        options.set_compression_type(_COMPRESSIONS[self.compression]())
        if self.compaction == "universal":
            universal = UniversalCompactOptions()
            universal.max_size_amplification_percent = self.space_amplification_percent
            options.set_compaction_style(DBCompactionStyle.universal())
            options.set_universal_compaction_options(universal)
        else:
            options.set_level_compaction_dynamic_level_bytes(True)
        options.set_level_zero_file_num_compaction_trigger(self.level0_files)
        options.set_level_zero_slowdown_writes_trigger(3 * self.level0_files)
        options.set_level_zero_stop_writes_trigger(5 * self.level0_files)
        options.set_max_bytes_for_level_base(self.level_base_bytes)
        options.set_target_file_size_base(self.target_file_bytes)
        options.set_max_background_jobs(self.background_jobs)
        options.set_max_open_files(self.open_files)
        options.set_keep_log_file_num(2)
        options.set_max_log_file_size(1 << 20)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        return options


def without_log() -> WriteOptions:
    """Write options without RocksDB's own log: a batch can be repeated from its segment."""
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign,assignment]  # a property; the stub has it as a method
    return options


def bounded(end: bytes | None) -> ReadOptions:
    """Read options for an iterator that stops before `end`.

    rocksdict's iterators point into the options' memory without holding on to them (0.3.29): whoever keeps an iterator
    must keep its options as long, or the scan ends at a random key.
    """
    options = ReadOptions()
    if end is not None:
        options.set_iterate_upper_bound(end)
    return options
