"""The command line: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import strandline as sl
from strandline.admin.cli.options import storage_settings
from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.job_log import CheckpointRef, Start
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SourceLog,
    SourceLogPiece,
    SourcePosition,
    StateFile,
    SubtaskState,
    Times,
    encode,
)
from strandline.checkpoint.steps import StepDescription
from strandline.errors import ConfigError
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.storage import JobPaths
from strandline.storage.local import LocalStorage
from tests.admin.cli.commands import Ended, in_its_own_process, strandline
from tests.admin.cli.terminal import in_terminal
from tests.factories import checkpoint_metadata


def strandline_cli(*arguments: str | Path, code: int = 0) -> Ended:
    """Run the command in this process, in a terminal of a common width, and check its exit code."""
    return strandline(*arguments, code=code, columns=80)


def facts_of(*arguments: str | Path, code: int = 0) -> Any:
    return strandline_cli(*arguments, "--json", code=code).json


def test_version_prints_the_version_of_the_package() -> None:
    assert strandline_cli("version").stdout.strip() == sl.__version__
    assert strandline_cli("--version").stdout.strip() == sl.__version__


def test_help_names_every_command() -> None:
    text = strandline_cli("--help").stdout
    for command in ("demo", "bench", "chaos", "checkpoints", "version"):
        assert command in text
    assert " ".join(re.sub(r"[^\w()]+", " ", text).split()).count("(needs the repository)") == 3


def test_an_error_is_one_message_without_a_traceback() -> None:
    ended = in_its_own_process("demo", "--rows", "5", "--users", "6", code=1)
    assert ended.stdout == ""
    assert ended.stderr.strip() == "error: --rows 5 is less than --users 6: every user clicks at least once"


def test_debug_shows_the_traceback_of_an_error() -> None:
    assert "Traceback" in in_its_own_process("--debug", "demo", "--rows", "5", "--users", "6", code=1).stderr


def test_an_unknown_command_or_option_is_a_usage_error() -> None:
    assert "No such command" in strandline_cli("dmeo", code=2).stderr
    assert "No such option" in strandline_cli("demo", "--rowz", "5", code=2).stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_without_checkpoints_is_an_error_that_says_what_to_give(tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("something else")
    for place in (tmp_path, tmp_path / "missing"):
        text = strandline_cli("checkpoints", command, place, code=1).stderr
        assert str(place) in text
        assert "checkpoint_dir/job" in text
        assert "Traceback" not in text


def test_a_storage_option_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    assert "KEY=VALUE" in strandline_cli("checkpoints", "ls", tmp_path, "-o", "endpoint", code=1).stderr


@pytest.mark.parametrize("option", ["secret_access_key=hunter2", "endpoint=http://user:hunter2@host", "hunter2"])
def test_a_secret_among_the_arguments_is_refused_and_not_shown(tmp_path: Path, option: str) -> None:
    ended = strandline_cli("checkpoints", "ls", tmp_path, "-o", option, code=1)
    assert "hunter2" not in ended.stdout + ended.stderr
    assert "=@FILE" in ended.stderr or "KEY=VALUE" in ended.stderr


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("hunter2\n")
    assert storage_settings([f"secret_access_key=@{tmp_path / 'key'}", "region=x"]) == {
        "secret_access_key": "hunter2",
        "region": "x",
    }
    with pytest.raises(ConfigError, match="cannot read the file /not/there"):
        storage_settings(["secret_access_key=@/not/there"])
    with pytest.raises(ConfigError, match="/dev/zero has more than"):
        storage_settings(["secret_access_key=@/dev/zero"])


def test_a_terminal_does_not_obey_what_a_checkpoint_holds(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m[red]\r"
    states = ({"name": evil, "kind": b"\xff", "schema": evil, "key_schema": 1, "ttl_ms": evil}, {evil: evil})
    file = StateFile(evil, evil, False, FileHandle("x", 1, evil))
    subtask = SubtaskState(evil, 0, 0, 128, evil, True, (file,))
    offsets = f'v1\n{{}}\n{{"{evil}": 1}}\n{evil}'.encode()
    position = SourcePosition(
        1, {"offsets/1": offsets, "commits/1": b'v1\n{"nextBatchWatermarkMs":10000000000000000000000}'}
    )
    metadata = checkpoint_metadata(1, operators=(evil,), subtasks=(subtask,), source=position)
    readable = SubtaskState(evil, 0, 0, 128, "heap", True, (), states)
    storage = LocalStorage(str(tmp_path / "ckpt"))
    store = JobLogStore(storage, PATHS)
    store.load()
    store.take_over()
    storage.write(PATHS.metadata(1), encode(metadata))
    store.complete(1, PATHS.metadata(1), 1, (1,), ())
    storage.write("savepoint/_metadata", encode(metadata))
    folder, savepoint = tmp_path / "ckpt" / "visits", tmp_path / "ckpt" / "savepoint"
    for command in (("checkpoints", "ls", folder), ("checkpoints", "show", folder), ("checkpoints", "verify", folder)):
        _assert_tame(command)
    storage.write(PATHS.metadata(1), encode(msgspec.structs.replace(metadata, subtasks=(readable,))))
    _assert_tame(("checkpoints", "show", folder))
    assert facts_of("checkpoints", "show", folder)["steps"][0]["states"][1] == {evil: evil}
    _assert_tame(("savepoint", savepoint))


def _assert_tame(command: tuple[str | Path, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "strandline.admin.cli.main", *map(str, command)], capture_output=True, timeout=280
    )
    told = (ended.stdout + ended.stderr).decode()
    assert told
    assert all(character.isprintable() or character == "\n" for character in told), told


# --- verify and gc, on a folder made by hand ---------------------------------------------------------

PATHS = JobPaths("visits")
FILES = {PATHS.shared("a"): b"a" * 3_000_000, PATHS.shared("b"): b"bb", PATHS.exclusive(2, "own"): b"own"}
LONG_AGO = time.time() - 86_400


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """A checkpoint_dir with checkpoints 1 and 2 of a job that share a file; and an orphan, a day old."""
    root = tmp_path / "by hand"
    storage = LocalStorage(str(root))
    store = JobLogStore(storage, PATHS)
    store.load()
    store.take_over()
    orphan = PATHS.shared("orphan")
    for path, data in {**FILES, orphan: b"left"}.items():
        storage.write(path, data)
    os.utime(root / orphan, (LONG_AGO, LONG_AGO))
    a, b, own = FILES
    for number, paths in ((1, [a]), (2, [a, b, own])):
        files = tuple(
            StateFile(
                path.replace("/", "-"),
                path,
                True,
                FileHandle(path, len(FILES[path]), f"crc32:{zlib.crc32(FILES[path]):08x}"),
            )
            for path in paths
        )
        subtask = SubtaskState("count", 0, 0, 128, "rocksdb", True, files)
        metadata = checkpoint_metadata(number, operators=("count",), subtasks=(subtask,))
        storage.write(PATHS.metadata(number), encode(metadata))
        store.complete(number, PATHS.metadata(number), number, tuple(range(1, number + 1)), ())
    return root


def test_ls_imports_neither_spark_nor_pandas_nor_arrow(by_hand: Path) -> None:
    code = """
