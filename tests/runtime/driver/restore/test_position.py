"""The position in the input: taken out of Spark's checkpoint folder and put into a fresh one, for any source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from strandline.checkpoint.metadata import FileHandle, SourcePosition
from strandline.errors import CheckpointError, IncompatibleCheckpointError
from strandline.runtime.driver.restore import position as positions
from strandline.runtime.driver.restore.position import seed
from strandline.runtime.driver.restore.source_logs import SourceLogs

COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'


def offsets(*sources: object) -> bytes:
    """An entry of Spark's offset log; a file source gives its log offset, others their own JSON."""
    lines = ["v1", json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": 5, "conf": {}})]
    lines += ["-" if source is None else json.dumps(source) for source in sources]
    return "\n".join(lines).encode()


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def capture(folder: Path, batch: int, places: Sequence[int] = ()) -> SourcePosition:
    """The position with all logs of its sources among its files."""
    folders = {source: number for number, source in enumerate(dict.fromkeys(places))}
    logs = SourceLogs(folder, folders, _no_upload, None)
    return logs.store(positions.capture(folder, batch, places), whole=True)[0]


def _no_upload(_data: bytes) -> FileHandle:
    raise AssertionError("a whole log is not uploaded")


def entries(*names: str) -> dict[str, bytes]:
    return {f"sources/0/{name}": f"v1\n{name}".encode() for name in names}


def test_the_first_batch_has_no_commit_yet(tmp_path: Path) -> None:
    write(tmp_path, {"metadata": b"{}", "offsets/0": offsets({"logOffset": 0}), **entries("0")})
    position = capture(tmp_path, 0)
    assert position.batch == 0
    assert position.files == {"offsets/0": offsets({"logOffset": 0}), "commits/0": COMMIT, "sources/0/0": b"v1\n0"}


def test_a_batch_carries_the_two_last_offsets_and_the_commit_before_it(tmp_path: Path) -> None:
    commit = b'v1\n{"nextBatchWatermarkMs":7}'
    write(tmp_path, {f"offsets/{n}": offsets({"logOffset": n}) for n in range(5)})
    write(tmp_path, {f"commits/{n}": commit for n in range(3)})
    write(tmp_path, entries("0", "1", "2", "3", "4"))
    position = capture(tmp_path, 3)
    assert {name for name in position.files if not name.startswith("sources")} == {
        "offsets/2",
        "offsets/3",
        "commits/3",
    }
    assert position.files["commits/3"] == commit
    assert {name for name in position.files if name.startswith("sources")} == set(entries("0", "1", "2", "3"))


def test_files_found_for_the_next_batch_are_left_out_from_the_last_compacted_entry_on(tmp_path: Path) -> None:
    names = [str(n) for n in range(9)] + ["9.compact"] + [str(n) for n in range(10, 19)] + ["19.compact", "20"]
    write(tmp_path, entries(*names))
    write(tmp_path, {f"offsets/{n}": offsets({"logOffset": n}) for n in (11, 12, 19)})
    assert {n for n in capture(tmp_path, 12).files if n.startswith("sources")} == set(
        entries("9.compact", "10", "11", "12")
    )
    assert {n for n in capture(tmp_path, 19).files if n.startswith("sources")} == set(entries("19.compact"))


def test_hidden_checksum_files_stay_behind(tmp_path: Path) -> None:
    write(tmp_path, {"offsets/0": offsets({"logOffset": 0}), **entries("0", ".0.crc"), "offsets/.0.crc": b"x"})
    assert not any(".crc" in name for name in capture(tmp_path, 0).files)


def test_a_source_that_counts_keeps_its_own_files(tmp_path: Path) -> None:
    """The rate source writes its start time once, under a name that looks like a log entry."""
    write(tmp_path, {"offsets/4": offsets(17), "sources/0/0": b"v1\n1700000000000"})
    assert capture(tmp_path, 4).files["sources/0/0"] == b"v1\n1700000000000"


def test_several_sources_each_by_their_own_offset(tmp_path: Path) -> None:
    write(tmp_path, {"offsets/2": offsets({"logOffset": 0}, 17, None, {"topic": {"0": 5}}, {"logOffset": 1})})
    for number in range(5):
        write(tmp_path, {f"sources/{number}/{name}": b"v1" for name in ("0", "1", "2")})
    kept = {name for name in capture(tmp_path, 2).files if name.startswith("sources")}
    assert kept == {
        "sources/0/0",
        *(f"sources/{number}/{name}" for number in (1, 2, 3) for name in (0, 1, 2)),
        "sources/4/0",
        "sources/4/1",
    }


def test_a_source_that_is_read_twice_has_one_line_and_the_plan_may_change(tmp_path: Path) -> None:
    """Source 1 is read first, and twice; then the other way round, and source 0 three times."""
    tick = {"tick": 9}
    write(tmp_path / "old", {"offsets/5": offsets({"logOffset": 4}, {"logOffset": 4}, {"logOffset": 1}, tick)})
    write(tmp_path / "old", {f"sources/0/{n}": b"one" for n in range(6)})
    write(tmp_path / "old", {f"sources/1/{n}": b"zero" for n in range(3)})
    position = capture(tmp_path / "old", 5, (1, 1, 0))
    assert position.files == {
        "offsets/5": offsets({"logOffset": 1}, {"logOffset": 4}, tick),
        "commits/5": COMMIT,
        **{f"sources/0/{n}": b"zero" for n in range(2)},
        **{f"sources/1/{n}": b"one" for n in range(5)},
    }
    seed(position, tmp_path / "same", ticks=True, places=(1, 1, 0))
    assert capture(tmp_path / "same", 5, (1, 1, 0)) == position
    seed(position, tmp_path / "new", ticks=False, places=(0, 1, 0, 0))
    seeded = read(tmp_path / "new")
    zero, one = {"logOffset": 1}, {"logOffset": 4}
    assert seeded["offsets/5"] == offsets(zero, one, zero, zero)
    assert {name for name, data in seeded.items() if data == b"one"} == {f"sources/1/{n}" for n in range(5)}
    without_tick = {**position.files, "offsets/5": offsets(zero, one)}
    assert capture(tmp_path / "new", 5, (0, 1, 0, 0)).files == without_tick
    with pytest.raises(IncompatibleCheckpointError, match="positions of 2 sources, the job reads 1"):
        seed(position, tmp_path / "other", ticks=False, places=(0, 0))


def test_a_source_without_files_is_fine(tmp_path: Path) -> None:
    write(tmp_path, {"offsets/0": offsets({"topic": {"0": 5}})})
    assert set(capture(tmp_path, 0).files) == {"offsets/0", "commits/0"}


def test_a_batch_that_spark_does_not_know_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, {"offsets/0": offsets(1)})
    with pytest.raises(CheckpointError, match="no entry for batch 1"):
        capture(tmp_path, 1)


def test_what_was_captured_can_be_seeded_and_captured_again(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, {f"offsets/{n}": offsets({"logOffset": n}, n * 10) for n in (6, 7, 8)})
    write(old, {f"commits/{n}": COMMIT for n in (6, 7)})
    write(old, {**entries("5", "6", "7", "8"), "sources/1/0": b"start"})
    before = read(old)
    position = capture(old, 7)
    seed(position, new, ticks=False)
    assert read(old) == before
    seeded = read(new)
    assert len(json.loads(seeded.pop("metadata"))["id"]) == 36
    assert seeded == position.files
    # Spark has written nothing yet, and the same position is still there: a run that dies at once loses nothing.
    assert capture(new, 7).files == position.files


def test_two_seeds_are_two_queries(tmp_path: Path) -> None:
    write(tmp_path / "old", {"offsets/0": offsets(1)})
    position = capture(tmp_path / "old", 0)
    for name in ("a", "b"):
        seed(position, tmp_path / name, ticks=False)
    assert (tmp_path / "a/metadata").read_bytes() != (tmp_path / "b/metadata").read_bytes()
