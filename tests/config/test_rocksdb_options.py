"""RocksDB is set up as its options say, keeps state under all of them, and users may change what is left."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rocksdict import (
    BlockBasedOptions,
    DBCompactionStyle,
    Options,
    PlainTableFactoryOptions,
    SliceTransform,
)

import strandline as sl
from strandline.config.rocksdb import PROFILES, SETTINGS, RocksDBOptions
from strandline.errors import ConfigError, DamagedFileError, UnknownOptionError, UserCodeError
from strandline.runtime.driver.rocksdb_factory import pickle_factory
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.messages import BackendSettings, SlotSpec
from strandline.runtime.slot.process import ROCKSDB_SHARE, Slot
from strandline.runtime.slot.rocksdb_factory import DatabaseInfo, tuning
from strandline.state.backends.base import StateBackend
from strandline.state.backends.factory import RestoredFile, open_backend
from strandline.state.backends.rocksdb import RocksDBBackend
from strandline.state.backends.rocksdb_setup import RocksDBMemory
from strandline.storage.local import LocalStorage
from strandline.testing.backend import restorable
from tests.examples import examples
from tests.runtime.taskmanager.changelog.host import run_info, slot_spec
from tests.waiting import wait_until

MEMORY = 8 << 20
KB, MB = 1 << 10, 1 << 20


def written_options(directory: Path) -> dict[str, str]:
    """The options of an open database, as RocksDB itself wrote them down."""
    newest = max(directory.glob("OPTIONS-*"), key=lambda path: int(path.name.partition("-")[2]))
    return dict(line.strip().split("=", 1) for line in newest.read_text().splitlines() if "=" in line)


# --- state under any options ---------------------------------------------------------------------

compressions = st.sampled_from(["none", "snappy", "lz4", "zstd"])


def options_with(files: tuple[int, int], **others: Any) -> RocksDBOptions:
    return RocksDBOptions(level0_files=files[0], min_merge_files=files[1], **others)


any_options = st.builds(
    options_with,
    files=st.sampled_from([(1, 2), (2, 2), (3, 3), (1000, 2), (1000, 1000)]),
    write_buffer_bytes=st.sampled_from([64 * KB, MB, 64 << 30]),
    write_buffers=st.integers(4, 64),
    write_buffers_to_merge=st.integers(1, 3),
    write_buffer_share=st.floats(0.05, 0.95),
    memtable_bloom_ratio=st.floats(0, 0.25),
    block_bytes=st.integers(KB, 16 * MB),
    bloom_bits_per_key=st.integers(0, 100),
    filters_for_hits=st.booleans(),
    partitioned_index_filters=st.booleans(),
    metadata_block_bytes=st.integers(KB, 16 * MB),
    compression=compressions,
    compression_per_level=st.lists(compressions, max_size=8).map(tuple),
    bottommost_compression=st.none() | compressions,
    compaction=st.sampled_from(["universal", "level"]),
    space_amplification_percent=st.integers(1, 10_000),
    size_ratio_percent=st.integers(0, 1000),
    level_base_bytes=st.sampled_from([MB, 1 << 44]),
    level_multiplier=st.floats(2, 100),
    dynamic_level_bytes=st.booleans(),
    target_file_bytes=st.sampled_from([64 * KB, 64 << 30]),
    deletion_ratio=st.floats(0, 1),
    background_jobs=st.integers(1, 3),
    subcompactions=st.integers(1, 3),
    compaction_readahead_bytes=st.sampled_from([0, MB, 1 << 30]),
    rate_limit_bytes=st.none() | st.sampled_from([16 * MB, 1 << 40]),
    bytes_per_sync=st.sampled_from([0, 1, MB]),
    open_files=st.sampled_from([-1, 20, 1 << 30]),
    skip_stats_on_open=st.booleans(),
)
batches = st.lists(
    st.dictionaries(st.binary(min_size=3, max_size=5), st.none() | st.binary(max_size=200), max_size=30), max_size=4
)


def keeps_state(folder: Path, before: RocksDBOptions, after: RocksDBOptions, changes: list[Any]) -> None:
    """Write `changes` under `before`, with a snapshot after each, and go on under `after` from the last one."""
    written: dict[bytes, bytes | None] = {}
    backend = open_backend("rocksdb", folder / "db", memory=MEMORY, options=before)
    files: list[RestoredFile] = []
    for number, batch in enumerate([*changes, {b"many%04d" % n: b"%d" % n * 20 for n in range(500)}]):
        backend.apply(list(batch), list(batch.values()))
        written.update(batch)
        files = restorable(backend.snapshot(folder / f"snapshot-{number}").write())
    model = {key: value for key, value in written.items() if value is not None}
    same(backend, model)
    backend.close()
    restored = open_backend("rocksdb", folder / "restored", memory=MEMORY, restored_files=files, options=after)
    same(restored, model)
    restored.apply([b"more", *list(model)[:3]], [b"1", None, None, None][: 1 + len(list(model)[:3])])
    model = {b"more": b"1", **dict(list(model.items())[3:])}
    again = restorable(restored.snapshot(folder / "again").write())
    restored.close()
    heap = open_backend("heap", folder / "heap", restored_files=again)
    same(heap, model)
    heap.close()


def same(backend: StateBackend, model: dict[bytes, bytes]) -> None:
    assert list(backend.scan(b"")) == sorted(model.items())
    assert backend.get_many([*model, b"not there"]) == [*model.values(), None]


@settings(max_examples=examples(25), deadline=None)
@given(any_options, any_options, batches)
def test_state_is_kept_under_any_options_and_when_they_change(
    before: RocksDBOptions, after: RocksDBOptions, changes: list[Any]
) -> None:
    with TemporaryDirectory() as folder:
        keeps_state(Path(folder), before, after, changes)


def test_a_restored_database_has_todays_options_and_the_shared_memory(tmp_path: Path) -> None:
    source = open_backend("rocksdb", tmp_path / "source", memory=MEMORY)
    keys = [b"%06d" % n for n in range(20_000)]
    source.apply(keys, [key * 10 for key in keys])
    files = restorable(source.snapshot(tmp_path / "snapshot").write())
    source.close()
    memory = RocksDBMemory(MEMORY)
    options = RocksDBOptions(block_bytes=16 * KB, compaction="level", compression="zstd", open_files=77)
    restored = open_backend("rocksdb", tmp_path / "restored", memory=memory, restored_files=files, options=options)
    written = written_options(tmp_path / "restored")
    assert (written["block_size"], written["compaction_style"]) == ("16384", "kCompactionStyleLevel")
    assert (written["compression"], written["max_open_files"]) == ("kZSTD", "77")
    before = memory.used_bytes()
    assert None not in restored.get_many(keys)
    assert memory.used_bytes() > before + MB
    restored.close()


@pytest.mark.parametrize("name", PROFILES)
def test_state_is_kept_under_every_profile(name: str, tmp_path: Path) -> None:
    keeps_state(tmp_path / "to", RocksDBOptions(), RocksDBOptions.profile(name), [{b"abc": b"1"}, {b"abc": None}])
    keeps_state(tmp_path / "from", RocksDBOptions.profile(name), RocksDBOptions(), [{b"abc": b"1"}])


@settings(max_examples=examples(50))
@given(any_options)
def test_options_survive_pickle_msgpack_and_json(options: RocksDBOptions) -> None:
    assert pickle.loads(pickle.dumps(options)) == options
    backend = BackendSettings("rocksdb", MEMORY, MB, True, "lz4", options)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(backend), type=BackendSettings) == backend
    assert RocksDBOptions.of(msgspec.json.decode(msgspec.json.encode(options.to_mapping()))) == options
    assert RocksDBOptions.of(options) is options
    assert hash(options) == hash(pickle.loads(pickle.dumps(options)))


# --- what the options say ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"write_buffer_bytes": "1mb"}, "write_buffer_size", "1048576"),
        ({"write_buffer_bytes": "1gb"}, "write_buffer_size", str(MEMORY // 6)),
        ({"write_buffer_bytes": "1gb", "write_buffer_share": 0.75}, "write_buffer_size", str(MEMORY // 4)),
        ({"write_buffers": 5}, "max_write_buffer_number", "5"),
        ({"write_buffers_to_merge": 2}, "min_write_buffer_number_to_merge", "2"),
        ({"memtable_bloom_ratio": 0.125}, "memtable_prefix_bloom_size_ratio", "0.125000"),
        ({"memtable_bloom_ratio": 0.125}, "memtable_whole_key_filtering", "true"),
        ({"block_bytes": "16kb"}, "block_size", "16384"),
        ({"bloom_bits_per_key": 0}, "filter_policy", "nullptr"),
        ({"filters_for_hits": True}, "optimize_filters_for_hits", "true"),
        ({"partitioned_index_filters": True}, "partition_filters", "true"),
        ({"partitioned_index_filters": True}, "index_type", "kTwoLevelIndexSearch"),
        ({"partitioned_index_filters": True, "metadata_block_bytes": "8kb"}, "metadata_block_size", "8192"),
        ({"compression": "ZSTD"}, "compression", "kZSTD"),
        ({"compression_per_level": ["none", "lz4"]}, "compression_per_level", "kNoCompression:kLZ4Compression"),
        ({"bottommost_compression": "zstd"}, "bottommost_compression", "kZSTD"),
        ({"compaction": "level"}, "compaction_style", "kCompactionStyleLevel"),
        ({"compaction": "level"}, "level_compaction_dynamic_level_bytes", "true"),
        ({"compaction": "level", "dynamic_level_bytes": False}, "level_compaction_dynamic_level_bytes", "false"),
        ({"level0_files": 4}, "level0_stop_writes_trigger", "20"),
        ({"level_base_bytes": "64mb"}, "max_bytes_for_level_base", str(64 * MB)),
        ({"level_multiplier": 5}, "max_bytes_for_level_multiplier", "5.000000"),
        ({"target_file_bytes": "8mb"}, "target_file_size_base", str(8 * MB)),
        ({"background_jobs": 3}, "max_background_jobs", "3"),
        ({"subcompactions": 3}, "max_subcompactions", "3"),
        ({"compaction_readahead_bytes": "4mb"}, "compaction_readahead_size", str(4 * MB)),
        ({"bytes_per_sync": "1mb"}, "bytes_per_sync", "1048576"),
        ({"open_files": -1}, "max_open_files", "-1"),
        ({"skip_stats_on_open": True}, "skip_stats_update_on_db_open", "true"),
    ],
)
def test_a_setting_reaches_rocksdb(changes: dict[str, Any], name: str, value: str, tmp_path: Path) -> None:
    RocksDBBackend(tmp_path / "db", MEMORY, options=RocksDBOptions.of(changes)).close()
    assert written_options(tmp_path / "db")[name] == value


def test_universal_compaction_is_set_up(tmp_path: Path) -> None:
    options = RocksDBOptions(space_amplification_percent=70, size_ratio_percent=5, min_merge_files=3)
    RocksDBBackend(tmp_path / "db", MEMORY, options=options).close()
    universal = written_options(tmp_path / "db")["compaction_options_universal"]
    for part in ("max_size_amplification_percent=70;", "size_ratio=5;", "min_merge_width=3;"):
        assert part in universal


def test_files_of_deletions_are_compacted_soon(tmp_path: Path) -> None:
    options = RocksDBOptions(deletion_ratio=0.5, level0_files=1000, space_amplification_percent=10_000)
    backend = RocksDBBackend(tmp_path / "db", MEMORY, options=options)
    keys = [b"%04d" % n for n in range(2000)]
    backend.apply(keys, keys)
    backend.snapshot(tmp_path / "1")
    full = backend.size_bytes()
    backend.apply(keys, [None] * len(keys))
    backend.snapshot(tmp_path / "2")
    wait_until(lambda: backend.size_bytes() <= full // 4, 10, "the end of the deleted entries")
    backend.close()


def test_the_profiles_are_those_of_flink() -> None:
    assert RocksDBOptions.profile("default") == RocksDBOptions.profile("DEFAULT") == RocksDBOptions()
    spinning = RocksDBOptions.profile("SPINNING_DISK_OPTIMIZED")
    assert spinning == RocksDBOptions.profile("spinning-disk")
    assert (spinning.compaction, spinning.background_jobs, spinning.open_files) == ("level", 4, -1)
    high = RocksDBOptions.profile("SPINNING_DISK_OPTIMIZED_HIGH_MEM")
    assert high == RocksDBOptions.profile("spinning-disk-high-memory")
    assert (high.write_buffers, high.write_buffers_to_merge, high.block_bytes) == (4, 3, 128 * KB)
    assert (high.level_base_bytes, high.target_file_bytes) == (1 << 30, 256 * MB)
    ssd = RocksDBOptions.profile("FLASH_SSD_OPTIMIZED")
    assert ssd == RocksDBOptions.profile("ssd") == RocksDBOptions(background_jobs=4, open_files=-1)
    with pytest.raises(ConfigError, match=r"no profile 'nvme' of RocksDB; allowed: \"default\", .* or \"ssd\""):
        RocksDBOptions.profile("nvme")
    assert sl.RocksDBOptions is RocksDBOptions


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (field, values)
        for fields, values in [
            (
                ("write_buffer_bytes", "block_bytes", "metadata_block_bytes", "target_file_bytes"),
                ["x", 1, 1 << 50, None],
            ),
            (("level_base_bytes", "rate_limit_bytes"), ["x", 1, 1 << 50]),
            (("compaction_readahead_bytes", "bytes_per_sync"), [-1, 1 << 50, 0.5]),
            (("write_buffers", "write_buffers_to_merge", "level0_files", "background_jobs"), [0, 1 << 40, "x", True]),
            (("space_amplification_percent", "min_merge_files", "subcompactions"), [0, 1 << 40, 1.5]),
            (("bloom_bits_per_key", "size_ratio_percent"), [-1, 1 << 40, None]),
            (("open_files",), [-2, 0, 19, 1 << 40]),
            (("write_buffer_share",), [0, 1, "x", float("nan")]),
            (("memtable_bloom_ratio", "deletion_ratio"), [-0.1, 1.1]),
            (("level_multiplier",), [1, float("inf")]),
            (("compression", "compaction"), ["gzip", None, 3]),
            (("bottommost_compression",), ["gzip", 3]),
            (("compression_per_level",), [["gzip"], "lz4;x", 3, [None]]),
            (("filters_for_hits", "partitioned_index_filters", "dynamic_level_bytes", "skip_stats_on_open"), [1, "on"]),
        ]
        for field in fields
    ],
)
def test_a_wrong_value_names_its_field(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=rf"^rocksdb\.{field} = .* is not valid.*; allowed: "):
            RocksDBOptions(**{field: value})


def test_settings_that_would_stop_writes_for_good_are_refused() -> None:
    with pytest.raises(ConfigError, match="write_buffers_to_merge = 3 leaves no buffer for writes; allowed: less than"):
        RocksDBOptions(write_buffers_to_merge=3)
    with pytest.raises(
        ConfigError, match=r"min_merge_files = 9 would .*; allowed: 2, or up to rocksdb.level0_files = 8"
    ):
        RocksDBOptions(min_merge_files=9)
    assert RocksDBOptions(min_merge_files=9, compaction="level").min_merge_files == 9
    assert RocksDBOptions(level0_files=1).min_merge_files == 2


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match=r"'rocksdb.block_size'; the nearest one is 'rocksdb\.block_bytes'"):
        RocksDBOptions.of({"block_size": 4096})
    assert all(setting.name == f"rocksdb.{name}" for name, setting in SETTINGS.items())


# --- the user's factory --------------------------------------------------------------------------


def larger_blocks(options: Options, info: DatabaseInfo) -> None:
    """Its own table options, within the slot's memory."""
    table = BlockBasedOptions()
    table.set_block_cache(info.cache)
    table.set_block_size(64 * KB + info.subtask)
    options.set_block_based_table_factory(table)