import json, sys
from strandline.admin.cli import main
try:
    main.main()
finally:
    heavy = {"pyspark", "py4j", "pandas", "numpy", "pyarrow", "rocksdict", "yaml", "strandline_bench"}
    print(json.dumps(sorted(heavy & sys.modules.keys())), file=sys.stderr)
"""
    command = [sys.executable, "-c", code, "checkpoints", "ls", str(by_hand)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "chk-2 newest" in ended.stdout
    assert json.loads(ended.stderr) == []


def test_verify_takes_a_checkpoint_its_metadata_a_job_or_a_checkpoint_dir(
    by_hand: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = by_hand / "visits" / "chk-2"
    found = facts_of("checkpoints", "verify", by_hand)
    assert found == facts_of("checkpoints", "verify", by_hand / "visits")
    assert [(checkpoint["id"], checkpoint["files"], checkpoint["damage"]) for checkpoint in found] == [
        (1, 1, []),
        (2, 3, []),
    ]
    assert found[1]["bytes"] == sum(map(len, FILES.values()))
    assert found[1]["path"] == str(two)
    assert [checkpoint["files"] for checkpoint in facts_of("checkpoints", "ls", by_hand)] == [1, 3]
    monkeypatch.chdir(by_hand / "visits")
    for place in (two, f"{two}/", two / "_metadata", two.as_uri(), "chk-2", "chk-2/_metadata"):
        assert facts_of("checkpoints", "verify", place) == found[1:]
    assert (
        "✔ checkpoint 2 of job visits: 3 files, 3.0 MB, all whole"
        in strandline_cli("checkpoints", "verify", two).stdout
    )


def test_verify_reports_every_damaged_or_missing_file_of_every_checkpoint(by_hand: Path) -> None:
    a, b, own = FILES
    (by_hand / a).write_bytes(FILES[a][:-1] + b"x")
    (by_hand / b).write_bytes(b"b")
    (by_hand / own).unlink()
    one, two = facts_of("checkpoints", "verify", by_hand, code=1)
    assert [damage["path"] for damage in one["damage"]] == [a]
    problems = {damage["path"]: damage["problem"] for damage in two["damage"]}
    assert problems.keys() == FILES.keys()
    assert "checksum" in problems[a]
    assert problems[b] == "has 1 bytes instead of 2"
    assert problems[own] == "is missing"
    text = strandline_cli("checkpoints", "verify", by_hand / "visits" / "chk-2", code=1).stdout
    assert "✖ checkpoint 2" in text
    assert f"{own} is missing (operator count, subtask 0)" in text


def test_verify_reports_metadata_that_is_damaged_or_missing(by_hand: Path) -> None:
    metadata = by_hand / PATHS.metadata(2)
    metadata.write_bytes(metadata.read_bytes()[:-1])
    for place in (by_hand, metadata):
        last = facts_of("checkpoints", "verify", place, code=1)[-1]
        assert [damage["path"] for damage in last["damage"]] == [PATHS.metadata(2)]
        assert "truncated" in last["damage"][0]["problem"]
    metadata.unlink()
    assert facts_of("checkpoints", "verify", by_hand, code=1)[-1]["damage"][0]["problem"] == "is missing"
    text = strandline_cli("checkpoints", "verify", metadata.parent, code=1).stderr
    assert "no completed checkpoint" in text
    assert "checkpoints ls" in text


def test_verify_shows_a_bar_by_bytes_on_a_terminal_and_nothing_else_anywhere(by_hand: Path) -> None:
    slow = ["--storage-option", "bytes_per_second=900000", "--storage-option", "slow_pattern=^download"]
    command = ("checkpoints", "verify", f"faulty+file://{by_hand}", *slow)
    shown = in_terminal(*command)
    assert "verifying" in shown
    assert re.search(r"[0-9.]+/3\.0 MB", shown), shown
    assert "✔ checkpoint 2 of job visits" in shown
    ended = strandline_cli(*command[:2], str(by_hand), "--json")
    assert (ended.stderr, len(json.loads(ended.stdout))) == ("", 2)


def test_verify_needs_no_log_for_the_copy_of_a_checkpoint(by_hand: Path) -> None:
    shutil.rmtree(by_hand / "visits" / "log")
    assert facts_of("checkpoints", "verify", by_hand / "visits" / "chk-1")[0]["files"] == 1


def test_verify_reads_an_object_store_through_a_scratch_folder(by_hand: Path) -> None:
    """Any storage that is not a local folder is read by downloading."""
    from strandline.admin.verification import Verification
    from strandline.storage.object_store import ObjectStorage

    storage = ObjectStorage(by_hand.as_uri())
    assert not any(checkpoint.damage for checkpoint in Verification.of_job(storage, "visits").run())
    (by_hand / PATHS.shared("b")).unlink()
    found = Verification.of_checkpoint(storage, "visits", 2).run()
    assert [(damage.path, damage.problem) for damage in found[0].damage] == [(PATHS.shared("b"), "is missing")]


@pytest.mark.parametrize("command", ["ls", "show"])
def test_the_folder_of_a_checkpoint_is_told_the_folder_of_its_job(by_hand: Path, command: str) -> None:
    folder = by_hand / "visits"
    for place in (folder / "chk-2", folder / "chk-2" / "_metadata"):
        text = strandline_cli("checkpoints", command, place, code=1).stderr
        assert f"give the job's folder and the id: strandline checkpoints show {folder} 2" in text


def test_a_savepoint_has_its_own_command_which_shows_sizes_with_units(tmp_path: Path) -> None:
    handle = FileHandle("state", 1_500, "crc32:00000000")
    subtask = SubtaskState("count", 0, 0, 128, "rocksdb", False, (StateFile("state", "state", False, handle),))
    metadata = checkpoint_metadata(1, operators=("count",), subtasks=(subtask,), kind="savepoint")
    place = tmp_path / "savepoint-visits"
    LocalStorage(str(place)).write("_metadata", encode(metadata))
    text = strandline_cli("checkpoints", "ls", place, code=1).stderr
    assert f"is a savepoint; see what it holds with: strandline savepoint {place}" in text
    assert "1.5 kB" in strandline_cli("savepoint", place).stdout


def test_verify_takes_a_savepoint(tmp_path: Path) -> None:
    place = tmp_path / "savepoint-visits"
    storage = LocalStorage(str(place))
    handle = FileHandle("state", 3, f"crc32:{zlib.crc32(b'abc'):08x}")
    subtask = SubtaskState("count", 0, 0, 128, "rocksdb", False, (StateFile("state", "state", False, handle),))
    storage.write("_metadata", encode(checkpoint_metadata(4, subtasks=(subtask,), kind="savepoint")))
    storage.write("state", b"abc")
    for location in (place, place / "_metadata"):
        (found,) = facts_of("checkpoints", "verify", location)
        assert (found["id"], found["kind"], found["files"], found["damage"]) == (4, "savepoint", 1, [])
        assert found["path"] == str(place)
    assert "✔ savepoint 4 of job visits: 1 files" in strandline_cli("checkpoints", "verify", place).stdout
    storage.write("state", b"abd")
    assert "✖ savepoint 4" in strandline_cli("checkpoints", "verify", place, code=1).stdout


def test_ls_and_verify_count_the_same_files_of_any_checkpoint(tmp_path: Path) -> None:
    """Two parts of one packed file, a file inside `_metadata`, and a piece of a source's log."""
    storage = LocalStorage(str(tmp_path))
    packed, piece = PATHS.shared("packed"), PATHS.shared("piece")
    parts = tuple(
        StateFile(f"{n}.sst", f"{n}", True, FileHandle(packed, 2, f"crc32:{zlib.crc32(data):08x}", n * 2, 4))
        for n, data in enumerate((b"aa", b"bb"))
    )
    inline = StateFile("CURRENT", "current", False, None, b"MANIFEST")
    logged = SourceLog(
        0, (("0", 3),), (SourceLogPiece("0" * 64, 3, FileHandle(piece, 3, f"crc32:{zlib.crc32(b'log'):08x}")),)
    )
    metadata = checkpoint_metadata(
        1,
        operators=("count",),
        subtasks=(SubtaskState("count", 0, 0, 128, "rocksdb", True, (*parts, inline)),),
        source=SourcePosition(1, {}, (logged,)),
    )
    _complete(storage, metadata)
    storage.write(packed, b"aabb")
    storage.write(piece, b"log")
    (listed,) = facts_of("checkpoints", "ls", tmp_path)
    (verified,) = facts_of("checkpoints", "verify", tmp_path)
    assert listed["files"] == verified["files"] == facts_of("checkpoints", "show", tmp_path)["files"] == 2
    assert verified["damage"] == []


