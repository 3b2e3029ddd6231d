"""Options are read, checked and described as `Config` promises."""

from __future__ import annotations

import contextlib
import inspect
import json
import pickle
import pydoc
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.config import Config, ports_of, reference_markdown
from strandline.config.config import OPTIONS
from strandline.config.option import REQUIRED, parse_duration, parse_size
from strandline.config.reference import GROUPS
from strandline.config.rocksdb import PROFILES, SETTINGS, RocksDBOptions
from strandline.errors import ConfigError, UnknownOptionError

DIR = {"checkpoint_dir": "ckpt"}


def build(**options: object) -> Config:
    """A config from values that a type checker would not let through."""
    return Config(checkpoint_dir="ckpt").replace(**options)


# --- defaults ------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_design() -> None:
    assert Config(checkpoint_dir="ckpt").to_mapping() == {
        "checkpoint_dir": "ckpt",
        "checkpoint_interval": 10.0,
        "min_pause": 0.0,
        "checkpoint_timeout": 600.0,
        "max_concurrent_checkpoints": 1,
        "tolerable_failed_checkpoints": 0,
        "num_retained": 1,
        "on_cancel": "retain",
        "checkpoint_every_batch": False,
        "shuffle": "auto",
        "latency_mode": "batch",
        "epoch_interval": 0.01,
        "transfer_rows": 1,
        "batch_interval": None,
        "state_backend": "rocksdb",
        "state_memory": 512 << 20,
        "rocksdb": RocksDBOptions().to_mapping(),
        "rocksdb_factory": None,
        "batch_memory": 128 << 20,
        "incremental": True,
        "changelog": False,
        "changelog_dir": None,
        "savepoint_dir": None,
        "trusted_dirs": (),
        "allow_unfenced_storage": False,
        "changelog_upload_timeout": 1.0,
        "changelog_upload_attempts": 3,
        "changelog_max_in_flight": 100 << 20,
        "sink_backlog": 512 << 20,
        "changelog_max_amplification": 1.5,
        "materialization_interval": 600.0,
        "local_recovery": False,
        "local_dir": None,
        "spark_checkpoint_dir": None,
        "snapshot_compression": "none",
        "inline_threshold": 20480,
        "small_file_threshold": 1048576,
        "max_space_amplification": 2.0,
        "parallelism": None,
        "max_parallelism": 128,
        "timer_service": "heap",
        "restart_strategy": "exponential-delay",
        "restart_attempts": 10,
        "restart_delay": 1.0,
        "restart_max_delay": 60.0,
        "restart_multiplier": 2.0,
        "restart_reset_after": 600.0,
        "bind_host": None,
        "tls": "off",
        "tls_certificate": None,
        "tls_key": None,
        "tls_ca": None,
        "tls_server_name": None,
        "storage_options": {},
        "heartbeat_timeout": 8.0,
        "rest_port": "8081-8130",
        "rest_bind": "127.0.0.1",
        "rest_hosts": (),
        "rest_token": None,
    }


def test_a_config_without_a_checkpoint_dir_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_dir is required: say where checkpoints go, .*Config\("):
        Config()
    with pytest.raises(ConfigError, match="checkpoint_dir is required"):
        Config.from_mapping({})


@pytest.mark.parametrize(
    ("given", "message"),
    [("ckpt", r"options are keywords: Config\(checkpoint_dir='ckpt'\)"), (DIR, r"Config\.from_mapping\(")],
)
def test_a_positional_argument_is_told_that_options_are_keywords(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(given)  # type: ignore[call-arg, arg-type]  # that it is refused is the point


def test_help_shows_a_signature_that_can_be_read() -> None:
    assert str(inspect.signature(Config)) == "(*, checkpoint_dir: 'str | PathLike[str]', **options: 'object')"
    assert "required" not in pydoc.render_doc(Config.__init__)


def test_a_config_is_a_value() -> None:
    config = Config(checkpoint_dir="ckpt", storage_options={"region": "x"})
    assert config == Config(checkpoint_dir=Path("ckpt"), storage_options={"region": "x"})
    assert hash(config) == hash(Config(checkpoint_dir="ckpt", storage_options={"region": "x"}))
    assert config != config.replace(num_retained=2)
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(AttributeError):
        config.num_retained = 2  # type: ignore[misc]  # that it is refused is the point


def test_secrets_are_not_shown() -> None:
    assert "hunter2" not in repr(Config(checkpoint_dir="s3://b/c", storage_options={"secret_access_key": "hunter2"}))
    with pytest.raises(ConfigError, match="storage_options") as raised:
        build(storage_options={"secret_access_key": "hunter2", "other": None})
    assert "hunter2" not in str(raised.value)


def test_a_later_change_of_the_users_mapping_does_not_reach_the_config() -> None:
    settings = {"region": "x"}
    config = Config(checkpoint_dir="ckpt", storage_options=settings)
    settings["region"] = "y"
    assert config.storage_options == {"region": "x"}


# --- durations and sizes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("1s", 1.0),
        ("500ms", 0.5),
        ("100ms", 0.1),
        ("10 min", 600.0),
        ("1h", 3600.0),
        ("2 days", 172800.0),
        ("1.5 S", 1.5),
        (" 3sec ", 3.0),
        ("250us", 0.00025),
        ("7 nanos", 7e-9),
        ("10", 10.0),
        (10, 10.0),
        (0.25, 0.25),
        (timedelta(milliseconds=1500), 1.5),
    ],
)
def test_durations_are_read_as_seconds(written: str | float | timedelta, seconds: float) -> None:
    config = Config(checkpoint_dir="ckpt", checkpoint_interval=written)
    assert config.checkpoint_interval == seconds
    assert isinstance(config.checkpoint_interval, float)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("512mb", 512 << 20),
        ("1 GB", 1 << 30),
        ("2g", 2 << 30),
        ("1.5gb", 3 << 29),
        ("4096kb", 4 << 20),
        (1 << 21, 1 << 21),
    ],
)
def test_sizes_are_read_as_bytes(written: str | int, size: int) -> None:
    assert Config(checkpoint_dir="ckpt", state_memory=written).state_memory == size