def spec_with(tmp_path: Path, factory: Callable[..., Any] | str | None, **changes: Any) -> SlotSpec:
    pickled = pickle_factory(factory) if factory is not None else None
    backend = BackendSettings("rocksdb", MEMORY, MB, True, "lz4", RocksDBOptions(**changes), pickled)
    run = run_info(tmp_path, LocalStorage(str(tmp_path / "durable")), None)
    spec = slot_spec(run, 1, backend=backend)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=SlotSpec)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Slot]]:
    slots: list[Slot] = []

    def open_slot(factory: Callable[..., Any] | str | None = None, **changes: Any) -> Slot:
        slots.append(Slot(spec_with(tmp_path, factory, **changes)))
        return slots[-1]

    yield open_slot
    for slot in slots:
        for operator in slot.operators.values():
            operator.close()


def database(tmp_path: Path) -> Path:
    return next((tmp_path / "local").rglob("OPTIONS-*")).parent


def test_a_slot_opens_its_databases_with_the_options(opened: Callable[..., Slot], tmp_path: Path) -> None:
    slot = opened(None, open_files=77, write_buffer_share=0.25)
    assert written_options(database(tmp_path))["max_open_files"] == "77"
    figures = slot.figures(NOTHING)
    assert figures.budget_bytes == MEMORY
    assert 0 < figures.used_bytes <= int(MEMORY * ROCKSDB_SHARE)
    assert slot._memory is not None
    assert slot._memory.write_buffer_bytes == max(int(MEMORY * ROCKSDB_SHARE / 6), MB)


