"""Settings over those of a script: which job takes them, when, and what is said if none does."""

from __future__ import annotations

import pytest

from strandline.config import Config
from strandline.errors import ConfigError
from strandline.job.overlay import Overlaid, Overlay, StartArguments

CONFIG = Config(
    checkpoint_dir="ckpt",
    storage_options={"endpoint": "http://127.0.0.1:9000", "region": "here"},
    rocksdb={"profile": "ssd", "open_files": 100},
)


def test_without_settings_a_job_keeps_its_own() -> None:
    laid = Overlaid(Overlay())
    given = StartArguments("chk-1", 3, "claim", True)
    assert laid.config("visits", CONFIG) is CONFIG
    assert laid.start("visits", given) == given
    assert laid.untaken() is None


def test_settings_win_over_those_of_the_script() -> None:
    laid = Overlaid(Overlay(None, {"checkpoint_interval": "3s"}, "sp/1", 4, "claim", True))
    assert laid.config("visits", CONFIG).checkpoint_interval == 3.0
    assert laid.start("visits", StartArguments("chk-1", 2)) == StartArguments("sp/1", 4, "claim", True)
    assert laid.untaken() is None


def test_a_second_start_goes_on_and_does_not_go_back_to_the_savepoint() -> None:
    laid = Overlaid(Overlay(restore="sp/1", parallelism=4))
    assert laid.start("visits", StartArguments()).restore == "sp/1"
    assert laid.start("orders", StartArguments()).restore == "sp/1"
    assert laid.start("visits", StartArguments()) == StartArguments(None, 4)


def test_one_job_of_several_takes_the_settings() -> None:
    laid = Overlaid(Overlay("orders", {"checkpoint_interval": "3s"}, parallelism=4))
    assert laid.config("visits", CONFIG) is CONFIG
    assert laid.start("visits", StartArguments()) == StartArguments()
    assert "started no job 'orders'; it started visits; did you mean --job visits?" in str(laid.untaken())
    assert laid.start("orders", StartArguments()).parallelism == 4
    assert laid.untaken() is None


def test_settings_of_a_script_without_jobs_are_an_error() -> None:
    assert "started no job" in str(Overlaid(Overlay(parallelism=4)).untaken())


def test_single_settings_of_storage_and_rocksdb_leave_the_others() -> None:
    changed = CONFIG.with_mapping({"s3.endpoint": "http://127.0.0.1:9001", "rocksdb.open_files": "70"})
    assert changed.storage_options == {"endpoint": "http://127.0.0.1:9001", "region": "here"}
    assert changed.rocksdb.open_files == 70
    assert changed.with_mapping({"rocksdb.open_files": "100"}).rocksdb == CONFIG.rocksdb


def test_a_flink_key_replaces_the_option_of_the_script() -> None:
    changed = CONFIG.with_mapping({"execution.checkpointing.interval": "60000", "state.backend.type": "hashmap"})
    assert (changed.checkpoint_interval, changed.state_backend) == (60.0, "heap")
    with pytest.raises(ConfigError, match="checkpoint_interval"):
        CONFIG.with_mapping({"checkpoint_intervall": "3s"})