@given(st.floats(0, 1e12, allow_subnormal=False))
def test_any_number_of_seconds_is_kept_exactly(seconds: float) -> None:
    assert parse_duration(seconds) == seconds
    assert parse_duration(repr(seconds)) == seconds
    assert parse_duration(f"{seconds!r} s") == seconds


@given(st.integers(0, 10**9), st.sampled_from([("ms", 1000), ("us", 10**6), ("µs", 10**6), ("ns", 10**9)]))
def test_small_units_are_the_nearest_float(count: int, unit: tuple[str, int]) -> None:
    assert parse_duration(f"{count}{unit[0]}") == count / unit[1]


@given(st.integers(0, 2**60))
def test_any_number_of_bytes_is_kept_exactly(size: int) -> None:
    assert parse_size(size) == parse_size(str(size)) == parse_size(f"{size} bytes") == size


@given(st.text())
def test_any_text_is_a_duration_and_a_size_or_a_value_error(text: str) -> None:
    for parse in (parse_duration, parse_size):
        with contextlib.suppress(ValueError):
            assert parse(text) >= 0


# --- wrong values --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("checkpoint_dir", "", "a path or URL"),
        ("checkpoint_dir", None, "a path or URL"),
        ("checkpoint_interval", 0, "more than 0"),
        ("checkpoint_interval", "soon", "a duration"),
        ("checkpoint_interval", "5 fortnights", "a duration"),
        ("checkpoint_interval", True, "a duration"),
        ("checkpoint_interval", None, "a duration"),
        ("checkpoint_interval", float("nan"), "a duration"),
        ("min_pause", -1, "0 or more"),
        ("min_pause", timedelta(seconds=-1), "0 or more"),
        ("checkpoint_timeout", float("inf"), "more than 0"),
        ("max_concurrent_checkpoints", 0, "1 or more"),
        ("max_concurrent_checkpoints", 1.5, "a whole number"),
        ("tolerable_failed_checkpoints", -2, "-1: any number"),
        ("num_retained", 0, "1 or more"),
        ("num_retained", True, "a whole number"),
        ("on_cancel", "keep", '"retain" or "delete"'),
        ("checkpoint_every_batch", "yes", "true or false"),
        ("incremental", 1, "true or false"),
        ("state_backend", "redis", '"rocksdb" or "heap"'),
        ("state_memory", "12kb", "at least 1mb"),
        ("state_memory", "1 zb", "a size"),
        ("state_memory", 1.5, "a size"),
        ("batch_memory", 0, "at least 1 bytes"),
        ("rocksdb", 7, "a profile (default, spinning-disk, spinning-disk-high-memory, ssd)"),
        ("rocksdb_factory", 7, "a function"),
        ("rocksdb_factory", "org.example.MyOptionsFactory", "module:function"),
        ("rocksdb_factory", "tuning:", "module:function"),
        ("snapshot_compression", "gzip", '"none", "snappy", "lz4" or "zstd"'),
        ("parallelism", 0, "from 1 to 32768, or None"),
        ("max_parallelism", 32769, "from 1 to 32768"),
        ("max_parallelism", 0, "from 1 to 32768"),
        ("timer_service", "disk", '"heap" or "rocksdb"'),
        ("restart_strategy", "failure-rate", '"exponential-delay", "fixed-delay" or "none"'),
        ("restart_attempts", -2, "-1 or more"),
        ("restart_multiplier", 0.5, "1.0 or more"),
        ("restart_multiplier", "two", "a number"),
        ("bind_host", "", "a text"),
    ],
)
def test_a_wrong_value_names_the_option_the_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build(**{name: value})
    message = str(raised.value)
    assert message.startswith(f"{name} = {value!r} is not valid")
    assert allowed in message.partition("; allowed: ")[2]


