"""Strandline: large keyed state and fast, incremental, fault-tolerant checkpoints for PySpark streaming jobs."""

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
from strandline.runtime.recoveries import Recovery
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