def test_show_gives_steps_states_schemas_offsets_and_watermark(tmp_path: Path) -> None:
    pages = {"type": "array", "elementType": "string", "containsNull": True}
    inner = {"type": "struct", "fields": [{"name": "x", "type": "decimal(10,2)", "nullable": True, "metadata": {}}]}
    counts = {"type": "map", "keyType": "string", "valueType": inner, "valueContainsNull": True}
    nested = json.dumps(
        {
            "type": "struct",
            "fields": [
                {"name": name, "type": kind, "nullable": True, "metadata": {}}
                for name, kind in (("n", "long"), ("pages", pages), ("counts", counts))
            ],
        }
    )
    states = (
        {"name": "total", "kind": "value", "schema": "n long", "key_schema": None, "ttl_ms": 60_000},
        {"name": "seen", "kind": "map", "schema": "at long", "key_schema": "page string", "ttl_ms": None},
        {"name": "nested", "kind": "list", "schema": nested, "key_schema": None, "ttl_ms": None},
        {"name": "odd", "kind": "list", "schema": '{"fields": [7]}', "key_schema": None, "ttl_ms": None},
    )
    offsets = b'v1\n{"batchWatermarkMs":5}\n{"logOffset":3}\n{"visits":{"0":17}}\n{"tick":12}'
    position = SourcePosition(1, {"offsets/1": offsets, "commits/1": b'v1\n{"nextBatchWatermarkMs":1700000000000}'})
    metadata = checkpoint_metadata(
        1,
        operators=("count",),
        subtasks=tuple(SubtaskState("count", n, n * 64, 64 + n * 64, "heap", False, (), states) for n in (0, 1)),
        source=position,
        steps=(StepDescription("count", "window", (("user", "string"),), (("ts", "timestamp"),), {"size_ms": 60_000}),),
    )
    _complete(LocalStorage(str(tmp_path)), metadata)
    shown = facts_of("checkpoints", "show", tmp_path)
    (step,) = shown["steps"]
    assert (step["uid"], step["parallelism"], step["states"]) == ("count", 2, list(states))
    assert step["specification"]["kind"] == "window"
    assert step["specification"]["keys"] == [["user", "string"]]
    assert step["specification"]["parameters"] == {"size_ms": 60_000}
    assert [source["offset"] for source in shown["sources"]] == [{"logOffset": 3}, {"visits": {"0": 17}}]
    assert shown["watermark_ms"] == 1_700_000_000_000
    text = strandline_cli("checkpoints", "show", tmp_path).stdout
    for expected in (
        "2023-11-14 22:13:20 UTC",
        '{"visits": {"0": 17}}',
        "step count: 0 B in 2 subtasks",
        "count: window by user string; time ts timestamp; size 1 min",
        "total: value of n long, time to live 1 min",
        "nested: list of n long, pages array<string>, counts map<string, struct<x decimal(10,2)>>",
        'odd: list of {"fields": [7]}',
        "seen: map of page string → at long",
    ):
        assert expected in text
    savepoint = tmp_path / "savepoint"
    LocalStorage(str(savepoint)).write("_metadata", encode(msgspec.structs.replace(metadata, kind="savepoint")))
    for name in ("steps", "sources", "watermark_ms"):
        assert facts_of("savepoint", savepoint)[name] == shown[name]
    assert "seen: map of page string → at long" in strandline_cli("savepoint", savepoint).stdout