def test_more_subtasks_than_key_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallelism = 9 is more than max_parallelism = 8"):
        Config(checkpoint_dir="ckpt", parallelism=9, max_parallelism=8)
    assert Config(checkpoint_dir="ckpt", parallelism=8, max_parallelism=8).parallelism == 8


def test_a_longest_pause_below_the_first_is_refused_where_it_matters() -> None:
    with pytest.raises(ConfigError, match=r"restart_max_delay = 1\.0 is less than restart_delay = 2.0"):
        Config(checkpoint_dir="ckpt", restart_delay="2s", restart_max_delay="1s")
    Config(checkpoint_dir="ckpt", restart_strategy="fixed", restart_delay="2s", restart_max_delay="1s")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("checkpoint_intervall", "checkpoint_interval"),
        ("checkpointDir", "checkpoint_dir"),
        ("backend", "state_backend"),
        ("max_paralellism", "max_parallelism"),
    ],
)
def test_an_unknown_option_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(UnknownOptionError, match=f"{wrong}.*nearest one is '{right}'"):
        build(**{wrong: 1})
    with pytest.raises(UnknownOptionError, match=f"{wrong}.*nearest one is '{right}'"):
        Config.from_mapping({**DIR, wrong: 1})


def test_an_unknown_option_is_reported_before_a_missing_one() -> None:
    with pytest.raises(UnknownOptionError):
        Config(chekpoint_dir="ckpt")  # type: ignore[call-arg]  # that it is refused is the point


@given(st.text())
def test_any_unknown_key_names_some_option(key: str) -> None:
    with pytest.raises(UnknownOptionError, match=r"(the nearest one is|here it is) '"):
        Config.from_mapping({**DIR, f"?{key}": "1"})  # no option begins like that


