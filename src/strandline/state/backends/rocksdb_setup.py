"""Configures RocksDB for keyed state: translates `RocksDBOptions`, and shares one memory budget in a process."""

from __future__ import annotations

import re
from typing import Final

from rocksdict import (
    BlockBasedIndexType,
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

from strandline.config.rocksdb import RocksDBOptions
from strandline.state.backends.base import CacheReads

_COMPRESSIONS: Final = {
    "none": DBCompressionType.none,
    "snappy": DBCompressionType.snappy,
    "lz4": DBCompressionType.lz4,
    "zstd": DBCompressionType.zstd,
}


_CACHE_READS: Final = re.compile(r"^rocksdb\.block\.cache\.data\.(hit|miss) COUNT : (\d+)", re.MULTILINE)


class RocksDBMemory:
    """One memory budget for all databases of a process: a block cache that also accounts for their write buffers.

    Write buffers may exceed their share by half before a flush frees them. The shares are chosen so that cache and
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
        """The memory that the databases use now: cached blocks, indexes, filters and write buffers."""
        return self.cache.get_usage()


def rocksdict_options(settings: RocksDBOptions, memory: RocksDBMemory) -> Options:
    """RocksDB's own options for `settings`, with cache and write buffers from `memory`."""
    options = Options(raw_mode=True)
    options.set_block_based_table_factory(_table_options(settings, memory.cache))
    options.set_write_buffer_manager(memory.write_buffers)
    # The budget must hold several write buffers. Otherwise the writes of one database make others flush all the time.
    options.set_write_buffer_size(min(settings.write_buffer_bytes, max(memory.write_buffer_bytes // 2, 1 << 20)))
    options.set_max_write_buffer_number(settings.write_buffers)
    options.set_min_write_buffer_number_to_merge(settings.write_buffers_to_merge)
    options.set_memtable_prefix_bloom_ratio(settings.memtable_bloom_ratio)
    options.set_memtable_whole_key_filtering(settings.memtable_bloom_ratio > 0)
    options.set_optimize_filters_for_hits(settings.filters_for_hits)
    options.set_compression_type(_COMPRESSIONS[settings.compression]())
    if settings.compression_per_level:
        options.set_compression_per_level([_COMPRESSIONS[name]() for name in settings.compression_per_level])
    if settings.bottommost_compression is not None:
        options.set_bottommost_compression_type(_COMPRESSIONS[settings.bottommost_compression]())
    _set_compaction(settings, options)
    options.set_max_background_jobs(settings.background_jobs)
    options.set_bytes_per_sync(settings.bytes_per_sync)
    if settings.rate_limit_bytes is not None:
        options.set_ratelimiter(settings.rate_limit_bytes, 100_000, 10)  # RocksDB's own period (µs) and fairness
    options.set_max_open_files(settings.open_files)
    options.set_skip_stats_update_on_db_open(settings.skip_stats_on_open)
    options.set_keep_log_file_num(2)
    options.set_max_log_file_size(1 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    return options


def counting(options: Options) -> Options:
    """The same options, with RocksDB's statistics on. They cost about one percent of the time of reads."""
    options.enable_statistics()
    return options


def cache_reads(options: Options) -> CacheReads | None:
    """The reads of data blocks that RocksDB has counted; None if a user's options have no statistics."""
    counted = dict(_CACHE_READS.findall(options.get_statistics() or ""))
    return CacheReads(int(counted["hit"]), int(counted["miss"])) if len(counted) == 2 else None


def _table_options(settings: RocksDBOptions, cache: Cache) -> BlockBasedOptions:
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(settings.block_bytes)
    table.set_format_version(5)
    if settings.bloom_bits_per_key:
        table.set_bloom_filter(settings.bloom_bits_per_key, False)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    table.set_data_block_index_type(DataBlockIndexType.binary_and_hash())
    if settings.partitioned_index_filters:
        table.set_index_type(BlockBasedIndexType.two_level_index_search())
        table.set_partition_filters(settings.bloom_bits_per_key > 0)
        table.set_metadata_block_size(settings.metadata_block_bytes)
    return table


def _set_compaction(settings: RocksDBOptions, options: Options) -> None:
    if settings.compaction == "universal":
        universal = UniversalCompactOptions()
        universal.max_size_amplification_percent = settings.space_amplification_percent
        universal.size_ratio = settings.size_ratio_percent
        universal.min_merge_width = settings.min_merge_files
        options.set_compaction_style(DBCompactionStyle.universal())
        options.set_universal_compaction_options(universal)
    else:
        options.set_level_compaction_dynamic_level_bytes(settings.dynamic_level_bytes)
    options.set_level_zero_file_num_compaction_trigger(settings.level0_files)
    options.set_level_zero_slowdown_writes_trigger(3 * settings.level0_files)
    options.set_level_zero_stop_writes_trigger(5 * settings.level0_files)
    options.set_max_bytes_for_level_base(settings.level_base_bytes)
    options.set_max_bytes_for_level_multiplier(settings.level_multiplier)
    options.set_target_file_size_base(settings.target_file_bytes)
    options.set_max_subcompactions(settings.subcompactions)
    options.set_compaction_readahead_size(settings.compaction_readahead_bytes)
    if settings.deletion_ratio > 0:
        options.add_compact_on_deletion_collector_factory(0, 0, settings.deletion_ratio)


def without_log() -> WriteOptions:
    """Write options without RocksDB's write-ahead log, because a batch can be applied again from its segment."""
    options = WriteOptions()
    options.disable_wal = True  # type: ignore[method-assign,assignment]  # a property; the stub has it as a method
    return options


def bounded(end: bytes | None) -> ReadOptions:
    """Read options for an iterator that stops before `end`.

    An iterator of rocksdict (0.3.29) points into the memory of its options without keeping them alive. The caller must
    keep the options as long as the iterator. Otherwise the scan ends at a random key.
    """
    options = ReadOptions()
    if end is not None:
        options.set_iterate_upper_bound(end)
    return options