def test_a_factory_has_the_last_word(opened: Callable[..., Slot], tmp_path: Path) -> None:
    opened(larger_blocks, block_bytes="8kb", open_files=77)
    written = written_options(database(tmp_path))
    assert (written["block_size"], written["max_open_files"]) == (str(64 * KB + 1), "77")


def test_a_factory_knows_its_database_and_may_return_other_options(opened: Callable[..., Slot], tmp_path: Path) -> None:
    def factory(_options: Options, info: DatabaseInfo) -> Options:
        assert (info.job, info.operator, info.subtask) == ("log", "op", 1), info
        own = Options(raw_mode=True)
        own.set_max_open_files(55)
        return own

    opened(factory)
    assert written_options(database(tmp_path))["max_open_files"] == "55"


def test_a_factory_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_tuning.py").write_text(
        "class Factories:\n"
        "    @staticmethod\n"
        "    def few_files(options, info):\n"
        "        options.set_max_open_files(33)\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    options = RocksDBOptions()
    tune = tuning(spec_with(tmp_path, "user_tuning:Factories.few_files"), "op", RocksDBMemory(MEMORY))
    RocksDBBackend(tmp_path / "db", MEMORY, options=options, tune=tune).close()
    assert written_options(tmp_path / "db")["max_open_files"] == "33"
    for name, message in {
        "user_tuning:many_files": "is not there: .*many_files.*write `module:function`",
        "no_such_module:few_files": "is not there: No module named 'no_such_module'",
        "user_tuning:number": "is 7, which cannot be called",
    }.items():
        with pytest.raises(ConfigError, match=f"rocksdb_factory = '{name}' {message}"):
            pickle_factory(name)