# --- Flink keys ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "name", "stored"),
    [
        ("state.checkpoints.dir", "hdfs:///checkpoints/", "checkpoint_dir", "hdfs:///checkpoints/"),
        ("execution.checkpointing.dir", "s3://b/c", "checkpoint_dir", "s3://b/c"),
        ("execution.checkpointing.interval", "30 s", "checkpoint_interval", 30.0),
        ("execution.checkpointing.interval", "10sec", "checkpoint_interval", 10.0),
        ("execution.checkpointing.interval", "60000", "checkpoint_interval", 60.0),
        ("execution.checkpointing.interval", 60000, "checkpoint_interval", 60.0),
        ("execution.checkpointing.timeout", "1 h", "checkpoint_timeout", 3600.0),
        ("execution.checkpointing.min-pause", "500 ms", "min_pause", 0.5),
        ("execution.checkpointing.max-concurrent-checkpoints", "3", "max_concurrent_checkpoints", 3),
        ("execution.checkpointing.tolerable-failed-checkpoints", "-1", "tolerable_failed_checkpoints", -1),
        ("state.checkpoints.num-retained", "20", "num_retained", 20),
        ("execution.checkpointing.num-retained", 5, "num_retained", 5),
        (
            "execution.checkpointing.externalized-checkpoint-retention",
            "DELETE_ON_CANCELLATION",
            "on_cancel",
            "delete",
        ),
        (
            "execution.checkpointing.externalized-checkpoint-retention",
            "RETAIN_ON_CANCELLATION",
            "on_cancel",
            "retain",
        ),
        ("state.backend", "filesystem", "state_backend", "heap"),
        ("state.backend.type", "hashmap", "state_backend", "heap"),
        ("state.backend.type", "rocksdb", "state_backend", "rocksdb"),
        (
            "state.backend",
            "org.apache.flink.contrib.streaming.state.EmbeddedRocksDBStateBackend",
            "state_backend",
            "rocksdb",
        ),
        (
            "state.backend",
            "org.apache.flink.runtime.state.hashmap.HashMapStateBackendFactory",
            "state_backend",
            "heap",
        ),
        ("taskmanager.memory.managed.size", "1gb", "state_memory", 1 << 30),
        ("state.backend.rocksdb.predefined-options", "FLASH_SSD_OPTIMIZED", "rocksdb", RocksDBOptions.profile("ssd")),
        ("state.backend.rocksdb.options-factory", "tuning:larger_blocks", "rocksdb_factory", "tuning:larger_blocks"),
        ("state.backend.incremental", "false", "incremental", False),
        ("execution.checkpointing.incremental", "TRUE", "incremental", True),
        ("state.backend.changelog.enabled", "true", "changelog", True),
        ("state.changelog.enabled", True, "changelog", True),
        ("dstl.dfs.base-path", "s3://b/log", "changelog_dir", "s3://b/log"),
        ("state.changelog.dstl.dfs.base-path", "s3://b/log", "changelog_dir", "s3://b/log"),
        ("dstl.dfs.upload.timeout", "2 s", "changelog_upload_timeout", 2.0),
        ("state.backend.changelog.periodic-materialize.interval", "3 min", "materialization_interval", 180.0),
        ("state.changelog.periodic-materialize.interval", "3 min", "materialization_interval", 180.0),
        ("state.backend.local-recovery", "true", "local_recovery", True),
        ("execution.state-recovery.from-local", "true", "local_recovery", True),
        ("execution.checkpointing.local-backup.enabled", "true", "local_recovery", True),
        ("taskmanager.state.local.root-dirs", "/data", "local_dir", "/data"),
        ("execution.checkpointing.snapshot-compression", "true", "snapshot_compression", "snappy"),
        ("execution.checkpointing.snapshot-compression", False, "snapshot_compression", "none"),
        ("parallelism.default", "4", "parallelism", 4),
        ("pipeline.max-parallelism", "1024", "max_parallelism", 1024),
        ("state.backend.rocksdb.timer-service.factory", "ROCKSDB", "timer_service", "rocksdb"),
        ("restart-strategy", "fixed-delay", "restart_strategy", "fixed-delay"),
        ("restart-strategy.type", "exponentialdelay", "restart_strategy", "exponential-delay"),
        ("restart-strategy", False, "restart_strategy", "none"),
        ("restart-strategy.fixed-delay.attempts", "7", "restart_attempts", 7),
        ("restart-strategy.fixed-delay.delay", "3 s", "restart_delay", 3.0),
        ("restart-strategy.exponential-delay.initial-backoff", "3 s", "restart_delay", 3.0),
        ("restart-strategy.exponential-delay.max-backoff", "5 min", "restart_max_delay", 300.0),
        ("restart-strategy.exponential-delay.backoff-multiplier", "1.5", "restart_multiplier", 1.5),
        ("restart-strategy.exponential-delay.reset-backoff-threshold", "1 h", "restart_reset_after", 3600.0),
        ("restart-strategy.exponential-delay.attempts-before-reset-backoff", "7", "restart_attempts", 7),
        ("heartbeat.timeout", "50000", "heartbeat_timeout", 50.0),
    ],
)
def test_flink_keys_set_our_options(key: str, value: object, name: str, stored: object) -> None:
    mapping = {key: value} if name == "checkpoint_dir" else {**DIR, key: value}
    assert getattr(Config.from_mapping(mapping), name) == stored


def test_the_changelog_settings_of_the_documents_are_taken() -> None:
    config = Config.from_mapping(
        {
            **DIR,
            "state.backend.changelog.enabled": "true",
            "state.backend.changelog.storage": "filesystem",
            "dstl.dfs.base-path": "/changelog",
        }
    )
    assert config.changelog
    assert config.changelog_dir == "/changelog"


def test_every_flink_key_belongs_to_one_option() -> None:
    keys = [key for option in (*OPTIONS.values(), *SETTINGS.values()) for key in option.keys]
    assert len(keys) == len(set(keys))
    assert not set(keys) & set(OPTIONS)


def test_our_names_count_seconds_where_flink_counts_milliseconds() -> None:
    assert Config.from_mapping({**DIR, "checkpoint_interval": "60"}).checkpoint_interval == 60.0
    assert Config.from_mapping({**DIR, "execution.checkpointing.interval": "60"}).checkpoint_interval == 0.06


def test_a_flink_value_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"execution.checkpointing.mode = 'AT_LEAST_ONCE'.*allowed: exactly_once"):
        Config.from_mapping({**DIR, "execution.checkpointing.mode": "AT_LEAST_ONCE"})
    Config.from_mapping({**DIR, "execution.checkpointing.mode": "EXACTLY_ONCE"})


