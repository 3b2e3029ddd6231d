"""All formats that are fuzzed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from strandline_bench.fuzz.checkpoint_formats import (
    JobLogEntry,
    Metadata,
    PackedFiles,
    Position,
    Savepoint,
    SnapshotNotes,
    SourceLogPieces,
)
from strandline_bench.fuzz.epoch_formats import Epochs
from strandline_bench.fuzz.format import Format
from strandline_bench.fuzz.state_formats import FullSnapshots, FullSnapshotsIntoRocksDB, RocksDBFiles, Segments
from strandline_bench.fuzz.text_formats import Columns, ConfigFiles, Schemas, Values

FORMATS: tuple[type[Format], ...] = (
    Metadata,
    Savepoint,
    Position,
    SourceLogPieces,
    PackedFiles,
    Epochs,
    JobLogEntry,
    SnapshotNotes,
    Segments,
    FullSnapshots,
    FullSnapshotsIntoRocksDB,
    RocksDBFiles,
    Values,
    Columns,
    Schemas,
    ConfigFiles,
)
NAMES = tuple(format.name for format in FORMATS)


def make_formats(folder: Path, names: Sequence[str] = NAMES) -> list[Format]:
    """The formats with these names and their samples, each in a folder of its own below `folder`."""
    made = []
    for number, kind in enumerate(kind for kind in FORMATS if kind.name in names):
        own = folder / str(number)
        own.mkdir(parents=True)
        made.append(kind(own))
    return made
