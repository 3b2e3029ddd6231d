"""Compares a restore at another parallelism with a plain restore, the rescaling of a live run, and Spark.

Every restore is of the same checkpoint, from storage on the same disk; plain and rescaled ones take turns. Spark's peer
is an aggregation with the same keys and values whose state store is repartitioned, which it can do while the query is
stopped.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

import strandline as sl
from strandline.errors import ConfigError
from strandline_bench.report import machine
from strandline_bench.restoring import LoadedJob, restore_figures
from strandline_bench.running import session
from strandline_bench.spark_peer import peer_session
from strandline_bench.timing import Say
from strandline_bench.workload import SCHEMA, InputFile, offer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The size of the state, and the parallelism before and after."""

    keys: int = 2_000_000
    before: int = 2
    after: int = 4
    repeats: int = 3
    value_bytes: int = 100
    memory: str = "512mb"
    changelog: bool = False
    peer: bool = True

    def __post_init__(self) -> None:
        if min(self.keys, self.before, self.after, self.repeats, self.value_bytes) < 1:
            raise ConfigError("--keys, --from, --to, --repeats and --value-bytes must be at least 1")
        if self.before == self.after:
            raise ConfigError("--from and --to must differ")


def run(parameters: Parameters, say: Say, work_dir: Path | None = None) -> dict[str, Any]:
    """Measure, check the results, and return all figures as plain values. Raises `WrongResultError`."""
    if parameters.peer:
        check_peer()
    about = machine()
    home = Path(tempfile.mkdtemp(prefix="strandline-bench-", dir=work_dir))
    spark = session(2, parameters.keys // 100_000)
    try:
        config = sl.Config(
            checkpoint_dir=str(home / "checkpoints"),
            checkpoint_interval="1h",
            state_memory=parameters.memory,
            changelog=parameters.changelog,
            local_dir=str(home / "local"),
        )
        loaded = LoadedJob(spark, home, parameters.keys, parameters.value_bytes, config)
        files = loaded.files()
        figures = _restores(loaded, files, parameters, say)
        if parameters.peer:
            figures["spark"] = _spark(spark, home / "spark", files, parameters, say)
    finally:
        spark.stop()
        shutil.rmtree(home, ignore_errors=True)
    return {"parameters": asdict(parameters), "machine": about, **figures}


def check_peer() -> None:
    """Raises `ConfigError` if this release of Spark cannot repartition the state of a query."""
    if not hasattr(SparkSession, "_streamingCheckpointManager"):
        raise ConfigError(
            f"Spark {pyspark.__version__} cannot repartition state, which came with Spark 4.2; use --peer none"
        )


def _restores(loaded: LoadedJob, files: Sequence[InputFile], parameters: Parameters, say: Say) -> dict[str, Any]:
    run_ = loaded.job(parallelism=parameters.before).start()
    loaded.load(run_, files, say)
    run_.stop()
    times: dict[str, list[dict[str, float]]] = {"plain": [], "rescaled": []}
    for number in range(parameters.repeats):
        for name, parallelism in (("plain", parameters.before), ("rescaled", parameters.after)):
            run_ = loaded.job(parallelism=parallelism).start()
            times[name].append(restore_figures(run_))
            if name == "rescaled" and number == parameters.repeats - 1:
                loaded.change(run_)
                run_.stop()
            else:
                run_.cancel()
            say("restores", sum(map(len, times.values())), 2 * parameters.repeats)
    # The last of them has left a checkpoint of the new parallelism behind: the way back is another case.
    back = loaded.job(parallelism=parameters.before).start()
    merged = restore_figures(back)
    live = asdict(back.rescale(parameters.after))
    loaded.change(back)
    back.stop()
    plain, rescaled = (_median(times[name]) for name in ("plain", "rescaled"))
    return {
        "plain": plain,
        "rescaled": rescaled,
        "back": merged,
        "ratio": round(rescaled["duration_ms"] / plain["duration_ms"], 2),
        "ratio_back": round(merged["duration_ms"] / plain["duration_ms"], 2),
        "live": {name: round(value, 1) for name, value in live.items() if name != "time"},
        "restores": times,
        "verified": True,
    }


def _median(times: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in times) for name in times[0]}


def _spark(
    spark: SparkSession, home: Path, files: Sequence[InputFile], parameters: Parameters, say: Say
) -> dict[str, Any]:
    """Load an aggregation of the same keys and values, stop it, and have Spark repartition its state."""
    from pyspark.sql import functions as F

    peer = peer_session(spark)
    peer.conf.set("spark.sql.shuffle.partitions", parameters.before)
    offer(files, home / "in")
    checkpoint = str(home / "checkpoints")

    def forget(frame: DataFrame, _batch: int) -> None:
        frame.write.format("noop").mode("overwrite").save()

    source = peer.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(home / "in"))
    totals = source.groupBy("key").agg(F.count("*").alias("n"), F.last("value").alias("value"))
    query = (
        totals.writeStream.outputMode("update").foreachBatch(forget).option("checkpointLocation", checkpoint).start()
    )
    query.processAllAvailable()
    query.stop()
    say("Spark's state is loaded", 1, 1)
    began = time.monotonic()
    peer._streamingCheckpointManager.repartition(checkpoint, parameters.after)
    return {"repartition_ms": round((time.monotonic() - began) * 1000, 1), "query": "stopped meanwhile"}


def show(result: dict[str, Any], console: Console) -> None:
    """Print the figures of `run` as a table."""
    parameters = result["parameters"]
    before, after = parameters["before"], parameters["after"]
    table = Table(title=f"{parameters['keys']:,} keys restored", title_justify="left")
    for header in ("", "seconds", "× plain", "read locally (MB)", "read from storage (MB)"):
        table.add_column(header, justify="right" if header else "left")
    for text, name, ratio in (
        (f"{before} subtasks, as they were", "plain", 1.0),
        (f"{before} → {after} subtasks", "rescaled", result["ratio"]),
        (f"{after} → {before} subtasks", "back", result["ratio_back"]),
    ):
        one = result[name]
        table.add_row(
            text,
            f"{one['duration_ms'] / 1000:.2f}",
            f"{ratio:.2f}",
            f"{one['local_bytes'] / 1e6:,.1f}",
            f"{one['durable_bytes'] / 1e6:,.1f}",
        )
    console.print(table)
    live = result["live"]
    console.print(
        f"run.rescale({after}) while the run goes on: {live['pause_ms'] / 1000:.2f} s without rows "
        f"({live['checkpoint_ms'] / 1000:.2f} s for the checkpoint, {live['slots_ms'] / 1000:.2f} s for the slots)"
    )
    if "spark" in result:
        console.print(f"Spark's repartition of the stopped query: {result['spark']['repartition_ms'] / 1000:.2f} s")
