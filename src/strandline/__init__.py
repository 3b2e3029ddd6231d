"""Strandline: large keyed state and fast, incremental, fault-tolerant checkpoints for PySpark streaming jobs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
    from strandline.config import Config
    from strandline.errors import StrandlineError
    from strandline.job import Job, KeyedStream, Stream, WindowedStream
    from strandline.job_run import JobRun
    from strandline.operators.aggregates import (
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
    from strandline.operators.arrow_aggregate import ArrowAggregate
    from strandline.operators.arrow_process import ArrowContext, ArrowProcessor
    from strandline.operators.process import KeyedProcessor
    from strandline.operators.process_context import ProcessContext
    from strandline.operators.window_specs import session, sliding, tumbling
    from strandline.runtime.recoveries import Recovery, Rescaling
    from strandline.sinks import ForeachBatchSink, ParquetSink
    from strandline.state.rocksdb_options import RocksDBOptions

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
    "approx_count_distinct": "strandline.operators.aggregates",
    "avg": "strandline.operators.aggregates",
    "collect_list": "strandline.operators.aggregates",
    "count": "strandline.operators.aggregates",
    "first": "strandline.operators.aggregates",
    "last": "strandline.operators.aggregates",
    "max": "strandline.operators.aggregates",
    "min": "strandline.operators.aggregates",
    "sum": "strandline.operators.aggregates",
    "ArrowAggregate": "strandline.operators.arrow_aggregate",
    "ArrowContext": "strandline.operators.arrow_process",
    "ArrowProcessor": "strandline.operators.arrow_process",
    "KeyedProcessor": "strandline.operators.process",
    "ProcessContext": "strandline.operators.process_context",
    "session": "strandline.operators.window_specs",
    "sliding": "strandline.operators.window_specs",
    "tumbling": "strandline.operators.window_specs",
    "Recovery": "strandline.runtime.recoveries",
    "Rescaling": "strandline.runtime.recoveries",
    "ForeachBatchSink": "strandline.sinks",
    "ParquetSink": "strandline.sinks",
    "RocksDBOptions": "strandline.state.rocksdb_options",
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
