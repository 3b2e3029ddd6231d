"""The driver of the soak: one run of a job under steady load, which tells every second how it stands."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

import strandline as sl
from strandline_bench.chaos.job import OUTPUT, SCHEMA, Sum
from strandline_bench.chaos.plan import HEARTBEAT

JOB: Final = "soak"
KEYS: Final = 2_000
ROWS: Final = 500
"""The rows of a file; a file arrives every second."""


def rows_of(seed: int, number: int) -> pa.Table:
    """The rows of input file `number`."""
    chance = np.random.default_rng((seed, number))
    keys = pa.array(chance.integers(KEYS, size=ROWS)).cast(pa.string())
    return pa.table({"key": keys, "x": pa.array(chance.integers(1000, size=ROWS), pa.int64())})


def write_input(folder: Path, seed: int, number: int) -> None:
    """Let an input file appear."""
    hidden = folder / f".{number:06d}.parquet"
    pq.write_table(rows_of(seed, number), hidden)
    hidden.rename(folder / f"{number:06d}.parquet")


def output_problems(home: Path, seed: int, files: int) -> list[str]:
    """How the output differs from the batch computation: no count of a key twice, and the last count and sum right.

    Which counts of a key there are depends on how Spark cuts the input into batches.
    """
    whole = pa.concat_tables([rows_of(seed, number) for number in range(files)])
    expected = whole.group_by("key").aggregate([("x", "sum"), ("x", "count")]).sort_by("key")
    found = ds.dataset([str(path) for path in (home / "out").glob("[!._]*.parquet")], format="parquet").to_table()
    problems = []
    if found.num_rows != found.group_by(["key", "n"]).aggregate([]).num_rows:
        problems.append("some counts of a key are there twice")
    last = found.group_by("key").aggregate([("n", "max"), ("s", "max")]).sort_by("key")
    for mine, theirs in (("n_max", "x_count"), ("s_max", "x_sum")):
        if last.column("key") != expected.column("key") or last.column(mine) != expected.column(theirs):
            wrong = pc.sum(last.column(mine)).as_py(), pc.sum(expected.column(theirs)).as_py()
            problems.append(f"{theirs} of all keys together is {wrong[0]}, not {wrong[1]}")
    return problems


def config(home: Path, changelog: bool) -> sl.Config:
    """The options of the soak."""
    return sl.Config(
        checkpoint_dir=str(home / "ckpt"),
        checkpoint_interval="2s",
        parallelism=2,
        state_memory="128mb",
        heartbeat_timeout=HEARTBEAT,
        restart_delay="100ms",
        restart_attempts=-1,
        num_retained=3,
        changelog=changelog,
        materialization_interval="30s",
        local_dir=str(home / "local"),
        spark_checkpoint_dir=str(home / "spark"),
    )


def main() -> None:
    """Run the job until the file `enough` appears; then process what is left, and stop."""
    from strandline_bench.chaos.worker import session

    home, changelog = Path(sys.argv[1]), sys.argv[2] == "changelog"
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spark = session()
    job = sl.Job(JOB, spark, config(home, changelog))
    frame = spark.readStream.schema(SCHEMA).parquet(str(home / "in"))
    result = job.source(frame).key_by("key").process(Sum(), OUTPUT, uid="sums")
    result.sink(sl.ParquetSink(str(home / "out")))
    run = job.start()
    while not (home / "enough").exists() and not run.await_termination(1.0):
        _tell(home, run)
    run.process_all_available()
    run.stop()
    _tell(home, run)
    spark.stop()


def _tell(home: Path, run: sl.JobRun) -> None:
    recoveries = [(one.time, one.duration_ms, one.kind) for one in run.recoveries()]
    completed = [one for one in run.checkpoints() if one.status == "completed"]
    facts: dict[str, Any] = {
        "at": time.time(),
        "recoveries": recoveries,
        "checkpoints": len(completed),
        "checkpoint_ms": completed[-1].end_to_end_ms if completed else None,
        "status": str(run.status),
    }
    (home / ".facts").write_text(json.dumps(facts))
    (home / ".facts").rename(home / "facts.json")


if __name__ == "__main__":
    main()
