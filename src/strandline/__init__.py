"""Strandline: large keyed state and fast, incremental, fault-tolerant checkpoints for PySpark streaming jobs."""

from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
from strandline.config import Config
from strandline.errors import StrandlineError
from strandline.job import Job, JobRun, KeyedStream, Stream
from strandline.operators.aggregate import avg, count, max, min, sum
from strandline.operators.process import KeyedProcessor
from strandline.sinks import ForeachBatchSink, ParquetSink

__version__ = "0.1.0"

__all__ = [
    "CheckpointStats",
    "Config",
    "ForeachBatchSink",
    "Job",
    "JobRun",
    "KeyedProcessor",
    "KeyedStream",
    "ParquetSink",
    "StrandlineError",
    "Stream",
    "SubtaskStats",
    "avg",
    "count",
    "max",
    "min",
    "sum",
]