def test_a_wrong_value_is_reported_under_the_key_that_was_written() -> None:
    with pytest.raises(
        ConfigError, match=r"^state.checkpoints.num-retained \(option num_retained\) = 'x' is not valid"
    ):
        Config.from_mapping({**DIR, "state.checkpoints.num-retained": "x"})


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("checkpointLocation", "checkpoint_dir"),
        ("checkpoint_location", "checkpoint_dir"),
        ("spark.sql.streaming.checkpointLocation", "checkpoint_dir"),
        ("processingTime", "batch_interval"),
        ("spark.sql.shuffle.partitions", "parallelism"),
    ],
)
def test_an_option_in_sparks_words_is_told_ours(word: str, ours: str) -> None:
    with pytest.raises(UnknownOptionError, match=rf"unknown option '{word}'; here it is '{ours}'$"):
        Config.from_mapping({word: "ckpt"})
    option: dict[str, Any] = {word: "ckpt"}
    with pytest.raises(UnknownOptionError, match=rf"here it is '{ours}'$"):
        Config(**option)


def test_an_unknown_flink_key_names_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match=r"'state.checkpoints.num-retained'"):
        Config.from_mapping({**DIR, "state.checkpoint.num-retaind": "1"})


def test_two_spellings_must_agree() -> None:
    both = {"state.checkpoints.num-retained": "2", "execution.checkpointing.num-retained": 2}
    assert Config.from_mapping({**DIR, **both}).num_retained == 2
    with pytest.raises(
        ConfigError, match=r"execution.checkpointing.num-retained = 2 and num_retained = 3 set the same"
    ):
        Config.from_mapping({**DIR, **both, "num_retained": 3})


@pytest.mark.parametrize(("strategy", "attempts"), [("fixed-delay", 3), ("exponential-delay", 9)])
def test_only_the_chosen_restart_strategys_settings_count(strategy: str, attempts: int) -> None:
    config = Config.from_mapping(
        {
            **DIR,
            "restart-strategy.fixed-delay.attempts": "3",
            "restart-strategy.exponential-delay.attempts-before-reset-backoff": "9",
            "restart-strategy.type": strategy,
        }
    )
    assert config.restart_attempts == attempts


def test_s3_keys_become_storage_options() -> None:
    config = Config.from_mapping(
        {
            **DIR,
            "s3.endpoint": "http://127.0.0.1:9000",
            "s3.access-key": "k",
            "s3.secret-key": "s",
            "s3.path.style.access": "true",
            "storage_options.region": "eu-west-1",
        }
    )
    assert config.storage_options == {
        "endpoint": "http://127.0.0.1:9000",
        "access_key_id": "k",
        "secret_access_key": "s",
        "virtual_hosted_style_request": "false",
        "region": "eu-west-1",
    }


# --- RocksDB -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "field", "stored"),
    [
        ("thread.num", "4", "background_jobs", 4),
        ("files.open", "-1", "open_files", -1),
        ("writebuffer.size", "32 mb", "write_buffer_bytes", 32 << 20),
        ("writebuffer.count", 5, "write_buffers", 5),
        ("writebuffer.number-to-merge", "2", "write_buffers_to_merge", 2),
        ("memory.write-buffer-ratio", "0.7", "write_buffer_share", 0.7),
        ("memory.partitioned-index-filters", "true", "partitioned_index_filters", True),
        ("block.blocksize", "16kb", "block_bytes", 16 << 10),
        ("block.metadata-blocksize", "8kb", "metadata_block_bytes", 8 << 10),
        ("bloom-filter.bits-per-key", "12.0", "bloom_bits_per_key", 12),
        ("bloom-filter.bits-per-key", 8.0, "bloom_bits_per_key", 8),
        ("use-bloom-filter", "false", "bloom_bits_per_key", 0),
        ("use-bloom-filter", True, "bloom_bits_per_key", 10),
        ("compaction.style", "LEVEL", "compaction", "level"),
        ("compaction.level.use-dynamic-size", False, "dynamic_level_bytes", False),
        ("compaction.level.max-size-level-base", "256mb", "level_base_bytes", 256 << 20),
        ("compaction.level.target-file-size-base", "64mb", "target_file_bytes", 64 << 20),
        (
            "compression.per.level",
            "NO_COMPRESSION;LZ4_COMPRESSION;ZSTD_COMPRESSION",
            "compression_per_level",
            ("none", "lz4", "zstd"),
        ),
        ("compression.per.level", ["SNAPPY_COMPRESSION"], "compression_per_level", ("snappy",)),
    ],
)
def test_flink_keys_set_fields_of_rocksdb(key: str, value: object, field: str, stored: object) -> None:
    config = Config.from_mapping({**DIR, f"state.backend.rocksdb.{key}": value})
    assert config.rocksdb == RocksDBOptions.of({field: stored})