def test_a_factory_of_the_main_script_reaches_the_slots(tmp_path: Path) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\n"
        "from strandline.runtime.driver.rocksdb_factory import pickle_factory\n"
        "class FewFiles:\n"
        "    count = 44\n"
        "    def __call__(self, options, info):\n"
        "        options.set_max_open_files(self.count)\n"
        "sys.stdout.buffer.write(pickle_factory(FewFiles()))\n"
    )
    pickled = subprocess.run([sys.executable, str(script)], check=True, capture_output=True).stdout
    spec = spec_with(tmp_path, None)
    spec = msgspec.structs.replace(spec, backend=msgspec.structs.replace(spec.backend, rocksdb_factory=pickled))
    tune = tuning(spec, "op", RocksDBMemory(MEMORY))
    RocksDBBackend(tmp_path / "db", MEMORY, tune=tune).close()
    assert written_options(tmp_path / "db")["max_open_files"] == "44"


def test_an_error_in_a_factory_is_the_users(opened: Callable[..., Slot]) -> None:
    def broken(_options: Options, _info: DatabaseInfo) -> None:
        raise KeyError("blocks")

    with pytest.raises(UserCodeError, match=r"(?s)operator 'op', subtask 1: rocksdb_factory failed.*broken.*'blocks'"):
        opened(broken)
    with pytest.raises(UserCodeError, match=r"rocksdb_factory returned 5; it must return rocksdict\.Options"):
        opened(lambda _options, _info: 5)


