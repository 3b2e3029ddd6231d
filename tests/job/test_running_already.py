"""A job that runs already is not started once more by somebody who does not want to take it over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from strandline.config import Config
from strandline.errors import StrandlineError
from strandline.job.overlay import Overlay
from strandline.job.running_already import check_not_running
from strandline.observe.facts import job_id
from strandline.observe.registration import entry_path, make_runs_folder, user_runs_folder
from strandline.observe.run_entries import RunEntry, encode_entry, own_entry
from strandline.runtime.driver.status import RunStatus
from strandline.runtime.liveness.processes import started_at
from tests.observe.generated import generated_facts


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this user that does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def register(entry: RunEntry) -> None:
    path = entry_path(make_runs_folder(user_runs_folder()), entry.run)
    path.touch(mode=0o600)
    path.write_bytes(encode_entry(entry))


def entry_of(process: subprocess.Popen[bytes], checkpoints: Path) -> RunEntry:
    return msgspec.structs.replace(
        own_entry(generated_facts(), "http://127.0.0.1:8081"),
        job="visits",
        job_id=job_id(str(checkpoints), "visits"),
        pid=process.pid,
        pid_started=started_at(process.pid),
        checkpoint_dir=str(checkpoints),
        status=RunStatus.RUNNING,
    )


def test_a_job_that_another_process_runs_is_refused_with_words_that_say_what_to_do(
    other: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    monkeypatch.setenv("STRANDLINE_RUNS_DIR", str(tmp_path / "runs"))
    config = Config(checkpoint_dir=str(tmp_path / "ckpt"))
    check_not_running("visits", config)
    register(entry_of(other, tmp_path / "ckpt"))
    with pytest.raises(
        StrandlineError, match=rf"runs already, in process {other.pid} .*strandline stop visits.*--take-over"
    ):
        check_not_running("visits", config)
    check_not_running("orders", config)
    check_not_running("visits", config.replace(checkpoint_dir=str(tmp_path / "elsewhere")))
    other.kill()
    other.wait()
    check_not_running("visits", config)


def test_a_refusal_to_take_over_is_no_setting_that_a_job_must_take() -> None:
    assert Overlay(take_over=False).empty
    assert not Overlay(take_over=False, parallelism=2).empty
