"""Where the rows of a stream go: one module for each kind of target, and `base.py` for what all of them promise.

Jobs, the driver, slots and Spark's tasks import this room. It imports decisions and storage, and nothing of the
runtime. Its names here are for authors of sinks; users of sinks find theirs in `strandline`.
"""

from strandline.sinks.base import ExactlyOnceSink, SinkCommit, SinkContext, SinkStart, SinkTakeover, SinkTarget, Stager
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.staging import ArrowStager, StagingArea, rows_of
from strandline.sinks.upserts import last_rows, upsert_keys

__all__ = [
    "ArrowStager",
    "ExactlyOnceSink",
    "MarkedTarget",
    "Marker",
    "SinkCommit",
    "SinkContext",
    "SinkStart",
    "SinkTakeover",
    "SinkTarget",
    "Stager",
    "StagingArea",
    "last_rows",
    "rows_of",
    "upsert_keys",
]