def test_show_gives_the_watermark_of_every_step_and_the_earliest(tmp_path: Path) -> None:
    times = Times(0, (), {"early": 1_700_000_000_000, "late": 1_700_000_060_000})
    steps = ("early", "late", "timeless")
    subtasks = tuple(SubtaskState(uid, 0, 0, 128, "heap", False, ()) for uid in steps)
    position = SourcePosition(1, {}, times=times)
    _complete(LocalStorage(str(tmp_path)), checkpoint_metadata(1, operators=steps, subtasks=subtasks, source=position))
    shown = facts_of("checkpoints", "show", tmp_path)
    assert shown["watermark_ms"] == 1_700_000_000_000
    assert [step["watermark_ms"] for step in shown["steps"]] == [*times.steps.values(), None]
    assert "step late: 0 B in 1 subtasks, watermark 2023-11-14 22:14:20 UTC" in " ".join(
        strandline_cli("checkpoints", "show", tmp_path).stdout.split()
    )


def test_ls_marks_checkpoints_that_a_job_left_behind_when_it_went_back(by_hand: Path) -> None:
    store = JobLogStore(LocalStorage(str(by_hand)), PATHS)
    store.load()
    back = CheckpointRef(1, PATHS.metadata(1), 1)
    assert store.try_take_over(Start(back, (1,), (2,)))
    one, two = facts_of("checkpoints", "ls", by_hand)
    assert (one["latest"], one["left_behind"]) == (True, False)
    assert (two["latest"], two["left_behind"], two["owner"]) == (False, True, "user")
    text = strandline_cli("checkpoints", "ls", by_hand).stdout
    assert "chk-2 left behind" in text
    assert "went back to a checkpoint before" in text