def test_rocksdb_is_set_by_options_by_a_profile_or_by_a_mapping() -> None:
    options = RocksDBOptions(background_jobs=4, open_files=-1)
    assert Config(checkpoint_dir="ckpt", rocksdb=options).rocksdb == options
    assert Config(checkpoint_dir="ckpt", rocksdb="ssd").rocksdb == options
    assert Config(checkpoint_dir="ckpt", rocksdb={"background_jobs": 4, "open_files": "-1"}).rocksdb == options
    assert Config(checkpoint_dir="ckpt").rocksdb == RocksDBOptions()
    assert Config(checkpoint_dir="ckpt", rocksdb={"profile": "ssd", "block_bytes": "8kb"}).rocksdb == RocksDBOptions.of(
        {**PROFILES["ssd"], "block_bytes": 8192}
    )


def test_single_fields_go_over_a_profile(tmp_path: Path) -> None:
    expected = RocksDBOptions.of({"profile": "ssd", "open_files": 100, "block_bytes": 8192})
    flat = {
        **DIR,
        "rocksdb.open_files": 100,
        "state.backend.rocksdb.block.blocksize": "8kb",
        "state.backend.rocksdb.predefined-options": "FLASH_SSD_OPTIMIZED",
        "state.backend.rocksdb.memory.managed": "true",
    }
    assert Config.from_mapping(flat).rocksdb == expected
    file = tmp_path / "strandline.yaml"
    file.write_text("checkpoint_dir: c\nrocksdb:\n  profile: ssd\n  open_files: 100\n  block_bytes: 8kb\n")
    assert Config.load(file).rocksdb == expected


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"rocksdb": "sdd"}, "there is no profile 'sdd' of RocksDB; allowed: .*\"ssd\""),
        ({"rocksdb": {"profile": "sdd"}}, "there is no profile 'sdd'"),
        ({"rocksdb": {"open_file": 5}}, "unknown option 'rocksdb.open_file'.*'rocksdb.open_files'"),
        ({"rocksdb": {"open_files": 5}}, r"^rocksdb.open_files = 5 is not valid .*allowed: -1 \(all"),
        ({"rocksdb.open_files": 5}, "^rocksdb.open_files = 5 is not valid"),
        (
            {"state.backend.rocksdb.thread.num": "many"},
            r"^state.backend.rocksdb.thread.num \(option rocksdb.background_jobs\) = 'many' is not valid",
        ),
        ({"state.backend.rocksdb.compaction.style": "FIFO"}, 'rocksdb.compaction.* = \'FIFO\'.*"universal" or "level"'),
        ({"state.backend.rocksdb.use-bloom-filter": "maybe"}, "use-bloom-filter = 'maybe'.*true or false"),
        ({"state.backend.rocksdb.memory.managed": "false"}, "allowed: true"),
        ({"state.backend.rocksdb.thread.nums": 1}, "nearest one is 'state.backend.rocksdb.thread.num'"),
        ({"rocksdb.open_files": 50, "state.backend.rocksdb.files.open": 60}, "set the same option, rocksdb.open_files"),
        ({"rocksdb.write_buffers": 2, "rocksdb.write_buffers_to_merge": 2}, "less than rocksdb.write_buffers = 2"),
    ],
)
def test_a_wrong_setting_of_rocksdb_is_named(mapping: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_mapping({**DIR, **mapping})


def test_a_factory_is_a_function_or_names_one() -> None:
    config = Config(checkpoint_dir="ckpt", rocksdb_factory=build)
    assert config.rocksdb_factory is build
    assert config.to_mapping()["rocksdb_factory"] == f"{__name__}:build"
    named = Config(checkpoint_dir="ckpt", rocksdb_factory="package.tuning:build")
    assert Config.from_mapping(named.to_mapping()) == named


# --- files ---------------------------------------------------------------------------------------


def test_yaml_keys_may_be_flat_or_nested(tmp_path: Path) -> None:
    file = tmp_path / "strandline.yaml"
    file.write_text(
        """
        execution:
          checkpointing:
            interval: 5s
            num-retained: 3
        state.backend.changelog.enabled: true
        state:
          checkpoints.dir: s3://b/c
        restart-strategy: off
        parallelism: 4
        storage_options:
          region: eu-west-1
        """
    )
    assert Config.load(file) == Config(
        checkpoint_dir="s3://b/c",
        checkpoint_interval="5s",
        num_retained=3,
        changelog=True,
        restart_strategy="none",
        parallelism=4,
        storage_options={"region": "eu-west-1"},
    )


@pytest.mark.parametrize(
    "text",
    [
        "storage_options:\n  secret_access_key: hunter2: x\n",
        "storage_options:\n  secret_access_key: 'hunter2\n",
        "storage_options:\n  secret_access_key: *hunter2\n",
        "storage_options:\n  secret_access_key: !hunter2 x\n",
        "storage_options:\n  secret_access_key: @hunter2\n",
        "storage_options:\n  secret_access_key: [hunter2\n",
        "storage_options:\n  secret_access_key: hunter2\x01\n",
        "checkpoint_dir: c\nstorage_options:\n  secret_access_key: [hunter2]\n",
        "checkpoint_dir: c\nstorage_options: hunter2\n",
        "checkpoint_dir: c\ns3.secret-key: [hunter2]\n",
    ],
)
def test_the_error_for_a_bad_file_shows_no_secret(tmp_path: Path, text: str) -> None:
    file = tmp_path / "strandline.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        Config.load(file)
    assert "hunter2" not in "".join(traceback.format_exception(raised.value))


def test_the_error_for_a_bad_file_names_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "strandline.yaml"
    file.write_text("checkpoint_dir: c\nlocal_dir: a: b\n")
    with pytest.raises(ConfigError, match="look at line 2, column 13: mapping values are not allowed here"):
        Config.load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "checkpoint_dir is required"),
        ("- a\n- b\n", "holds no mapping"),
        ("a: [", "not valid YAML"),
        ("checkpoint_dir: c\nnum_retaind: 1\n", "nearest one is 'num_retained'"),
        ("checkpoint_dir: c\nrest:\n  port: 1\nrest.port: 2\n", "rest.port is set twice"),
        ("checkpoint_dir: c\nnum_retained: [1]\n", "num_retained = "),
    ],
)
def test_a_bad_file_is_named_in_the_error(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "strandline.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        Config.load(file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the config file .*nowhere.yaml"):
        Config.load(tmp_path / "nowhere.yaml")


