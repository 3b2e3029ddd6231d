"""What is left of a process that is killed while it stages rows: halves of files, and folders on its local disk."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from strandline.sinks import local_scratch
from strandline.sinks.base import ExactlyOnceSink
from strandline.sinks.delta.sink import DeltaSink
from strandline.sinks.iceberg.sink import IcebergSink
from strandline.sinks.local_scratch import delete_abandoned, scratch_folder
from strandline.sinks.parquet.sink import ParquetSink
from strandline.sinks.sqlite import SQLiteSink
from strandline.storage.base import temporary_name
from strandline.testing.sink import SinkJob, a_context

KINDS = ("parquet", "delta", "iceberg", "sqlite")


def sink_of(kind: str, folder: Path) -> ExactlyOnceSink:
    catalogue = {"type": "sql", "uri": f"sqlite:///{folder}/c.db", "warehouse": f"file://{folder}/target"}
    sinks: dict[str, ExactlyOnceSink] = {
        "parquet": ParquetSink(str(folder / "target")),
        "delta": DeltaSink(str(folder / "target")),
        "iceberg": IcebergSink("sales.visits", catalogue),
        "sqlite": SQLiteSink(folder / "target.db", "visits"),
    }
    return sinks[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_staged_files_are_deleted_by_the_next_start(tmp_path: Path, kind: str) -> None:
    context = a_context(tmp_path / "checkpoints")
    job = SinkJob(sink_of(kind, tmp_path).bound(context), context)
    driver = job.start()
    (file,) = driver.stage([("a", 1)])
    (whole,) = tmp_path.rglob(Path(file.staged).name)
    half = whole.with_name(temporary_name(whole.name))
    others = whole.with_name(temporary_name(whole.name.replace("visits", "other")))
    shutil.copy(whole, half)
    shutil.copy(whole, others)
    job.start()
    assert not whole.exists()
    assert not half.exists()
    assert others.exists()
    again = job.start()
    (file,) = again.stage([("a", 2)])
    young = whole.with_name(temporary_name(Path(file.staged).name))
    young.parent.mkdir(exist_ok=True)
    young.touch()
    again.recover()
    assert young.exists()


HOLDER = """
import sys
from strandline.sinks.local_scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "rows").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder in `parent`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(parent)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_goes_with_its_block_and_that_of_a_killed_process_with_the_next_process(tmp_path: Path) -> None:
    killed, abandoned = holder(tmp_path)
    living, held = holder(tmp_path)
    assert (abandoned / "rows").exists()
    killed.kill()
    killed.wait()
    later, own = holder(tmp_path)
    assert not abandoned.exists()
    assert (held / "rows").exists()
    for process in (living, later):
        process.communicate("", timeout=30)
        assert process.returncode == 0
    assert not held.exists()
    assert not own.exists()


@pytest.mark.parametrize("refusal", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_does_not_stop_the_sink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    def flock(_handle: object, _how: int) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("fcntl.flock", flock)
        block = scratch_folder()
        folder = block.__enter__()
        (folder / "rows").touch()
    other, held = holder(tmp_path)  # locks were only short for a moment
    assert held.parent == folder.parent
    assert (folder / "rows").exists()
    block.__exit__(None, None, None)
    assert not folder.exists()
    other.communicate("", timeout=30)


def test_only_folders_that_look_like_ours_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "strandline-sink-file").touch()
    (tmp_path / "strandline-sink-new").mkdir()
    old = tmp_path / "strandline-sink-old"
    old.mkdir()
    long_ago = time.time() - 2 * local_scratch._WITHOUT_LOCK
    os.utime(old, (long_ago, long_ago))
    users = tmp_path / "strandline-sink-output"
    (users / "day=1").mkdir(parents=True)
    os.utime(users, (long_ago, long_ago))
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / ".lock").touch()
    (tmp_path / "strandline-sink-link").symlink_to(mine)
    delete_abandoned(tmp_path)
    assert not old.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine",
        "strandline-sink-file",
        "strandline-sink-link",
        "strandline-sink-new",
        "strandline-sink-output",
    ]


def test_a_folder_is_deleted_when_its_block_fails() -> None:
    with pytest.raises(ValueError, match="wrong"), scratch_folder() as folder:
        raise ValueError("wrong")
    assert not folder.exists()