def test_ls_tells_the_durable_epochs_behind_the_newest_checkpoint(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    _complete(storage, checkpoint_metadata(1, batch_id=batch_id(1, 4)))
    store = JobLogStore(storage, PATHS, run="one")
    store.load()
    for number in (3, 4, 5, 6):
        storage.write(PATHS.epochs(1, number), b"epochs")
    storage.write(PATHS.epochs(2, 5), b"of another generation")
    [one] = facts_of("checkpoints", "ls", tmp_path)
    assert (one["epoch_files"], one["epoch_bytes"]) == (2, 12)
    text = " ".join(strandline_cli("checkpoints", "ls", tmp_path).stdout.split())
    assert "durable epochs behind checkpoint 1: 2 files, 12 B; the next start goes on behind them" in text
    store.try_take_over(store.job_log.restore_own(CheckpointRef(1, PATHS.metadata(1), batch_id(1, 4)), claim=True))
    [one] = facts_of("checkpoints", "ls", tmp_path)
    assert one["epoch_files"] == 0, "the user has named the checkpoint"


def _complete(storage: LocalStorage, metadata: CheckpointMetadata) -> None:
    """Make the storage a checkpoint_dir with one completed checkpoint."""
    store = JobLogStore(storage, PATHS)
    store.load()
    store.take_over()
    number = metadata.checkpoint_id
    storage.write(PATHS.metadata(number), encode(metadata))
    store.complete(number, PATHS.metadata(number), metadata.batch_id, (number,), ())


def test_gc_wants_to_be_told_whether_to_list_or_to_delete(by_hand: Path) -> None:
    for choice in ([], ["--dry-run", "--yes"]):
        text = strandline_cli("checkpoints", "gc", by_hand, *choice, code=2).stderr
        assert "--dry-run lists" in text
        assert "--yes deletes" in text
    assert "does not go with" in strandline_cli("checkpoints", "gc", by_hand, "--dry-run", "--take-over", code=2).stderr
    text = strandline_cli("checkpoints", "gc", by_hand, "--yes", "--min-age", "old", code=2).stderr
    assert "--min-age 'old' is not a duration of 0 or more" in " ".join(text.split())
    assert "timedelta" not in text
    assert (by_hand / PATHS.shared("orphan")).is_file()


def test_gc_lists_orphans_then_deletes_them(by_hand: Path) -> None:
    orphan = PATHS.shared("orphan")
    listed = facts_of("checkpoints", "gc", by_hand / "visits", "--dry-run")
    assert [(file["path"], file["size"]) for file in listed["orphans"]] == [(orphan, 4)]
    assert (listed["deleted"], listed["orphan_bytes"], listed["retained"], listed["referenced"]) == (
        False,
        4,
        [1, 2],
        5,
    )
    text = strandline_cli("checkpoints", "gc", by_hand, "--job", "visits", "--dry-run").stdout
    assert orphan in text
    assert "1 orphans of 4 B found" in text
    assert (by_hand / orphan).is_file()
    assert "1 orphans of 4 B deleted" in strandline_cli("checkpoints", "gc", by_hand, "--yes").stdout
    assert not (by_hand / orphan).exists()
    assert facts_of("checkpoints", "gc", by_hand, "--yes")["orphans"] == []
    assert "no orphans\n" in strandline_cli("checkpoints", "gc", by_hand, "--dry-run").stdout
    assert not any(checkpoint["damage"] for checkpoint in facts_of("checkpoints", "verify", by_hand))


def test_gc_keeps_what_a_live_run_may_need_unless_it_takes_the_job_over(by_hand: Path) -> None:
    new = by_hand / PATHS.shared("new")
    new.write_bytes(b"new")
    kept = facts_of("checkpoints", "gc", by_hand, "--yes", "--min-age", "0")["kept"]
    assert kept["possibly_live"] == [PATHS.shared("new")]
    assert "--take-over" in strandline_cli("checkpoints", "gc", by_hand, "--dry-run").stdout
    assert "younger than --min-age 1h" in strandline_cli("checkpoints", "gc", by_hand, "--yes", "--take-over").stdout
    assert new.is_file()
    strandline_cli("checkpoints", "gc", by_hand, "--yes", "--take-over", "--min-age", "0s")
    assert not new.exists()


def test_gc_deletes_nothing_while_a_retained_checkpoint_cannot_be_read(by_hand: Path) -> None:
    (by_hand / PATHS.metadata(1)).unlink()
    text = strandline_cli("checkpoints", "gc", by_hand, "--yes", code=1).stderr
    assert "nothing was deleted" in text
    assert "chk-1/_metadata is missing" in text
    assert (by_hand / PATHS.shared("orphan")).is_file()
