"""`sl.read_state`: the states of processors as tables, from every kind of checkpoint and savepoint."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from msgspec.structs import replace

import strandline as sl
from strandline.admin.verification import Verification
from strandline.checkpoint.epochs import encode_epochs, segment_files
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import StateFile, decode, encode, file_paths, last_batch
from strandline.operators.process.process_operator import ProcessOperator
from strandline.state.coding.ddl import parse_schema
from strandline.state_reader.reader import Selection, StateTable, Wanted
from strandline.storage import open_storage
from tests.runtime.taskmanager.changelog.host import GROUPS, JOB, PARALLELISM
from tests.s3 import BUCKET, KEYS
from tests.state_reader.written import Written, group_of

INPUT = parse_schema("user string, n int, x long")
ROWS = [(f"u{at % 7}" if at % 7 else None, at % 3, at) for at in range(60)]
HOUR = 3_600_000


class Everything(sl.KeyedProcessor):
    """Has a state of every kind."""

    def open(self, context: Any) -> None:
        self.total = context.value_state("total", "count long, last long")
        self.seen = context.list_state("seen", "x long")
        self.by_x = context.map_state("by_x", "rest long", "x long, tags array<string>")
        self.recent = context.value_state("recent", "x long", ttl="1h")
        self.most = context.reducing_state("most", "x long", max)
        self.sums = context.aggregating_state(
            "sums", "s long", create=lambda: 0, add=lambda s, x: s + x, result=lambda s: s
        )

    def process(self, key: Any, rows: Any, context: Any) -> Any:
        for row in rows:
            count, _ = self.total.get() or (0, 0)
            self.total.update((count + 1, row.x))
            self.seen.append_value(row.x)
            self.by_x.put(row.x % 4, (row.x, [str(row.x), None]))
            self.recent.update(row.x)
            self.most.add(row.x)
            self.sums.add(row.x)
            context.register_timer(HOUR + row.x % 2)


def everything() -> ProcessOperator:
    output = parse_schema("user string")
    return ProcessOperator("all", Everything(), ["user", "n"], INPUT, output, time_mode="processing")


def rows_of(reader: Any) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in reader for row in batch.to_pylist()]


def by_key() -> dict[tuple[Any, ...], list[int]]:
    found: dict[tuple[Any, ...], list[int]] = {}
    for user, n, x in ROWS:
        found.setdefault((user, n), []).append(x)
    return found


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files, which is empty in the end."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def check_everything(path: str) -> None:
    """All states at `path` have what `ROWS` make of them."""
    expected = by_key()
    group = {key: group_of(key) for key in expected}

    def read(state: str) -> list[tuple[Any, ...]]:
        return sorted(rows_of(sl.read_state(path, "all", state)), key=repr)

    def wanted(rows: Any) -> list[tuple[Any, ...]]:
        return sorted(rows, key=repr)

    assert read("total") == wanted((*key, group[key], len(xs), xs[-1]) for key, xs in expected.items())
    assert read("seen") == wanted((*key, group[key], at, x) for key, xs in expected.items() for at, x in enumerate(xs))
    last = {(key, x % 4): x for key, xs in expected.items() for x in xs}
    assert read("by_x") == wanted((*key, group[key], rest, x, [str(x), None]) for (key, rest), x in last.items())
    assert read("most") == wanted((*key, group[key], max(xs)) for key, xs in expected.items())
    assert read("sums") == wanted((*key, group[key], sum(xs)) for key, xs in expected.items())
    hour = datetime(1970, 1, 1, 1, tzinfo=UTC)
    assert read("recent") == wanted((*key, group[key], xs[-1], hour) for key, xs in expected.items())
    times = {(key, HOUR + x % 2) for key, xs in expected.items() for x in xs}
    assert read("timers") == wanted((*key, group[key], datetime.fromtimestamp(t / 1000, UTC)) for key, t in times)


@pytest.mark.parametrize("kind", ["rocksdb", "heap"])
@pytest.mark.parametrize("changelog", [False, True])
def test_every_state_of_a_processor_is_a_table(tmp_path: Path, kind: str, changelog: bool) -> None:
    with Written(tmp_path, [everything()], kind, changelog=changelog) as job:
        job.run({"all": ROWS[:20]})
        job.run({"all": ROWS[20:40]})
        first = job.checkpoint()
        job.run({"all": ROWS[40:]})
        second = job.checkpoint()
        savepoints = [job.savepoint(canonical) for canonical in (True, False)]
        before = files_below(tmp_path / "durable") | files_below(tmp_path / "savepoints")
        for path in [second, f"{second}/_metadata", job.job, *savepoints]:
            check_everything(path)
        assert len(rows_of(sl.read_state(first, "all", "seen"))) == 40
        assert files_below(tmp_path / "durable") | files_below(tmp_path / "savepoints") == before


def test_duckdb_and_pandas_take_the_reader_as_it_is(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()]) as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
        totals = sl.read_state(path, "all", "total")
        seen = sl.read_state(path, "all", "seen")
        with duckdb.connect() as database:
            database.register("totals", totals)
            assert database.sql("SELECT sum(count), max(last) FROM totals").fetchall() == [(60, 59)]
            database.register("seen", seen)
            assert database.sql("SELECT count(*), sum(x) FROM seen WHERE x < 10").fetchall() == [(10, 45)]
        frame = sl.read_state(path, "all", "total").read_pandas()
        assert frame["count"].sum() == 60


def test_a_materialization_with_later_segments_is_one_state(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()], changelog=True) as job:
        job.run({"all": ROWS[:30]})
        for index in range(PARALLELISM):
            job.host.changelog.materializer.materialize(index)
        job.run({"all": ROWS[30:]})
        check_everything(job.checkpoint())


def test_segments_in_a_file_of_epochs_are_read_and_verified(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()], changelog=True) as job:
        for at in range(3):
            job.run({"all": ROWS[at * 20 : at * 20 + 20]})
        path = job.checkpoint()
        metadata = decode(job.storage.read(job.paths.metadata(1)), "here", Home(JOB, 1))
        segments = [
            (
                state.operator,
                state.subtask,
                last_batch(file),
                job.storage.read_range(handle.path, handle.offset, handle.size),
            )
            for state in metadata.subtasks
            for file in state.files
            if (handle := file.handle) is not None
        ]
        assert len(segments) > PARALLELISM
        data, entry = encode_epochs(JOB, 0, -1, max(one[2] for one in segments), metadata.source, segments, (), 0.0)
        place = job.paths.epochs(0, 0)
        job.storage.write(place, data)
        moved = segment_files(entry, place, len(data))
        states = [
            replace(state, files=tuple(file for *one, file in moved if one == [state.operator, state.subtask]))
            for state in metadata.subtasks
        ]
        job.storage.write(job.paths.metadata(1), encode(replace(metadata, subtasks=tuple(states))))
        check_everything(path)
        [verified] = Verification.of_job(job.storage, JOB).run()
        assert (verified.files, verified.damage) == (1, ())
        job.storage.write(place, data.replace(segments[0][3], bytes(len(segments[0][3]))))
        [verified] = Verification.of_job(job.storage, JOB).run()
        assert {one.path for one in verified.damage} == {place}


def test_keys_and_key_groups_are_read_alone(tmp_path: Path) -> None:
    expected = by_key()
    with Written(tmp_path, [everything()], "heap", changelog=True) as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
        for key in [("u1", 1), (None, 0), ("nobody", 0)]:
            found = rows_of(sl.read_state(path, "all", "seen", key=key))
            assert [row[-1] for row in found] == expected.get(key, [])
        some = rows_of(sl.read_state(path, "all", "total", key_groups=range(1, 2)))
        assert some
        assert {row[2] for row in some} == {1}
        parts = [rows_of(sl.read_state(path, "all", "total", key_groups=range(g, g + 1))) for g in range(GROUPS)]
        assert sum(map(len, parts)) == len(expected)
        with pytest.raises(sl.SchemaError, match="a key has 2 values"):
            sl.read_state(path, "all", "total", key="u1")


def test_the_schema_has_keys_key_group_and_state_columns(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()]) as job:
        job.run({"all": ROWS})
        schema = sl.read_state(job.checkpoint(), "all", "by_x").schema
        assert schema.names == ["user", "n", "key_group", "rest", "x", "tags"]
        assert schema.field("key_group").type == pa.int32()
        table = sl.read_state(job.job, "all", "by_x", key=("nobody", 1)).read_all()
        assert table.schema == schema
        assert table.num_rows == 0


def test_wrong_names_and_paths_say_what_there_is(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()]) as job:
        with pytest.raises(sl.CheckpointNotFoundError, match="no completed checkpoint yet"):
            sl.read_state(job.job, "all", "total")
        job.run({"all": ROWS})
        path = job.checkpoint()
        with pytest.raises(sl.StrandlineError, match="no operator 'al'; it has: all"):
            sl.read_state(path, "al", "total")
        with pytest.raises(
            sl.StrandlineError, match="no state 'totl'; it has: total, seen, by_x, recent, most, sums, "
        ):
            sl.read_state(path, "all", "totl")
        with pytest.raises(sl.StrandlineError, match="several states; name one: total, "):
            sl.read_state(path, "all")
        with pytest.raises(sl.CheckpointNotFoundError, match=r"give the job's folder, .*/durable/log$"):
            sl.read_state(path.replace("chk-1", "chk-7"), "all", "total")
        for nothing in (tmp_path, tmp_path / "nowhere", tmp_path / "durable", tmp_path / "a" / "b" / "chk-1"):
            with pytest.raises(sl.CheckpointNotFoundError, match="checkpoint"):
                sl.read_state(str(nothing), "all", "total")
            assert not (tmp_path / "nowhere").exists()
            assert not (tmp_path / "a").exists()


def test_a_damaged_or_missing_file_is_an_error_before_the_first_row(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()], "heap") as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
    victim = max((tmp_path / "durable").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    whole = victim.read_bytes()
    victim.chmod(0o600)
    victim.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(sl.DamagedFileError, match="is damaged"):
        sl.read_state(path, "all", "total")
    os.unlink(victim)
    with pytest.raises(sl.DamagedFileError, match="the job's folder stands for its newest checkpoint"):
        sl.read_state(path, "all", "total")


@pytest.mark.parametrize("changelog", [False, True])
def test_a_reader_that_is_closed_early_leaves_no_files(tmp_path: Path, scratch: Path, changelog: bool) -> None:
    with Written(tmp_path, [everything()], changelog=changelog) as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
        reader = sl.read_state(path, "all", "seen")
        assert list(scratch.iterdir())
        reader.read_next_batch()
        reader.close()
        assert list(scratch.iterdir()) == []
        unread = sl.read_state(path, "all", "seen")
        assert list(scratch.iterdir())
        unread.close()
        assert list(scratch.iterdir()) == []


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    class Clashing(sl.KeyedProcessor):
        def open(self, context: Any) -> None:
            self.state = context.value_state("timers", "user string, key_group long, User long")

        def process(self, key: Any, rows: Any, context: Any) -> Any:
            self.state.update((key[0], 1, 2))

    operator = ProcessOperator("all", Clashing(), ["user"], INPUT, parse_schema("user string"), time_mode="processing")
    with Written(tmp_path, [operator]) as job:
        job.run({"all": [("a", 1, 1)]})
        table = sl.read_state(job.checkpoint(), "all", "timers").read_all()
        assert table.column_names == ["user", "key_group", "user_2", "key_group_2", "User_3"]
        assert sl.read_state(job.job, "all", "__sl_timers").read_all().num_rows == 0


def test_state_in_an_object_store_is_read_with_storage_options(tmp_path: Path, s3_endpoint: str) -> None:
    options = {"endpoint": s3_endpoint, **KEYS}
    storage = open_storage(f"s3://{BUCKET}/{tmp_path.name}", options)
    with Written(tmp_path, [everything()], changelog=True, storage=storage) as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
        for place in (path, job.job, f"{path}/_metadata"):
            found = rows_of(sl.read_state(place, "all", "total", storage_options=options))
            assert len(found) == len(by_key())
        with pytest.raises(sl.CheckpointNotFoundError, match="there is no state to read at"):
            sl.read_state(f"{storage.url}/nothing", "all", "total", storage_options=options)


def test_files_elsewhere_are_read_only_if_the_place_is_named(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()]) as job:
        job.run({"all": ROWS})
        path = job.checkpoint()
    file = Path(path, "_metadata")
    metadata = decode(file.read_bytes(), "here", Home(JOB, 1))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "durable", elsewhere)

    def moved(one: StateFile) -> StateFile:
        assert one.handle is not None
        return replace(one, handle=replace(one.handle, path=f"{elsewhere}//{one.handle.path}"))

    subtasks = tuple(replace(state, files=tuple(map(moved, state.files))) for state in metadata.subtasks)
    file.chmod(0o600)
    file.write_bytes(encode(replace(metadata, subtasks=subtasks)))
    with pytest.raises(sl.MetadataError, match="leads elsewhere"):
        sl.read_state(path, "all", "total")
    found = rows_of(sl.read_state(path, "all", "total", changelog_dirs=[str(elsewhere)]))
    assert len(found) == len(by_key())


def test_a_checkpoint_that_its_job_drops_meanwhile_gives_way_to_the_newest(tmp_path: Path) -> None:
    with Written(tmp_path, [everything()], "heap") as job:
        job.run({"all": ROWS[:10]})
        first = job.checkpoint()
        wanted = Wanted(job.job, "all", "total")
        storage = job.storage
        reads = []

        def read(table: StateTable) -> Iterator[pa.RecordBatch]:
            reads.append(table.located.metadata.checkpoint_id)
            if len(reads) == 1:  # the job goes on while the first read is at work
                job.run({"all": ROWS[10:]})
                job.checkpoint()
                shutil.rmtree(first)
                storage.delete(file_paths(table.located.metadata))
            return table.fetched(Selection())

        _, rows = wanted.rows(read)
        assert reads == [1, 2]
        assert len(rows_of(rows)) == len(by_key())
        with pytest.raises(sl.CheckpointNotFoundError, match="its job has dropped it"):
            sl.read_state(first, "all", "total")