# --- round trips ---------------------------------------------------------------------------------

texts = st.text(min_size=1).filter(str.strip)
positive = st.floats(1e-6, 1e9) | st.integers(1, 10**6) | st.integers(1, 10**6).map(lambda n: f"{n} ms")
configs = st.builds(
    Config,
    checkpoint_dir=texts,
    checkpoint_interval=positive | st.timedeltas(timedelta(seconds=1), timedelta(days=1)),
    min_pause=st.floats(0, 1e9),
    num_retained=st.integers(1, 1000),
    tolerable_failed_checkpoints=st.integers(-1, 1000),
    on_cancel=st.sampled_from(["retain", "delete", "DELETE_ON_CANCELLATION"]),
    batch_interval=st.none() | positive,
    state_backend=st.sampled_from(["heap", "rocksdb", "hashmap"]),
    state_memory=st.integers(1 << 20, 1 << 50) | st.integers(1, 4096).map(lambda n: f"{n}mb"),
    rocksdb=st.sampled_from(
        [*PROFILES, {"compression_per_level": ["none", "zstd"]}, RocksDBOptions(rate_limit_bytes=1 << 20)]
    ),
    incremental=st.booleans(),
    changelog=st.booleans(),
    changelog_dir=st.none() | texts,
    trusted_dirs=st.lists(texts, max_size=2),
    local_dir=st.none() | texts,
    snapshot_compression=st.sampled_from(["none", "snappy", "lz4", "zstd"]),
    parallelism=st.none() | st.integers(1, 128),
    max_parallelism=st.integers(128, 32768),
    restart_strategy=st.sampled_from(["exponential", "fixed", "none"]),
    restart_multiplier=st.floats(1, 100),
    storage_options=st.dictionaries(st.text(), st.text(), max_size=3),
)


@given(configs)
def test_a_config_comes_back_from_its_mapping(config: Config) -> None:
    mapping = config.to_mapping()
    assert Config.from_mapping(mapping) == config
    assert Config.from_mapping(json.loads(json.dumps(mapping))) == config
    assert config.replace() == config


@given(configs, st.integers(1, 100))
def test_replace_changes_one_option_and_no_other(config: Config, retained: int) -> None:
    changed = config.replace(num_retained=retained)
    assert changed.num_retained == retained
    assert changed.replace(num_retained=config.num_retained) == config


def test_replace_checks_like_the_constructor() -> None:
    config = Config(checkpoint_dir="ckpt")
    with pytest.raises(UnknownOptionError, match="num_retained"):
        config.replace(num_retaind=1)
    with pytest.raises(ConfigError, match="num_retained"):
        config.replace(num_retained=0)


def test_every_default_is_a_valid_value_that_reads_as_itself() -> None:
    for name, option in OPTIONS.items():
        if option.default is not REQUIRED:
            assert option.read(option.read(option.default)) == option.read(option.default), name


