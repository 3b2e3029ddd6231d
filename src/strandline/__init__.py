"""Strandline: large keyed state and fast, incremental, fault-tolerant checkpoints for PySpark streaming jobs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
    from strandline.config import Config
    from strandline.config.rocksdb import RocksDBOptions
    from strandline.errors import StrandlineError
    from strandline.job import Job, KeyedStream, Stream, WindowedStream
    from strandline.job_run import JobRun
    from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
    from strandline.operators.aggregate.functions import (
        approx_count_distinct,
        avg,
        collect_list,
        count,
        first,
        last,
        max,
        min,
        sum,
    )
    from strandline.operators.process.arrow_context import ArrowContext
    from strandline.operators.process.arrow_processor import ArrowProcessor
    from strandline.operators.process.keyed_processor import KeyedProcessor
    from strandline.operators.process.process_context import ProcessContext
    from strandline.operators.windows.specs import session, sliding, tumbling
    from strandline.runtime.driver.recoveries import Recovery, Rescaling
    from strandline.sinks import ForeachBatchSink, ParquetSink

__version__ = "0.1.0"

__all__ = [
    "ArrowAggregate",
    "ArrowContext",
    "ArrowProcessor",
    "CheckpointStats",
    "Config",
    "ForeachBatchSink",
    "Job",
    "JobRun",
    "KeyedProcessor",
    "KeyedStream",
    "ParquetSink",
    "ProcessContext",
    "Recovery",
    "Rescaling",
    "RocksDBOptions",
    "StrandlineError",
    "Stream",
    "SubtaskStats",
    "WindowedStream",
    "approx_count_distinct",
    "avg",
    "collect_list",
    "count",
    "first",
    "last",
    "max",
    "min",
    "session",
    "sliding",
    "sum",
    "tumbling",
]

_HOMES = {
    "CheckpointStats": "strandline.checkpoint.stats",
    "SubtaskStats": "strandline.checkpoint.stats",
    "Config": "strandline.config",
    "StrandlineError": "strandline.errors",
    "Job": "strandline.job",
    "KeyedStream": "strandline.job",
    "Stream": "strandline.job",
    "WindowedStream": "strandline.job",
    "JobRun": "strandline.job_run",
    "approx_count_distinct": "strandline.operators.aggregate.functions",
    "avg": "strandline.operators.aggregate.functions",
    "collect_list": "strandline.operators.aggregate.functions",
    "count": "strandline.operators.aggregate.functions",
    "first": "strandline.operators.aggregate.functions",
    "last": "strandline.operators.aggregate.functions",
    "max": "strandline.operators.aggregate.functions",
    "min": "strandline.operators.aggregate.functions",
    "sum": "strandline.operators.aggregate.functions",
    "ArrowAggregate": "strandline.operators.aggregate.arrow_aggregate",
    "ArrowContext": "strandline.operators.process.arrow_context",
    "ArrowProcessor": "strandline.operators.process.arrow_processor",
    "KeyedProcessor": "strandline.operators.process.keyed_processor",
    "ProcessContext": "strandline.operators.process.process_context",
    "session": "strandline.operators.windows.specs",
    "sliding": "strandline.operators.windows.specs",
    "tumbling": "strandline.operators.windows.specs",
    "Recovery": "strandline.runtime.driver.recoveries",
    "Rescaling": "strandline.runtime.driver.recoveries",
    "ForeachBatchSink": "strandline.sinks",
    "ParquetSink": "strandline.sinks",
    "RocksDBOptions": "strandline.config.rocksdb",
}
"""Where each name lives. It is imported when it is first asked for: the processes of a run import this package, too,
and a slot that need not load all of it, and pandas, is back sooner after a failure."""


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
