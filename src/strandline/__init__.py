"""Strandline: large keyed state and fast, incremental, fault-tolerant checkpoints for PySpark streaming jobs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strandline.version import VERSION

if TYPE_CHECKING:
    from strandline.checkpoint.stats import CheckpointStats, SubtaskStats
    from strandline.config import Config
    from strandline.config.rocksdb import RocksDBOptions
    from strandline.errors import (
        AlreadyExistsError,
        AuthenticationError,
        CheckpointError,
        CheckpointNotFoundError,
        ConfigError,
        DamagedFileError,
        DirectoryNotOursError,
        FencedError,
        HistoryError,
        IncompatibleCheckpointError,
        JobDefinitionError,
        JobFailedError,
        MarkerMovedError,
        MetadataError,
        NewerFormatError,
        NotFoundError,
        SchemaError,
        SegmentsLostError,
        SinkAheadError,
        SinkError,
        SinkFilesMissingError,
        SlotLostError,
        SourceDataLostError,
        SourceError,
        StaleAttemptError,
        StorageError,
        StorageFullError,
        StorageRefusedError,
        StrandlineError,
        UnknownOptionError,
        UnknownOutcomeError,
        UnsafeFolderError,
        UserCodeError,
    )
    from strandline.job.job import Job
    from strandline.job.keyed_stream import KeyedStream
    from strandline.job.listener import RunListener
    from strandline.job.opentelemetry_listener import OpenTelemetryListener
    from strandline.job.run import JobRun
    from strandline.job.stream import Stream
    from strandline.job.windowed_stream import WindowedStream
    from strandline.logs import configure_logging
    from strandline.observe.facts import Finding
    from strandline.operators.aggregate.arrow_aggregate import ArrowAggregate
    from strandline.operators.aggregate.functions import (
        Aggregate,
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
    from strandline.operators.process.arrow_context import ArrowContext, ArrowValueState
    from strandline.operators.process.arrow_processor import ArrowProcessor
    from strandline.operators.process.keyed_processor import KeyedProcessor
    from strandline.operators.process.process_context import ProcessContext
    from strandline.operators.windows.specs import SessionWindow, SlidingWindow, WindowSpec, session, sliding, tumbling
    from strandline.packages import packages
    from strandline.runtime.driver.figures import (
        RestoreFigures,
        Restoring,
        RunFigures,
        RunningBatch,
        RunProcesses,
        SinkFigures,
        SlotProcess,
        SourceFigures,
        StateMemory,
        StepFigures,
        TaskManagerProcess,
    )
    from strandline.runtime.driver.recoveries import Recovery, Rescaling
    from strandline.runtime.driver.status import RunStatus
    from strandline.runtime.protocol.figures import ChangelogFigures
    from strandline.sinks.base import Sink
    from strandline.sinks.callback import CallbackSink
    from strandline.sinks.delta.sink import DeltaSink
    from strandline.sinks.foreach_batch import ForeachBatchSink
    from strandline.sinks.iceberg.sink import IcebergSink
    from strandline.sinks.kafka.messages import per_row
    from strandline.sinks.kafka.sink import KafkaSink
    from strandline.sinks.parquet.sink import ParquetSink
    from strandline.sinks.postgres.sink import PostgresSink
    from strandline.sinks.sqlite import SQLiteSink
    from strandline.state.handles.folded import AggregatingState, ReducingState
    from strandline.state.handles.states import ListState, MapState, ValueState
    from strandline.state_reader.reader import read_state
    from strandline.state_reader.spark_source import register

__version__ = VERSION

__all__ = [
    "Aggregate",
    "AggregatingState",
    "AlreadyExistsError",
    "ArrowAggregate",
    "ArrowContext",
    "ArrowProcessor",
    "ArrowValueState",
    "AuthenticationError",
    "CallbackSink",
    "ChangelogFigures",
    "CheckpointError",
    "CheckpointNotFoundError",
    "CheckpointStats",
    "Config",
    "ConfigError",
    "DamagedFileError",
    "DeltaSink",
    "DirectoryNotOursError",
    "FencedError",
    "Finding",
    "ForeachBatchSink",
    "HistoryError",
    "IcebergSink",
    "IncompatibleCheckpointError",
    "Job",
    "JobDefinitionError",
    "JobFailedError",
    "JobRun",
    "KafkaSink",
    "KeyedProcessor",
    "KeyedStream",
    "ListState",
    "MapState",
    "MarkerMovedError",
    "MetadataError",
    "NewerFormatError",
    "NotFoundError",
    "OpenTelemetryListener",
    "ParquetSink",
    "PostgresSink",
    "ProcessContext",
    "Recovery",
    "ReducingState",
    "Rescaling",
    "RestoreFigures",
    "Restoring",
    "RocksDBOptions",
    "RunFigures",
    "RunListener",
    "RunProcesses",
    "RunStatus",
    "RunningBatch",
    "SQLiteSink",
    "SchemaError",
    "SegmentsLostError",
    "SessionWindow",
    "Sink",
    "SinkAheadError",
    "SinkError",
    "SinkFigures",
    "SinkFilesMissingError",
    "SlidingWindow",
    "SlotLostError",
    "SlotProcess",
    "SourceDataLostError",
    "SourceError",
    "SourceFigures",
    "StaleAttemptError",
    "StateMemory",
    "StepFigures",
    "StorageError",
    "StorageFullError",
    "StorageRefusedError",
    "StrandlineError",
    "Stream",
    "SubtaskStats",
    "TaskManagerProcess",
    "UnknownOptionError",
    "UnknownOutcomeError",
    "UnsafeFolderError",
    "UserCodeError",
    "ValueState",
    "WindowSpec",
    "WindowedStream",
    "approx_count_distinct",
    "avg",
    "collect_list",
    "configure_logging",
    "count",
    "first",
    "last",
    "max",
    "min",
    "packages",
    "per_row",
    "read_state",
    "register",
    "session",
    "sliding",
    "sum",
    "tumbling",
]

_NAMES = {
    "strandline.checkpoint.stats": "CheckpointStats SubtaskStats",
    "strandline.config": "Config",
    "strandline.config.rocksdb": "RocksDBOptions",
    "strandline.errors": "AlreadyExistsError AuthenticationError CheckpointError CheckpointNotFoundError "
    "ConfigError DamagedFileError DirectoryNotOursError FencedError "
    "HistoryError IncompatibleCheckpointError JobDefinitionError JobFailedError MarkerMovedError MetadataError "
    "NewerFormatError NotFoundError SchemaError SegmentsLostError SinkAheadError SinkError SinkFilesMissingError "
    "SlotLostError SourceDataLostError SourceError StaleAttemptError StorageError StorageFullError "
    "StorageRefusedError StrandlineError "
    "UnknownOptionError UnknownOutcomeError UnsafeFolderError UserCodeError",
    "strandline.job.job": "Job",
    "strandline.job.keyed_stream": "KeyedStream",
    "strandline.job.listener": "RunListener",
    "strandline.job.opentelemetry_listener": "OpenTelemetryListener",
    "strandline.job.run": "JobRun",
    "strandline.job.stream": "Stream",
    "strandline.job.windowed_stream": "WindowedStream",
    "strandline.observe.facts": "Finding",
    "strandline.logs": "configure_logging",
    "strandline.operators.aggregate.functions": "Aggregate approx_count_distinct avg collect_list count first last "
    "max min sum",
    "strandline.operators.aggregate.arrow_aggregate": "ArrowAggregate",
    "strandline.operators.process.arrow_context": "ArrowContext ArrowValueState",
    "strandline.operators.process.arrow_processor": "ArrowProcessor",
    "strandline.operators.process.keyed_processor": "KeyedProcessor",
    "strandline.operators.process.process_context": "ProcessContext",
    "strandline.operators.windows.specs": "SessionWindow SlidingWindow WindowSpec session sliding tumbling",
    "strandline.packages": "packages",
    "strandline.runtime.protocol.figures": "ChangelogFigures",
    "strandline.runtime.driver.figures": "RestoreFigures Restoring RunFigures RunProcesses RunningBatch SinkFigures "
    "SlotProcess SourceFigures StateMemory StepFigures TaskManagerProcess",
    "strandline.runtime.driver.recoveries": "Recovery Rescaling",
    "strandline.runtime.driver.status": "RunStatus",
    "strandline.sinks.base": "Sink",
    "strandline.sinks.delta.sink": "DeltaSink",
    "strandline.sinks.callback": "CallbackSink",
    "strandline.sinks.foreach_batch": "ForeachBatchSink",
    "strandline.sinks.kafka.messages": "per_row",
    "strandline.sinks.kafka.sink": "KafkaSink",
    "strandline.sinks.parquet.sink": "ParquetSink",
    "strandline.sinks.postgres.sink": "PostgresSink",
    "strandline.sinks.iceberg.sink": "IcebergSink",
    "strandline.sinks.sqlite": "SQLiteSink",
    "strandline.state.handles.folded": "AggregatingState ReducingState",
    "strandline.state.handles.states": "ListState MapState ValueState",
    "strandline.state_reader.reader": "read_state",
    "strandline.state_reader.spark_source": "register",
}
"""The modules of the public names. A module is imported when one of its names is first used: every process of a run
imports this package, and a slot that loads neither the driver nor pandas starts sooner after a failure."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