def test_a_factory_that_cannot_be_sent_is_refused_in_the_driver() -> None:
    lines = (line for line in ["one"])
    with pytest.raises(ConfigError, match=r"rocksdb_factory = .* cannot be sent to the slots: .*generator"):
        pickle_factory(lambda _options, _info: next(lines))


def _fifo_compaction(options: Options) -> None:
    options.set_max_open_files(-1)
    options.set_compaction_style(DBCompactionStyle.fifo())


def _inplace_updates(options: Options) -> None:
    options.set_allow_concurrent_memtable_write(False)
    options.set_inplace_update_support(True)


UNSAFE: dict[str, Callable[[Options], Any]] = {
    "compaction_style to kCompactionStyleFIFO": _fifo_compaction,
    "table_factory to PlainTable": lambda options: options.set_plain_table_factory(PlainTableFactoryOptions()),
    "num_levels to 9": lambda options: options.set_num_levels(9),
    "prefix_extractor to rocksdb.FixedPrefix": lambda options: options.set_prefix_extractor(
        SliceTransform.create_fixed_prefix(2)
    ),
    "inplace_update_support to true": _inplace_updates,
    "enable_blob_files to true": lambda options: options.set_enable_blob_files(True),
    "returned options without raw_mode": lambda _options: Options(),
}


