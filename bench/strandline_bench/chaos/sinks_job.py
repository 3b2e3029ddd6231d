"""The driver of `strandline chaos sinks`: a job into several targets, and what each of them must hold at the end.

A processor emits a row per key and batch, which is appended; an aggregation emits the same rows, of which an upsert
keeps the last one of every key. Both also go into Parquet. One input file is one batch, so a batch computation knows
every row.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow.parquet as pq

import strandline as sl
from strandline.errors import FencedError, StrandlineError
from strandline.sinks.names import commit_notes, dropped_rows, target_description
from strandline_bench.chaos.job import JOB, OUTPUT, SCHEMA, Place, Row, Sum
from strandline_bench.chaos.oracle import file_problems, files_below, output_problems
from strandline_bench.chaos.plan import Variant
from strandline_bench.targets import TARGETS, Target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CHANGES: Final = "changes"
"""The appended rows of the processor."""
NEWEST: Final = "newest"
"""The last row of every key, or, where there is no upsert, all rows of the aggregation."""
COLUMNS: Final = ("key", "n", "s")


class SinksPlace(Place):
    """The folders of one round, its job and its targets."""

    def __init__(self, folder: Path, seed: int, changelog: bool, targets: Mapping[str, Target]) -> None:
        super().__init__(folder, seed, Variant("plain", changelog, "parquet"))
        self.targets = targets
        self.totals = folder / "totals"

    def job(self, spark: SparkSession, config: sl.Config) -> sl.Job:
        job = sl.Job(JOB, spark, config)
        frame = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(self.input))
        keyed = job.source(frame).key_by("key")
        changes = keyed.process(Sum(), OUTPUT, uid="sums").sink(sl.ParquetSink(str(self.output)))
        totals = keyed.aggregate(n=sl.count(), s=sl.sum("x"), uid="totals").sink(sl.ParquetSink(str(self.totals)))
        for target in self.targets.values():
            changes.sink(target.sink(CHANGES))
            totals.sink(target.sink(NEWEST, "upsert" if target.upserts else "append"))
        return job

    def problems(self) -> Iterator[str]:
        """What differs from the batch computation, and what is left behind, after the last driver has ended."""
        expected = self.expected()
        yield from output_problems(self)
        found = [row for file in self.totals.glob("[!._]*.parquet") for row in rows_of(pq.read_table(file))]
        yield from differences("parquet, totals", Counter(found), expected)
        newest: dict[str, Row] = {}
        for row in sorted(expected, key=lambda row: row[1]):
            newest[row[0]] = row
        for name, target in self.targets.items():
            wanted = {CHANGES: expected, NEWEST: Counter(newest.values()) if target.upserts else expected}
            for table, rows in wanted.items():
                yield from self._table_problems(f"{name}, {table}", target, table, rows)
            yield from (f"{name}: left: {one}" for one in target.leftovers())
        for folder in (self.output, self.totals, self.checkpoints / JOB / "staged"):
            left = [
                path.relative_to(self.folder) for path in files_below(folder) if path.suffix in (".staged", ".arrow")
            ]
            if left:
                yield f"{len(left)} staged files are left, such as {min(left)}"
        places = [target.sink(table).place for target in self.targets.values() for table in (CHANGES, NEWEST)]
        yield from file_problems(self, set(notes_of_sinks(self.checkpoints, places)))

    def _table_problems(self, what: str, target: Target, table: str, expected: Counter[Row]) -> Iterator[str]:
        try:
            rows = rows_of(target.read(table))
        except StrandlineError as error:
            yield f"{what}: {error}"
            return
        yield from differences(what, Counter(rows), expected)
        if target.ordered:
            last: dict[str, int] = {}
            for key, n, _s in rows:
                if n <= last.get(key, 0):
                    yield f"{what}: of key {key}, count {n} comes after {last[key]}"
                    return
                last[key] = n


def notes_of_sinks(checkpoints: Path, places: Sequence[str]) -> Iterator[str]:
    """The files that sinks keep in the job's folder, beside those that checkpoints refer to."""
    for place in places:
        yield from (note(JOB, place) for note in (target_description, dropped_rows))
        for path in files_below(checkpoints / commit_notes(JOB, place)):
            yield path.relative_to(checkpoints).as_posix()


def rows_of(table: Any, columns: Sequence[str] = COLUMNS) -> list[Row]:
    """The rows of a table that a target gave."""
    if not table.num_rows:
        return []
    return [tuple(row.values()) for row in table.select(list(columns)).to_pylist()]


def differences(what: str, found: Counter[Row], expected: Counter[Row]) -> Iterator[str]:
    """The rows that are missing, and those that are wrong or twice."""
    missing, extra = expected - found, found - expected
    if missing:
        yield f"{what}: {missing.total()} of {expected.total()} rows are missing, such as {min(missing)}"
    if extra:
        yield f"{what}: {extra.total()} rows are wrong or twice, such as {min(extra)}"


def main() -> None:
    """Run the job until the file `enough` appears; then process what is left, and stop."""
    from strandline_bench.chaos.worker import session

    folder, seed, changelog, addresses, number = json.loads(sys.argv[1])
    home = Path(folder)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    targets = {name: TARGETS[name](home / name, address) for name, address in addresses.items()}
    place = SinksPlace(home, seed, changelog, targets)
    spark = session()

    def tell(event: str) -> None:
        with (home / f"driver-{number}.events").open("a") as events:
            events.write(event.replace("\n", " ") + "\n")

    started = False
    try:
        with place.job(spark, place.config({}, restart_attempts=-1)).start() as run:
            started = True
            tell("started")
            while not (home / "enough").exists() and not run.await_termination(0.1):
                continue
            run.process_all_available()
        tell("ended")
    except FencedError:
        tell("fenced")
    except StrandlineError as error:
        tell(f"{'died' if started else 'refused'} {type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - an error that is not ours is told, too
        tell(f"foreign {type(error).__name__}: {error}")
    spark.stop()


if __name__ == "__main__":
    main()