# --- the reference -------------------------------------------------------------------------------


def test_a_url_with_a_password_is_refused_and_the_password_not_shown() -> None:
    with pytest.raises(ConfigError, match="put it into storage_options") as raised:
        Config(checkpoint_dir="s3://me:hunter2@bucket/x")
    assert "hunter2" not in str(raised.value)


def test_the_reference_in_docs_is_up_to_date() -> None:
    file = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert file.read_text(encoding="utf-8") == reference_markdown(), (
        "write strandline.config.reference_markdown() to docs/configuration.md"
    )


def test_the_reference_has_a_row_for_every_option() -> None:
    rows = [line for line in reference_markdown().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*OPTIONS, *SETTINGS]
    assert all(row.count(" | ") == 4 for row in rows)


def test_every_option_belongs_to_one_group() -> None:
    grouped = [name for group in GROUPS.values() for name in group.names]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == set(OPTIONS)


def test_the_reference_has_a_heading_for_every_group() -> None:
    headings = [line.removeprefix("## ") for line in reference_markdown().splitlines() if line.startswith("## ")]
    assert headings[: len(GROUPS)] == list(GROUPS)


def test_help_shows_the_options_by_group_with_their_defaults() -> None:
    text = inspect.getdoc(Config)
    assert text is not None
    places = [text.index(f"\n{title}: ") for title in GROUPS]
    assert places == sorted(places)
    assert text.index("\n  changelog_upload_timeout (duration; default: 1s): ") > text.index("\nChangelog: ")
    assert "  checkpoint_dir (path; required): " in text
    assert all(f"\n  {name} (" in text for name in OPTIONS)


@pytest.mark.parametrize(
    ("written", "stored", "ports"),
    [
        (8081, 8081, range(8081, 8082)),
        ("8081", 8081, range(8081, 8082)),
        ("8081-8083", "8081-8083", range(8081, 8084)),
        (" 8081 - 8081 ", 8081, range(8081, 8082)),
        (0, 0, range(1)),
        (None, "off", None),
        ("OFF", "off", None),
        (False, "off", None),
    ],
)
@pytest.mark.parametrize("name", ["rest_port", "rest.port", "rest.bind-port"])
def test_a_server_has_one_port_or_a_range_or_is_off(
    name: str, written: object, stored: object, ports: range | None
) -> None:
    config = Config.from_mapping({**DIR, name: written})
    assert config.rest_port == stored
    assert ports_of(config.rest_port) == ports


@pytest.mark.parametrize("wrong", [-1, 65536, "0-9", "9-8", "8081-99999", "http", True, 1.5, "80,81"])
def test_a_wrong_port_says_what_is_allowed(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r'rest_port.*a range such as "8081-8130", or "off"'):
        Config.from_mapping({**DIR, "rest_port": wrong})


def test_the_names_of_a_proxy_are_names_without_a_scheme() -> None:
    assert build(rest_hosts="jobs.example.org").rest_hosts == ("jobs.example.org",)
    for wrong in (["https://jobs.example.org"], [""], [1], 7):
        with pytest.raises(ConfigError, match=r"rest_hosts.*without a scheme"):
            Config.from_mapping({**DIR, "rest_hosts": wrong})


def test_the_token_is_not_shown() -> None:
    config = build(rest_token="hunter2-hunter2", storage_options={"secret_access_key": "hunter2"})
    assert config.rest_token == "hunter2-hunter2"
    assert "hunter2" not in repr(config)
    for wrong in ("hunter2", "hunter2 hunter2"):
        with pytest.raises(ConfigError, match="rest_token") as raised:
            build(rest_token=wrong)
        assert "hunter2" not in str(raised.value)


def test_options_are_shown_without_secrets() -> None:
    config = build(rest_token="hunter2-hunter2", storage_options={"secret_access_key": "hunter2"}, num_retained=3)
    shown = config.shown()
    assert "hunter2" not in json.dumps(shown)
    assert shown.keys() == OPTIONS.keys() - {"rest_token", "storage_options"}
    assert (shown["num_retained"], shown["rest_port"]) == (3, "8081-8130")


@pytest.mark.parametrize("number", ["1e999", "9" * 400 + ".5gb", "9" * 5000, "1e999s", float("inf")])
@pytest.mark.parametrize("name", ["state_memory", "checkpoint_interval", "num_retained", "changelog_max_amplification"])
def test_a_number_beyond_all_bounds_is_a_config_error(name: str, number: str | float) -> None:
    with pytest.raises(ConfigError, match=name):
        Config.from_mapping({"checkpoint_dir": "/c", name: number})