@pytest.mark.parametrize("what", UNSAFE)
def test_what_state_does_not_bear_is_refused(what: str, tmp_path: Path) -> None:
    def tune(options: Options) -> Options:
        changed = UNSAFE[what](options)
        return changed if isinstance(changed, Options) else options

    with pytest.raises(ConfigError, match=f"{tmp_path / 'db'}: rocksdb_factory .*{what}"):
        RocksDBBackend(tmp_path / "db", MEMORY, tune=tune)
    open_backend("rocksdb", tmp_path / "db", memory=MEMORY).close()  # it is not left open


def test_options_that_rocksdb_refuses_are_not_taken_for_damage(tmp_path: Path) -> None:
    def tune(options: Options) -> Options:
        options.set_inplace_update_support(True)  # not together with concurrent writes
        return options

    message = "with the options of rocksdb_factory, RocksDB cannot open .*without them it can"
    with pytest.raises(ConfigError, match=message):
        RocksDBBackend(tmp_path / "db", MEMORY, tune=tune)
    source = open_backend("rocksdb", tmp_path / "source", memory=MEMORY)
    source.apply([b"key"], [b"value"])
    files = restorable(source.snapshot(tmp_path / "snapshot").write())
    source.close()
    with pytest.raises(ConfigError, match=message):
        open_backend("rocksdb", tmp_path / "restored", memory=MEMORY, restored_files=files, tune=tune)
    for file in files:
        if file.shared:
            file.path.write_bytes(b"damaged")
    with pytest.raises(DamagedFileError):
        open_backend("rocksdb", tmp_path / "restored", memory=MEMORY, restored_files=files, tune=tune)


def test_the_heap_backend_ignores_all_of_it(tmp_path: Path) -> None:
    spec = spec_with(tmp_path, larger_blocks)
    assert tuning(spec, "op", None) is None
    backend = open_backend("heap", tmp_path / "db", options=RocksDBOptions.profile("ssd"))
    backend.apply([b"key"], [b"value"])
    assert backend.get_many([b"key"]) == [b"value"]
    backend.close()
