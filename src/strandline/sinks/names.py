"""The names of what sinks write: stagers name staged rows, and drivers recognize what lies in a staging folder.

A sink of files stages in its own folder, and publishes a file by giving it its final name. The rows of other sinks wait
in the job's checkpoint folder as Arrow files, and are deleted once the target has them.
"""

from __future__ import annotations

import hashlib
import re
import uuid

from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.errors import MetadataError
from strandline.storage import JobPaths

STAGING_FOLDER = "_strandline"
"""The folder of staged files inside the folder of a sink. Readers skip folders whose name begins with `_`."""

_UNIQUE = r"part-(?P<job>.+)-(?P<batch>\d{20})-[0-9a-f]{32}"

FINAL_NAME = re.compile(rf"{_UNIQUE}\.parquet")
"""Matches the names that `new_final_name` makes. The batch id tells the generation that wrote the file."""
WAITING_NAME = re.compile(rf"{_UNIQUE}\.arrow")
"""Matches the names of rows that wait in the job's checkpoint folder."""
EMPTY_NAME = re.compile(r"empty-(?P<job>.+)\.parquet")
"""Matches the names that `empty_name` makes."""
_PLACE = r"[0-9a-f]{16}"
"""Matches what `_hashed` makes."""
_PARTITION = re.compile(r"[^/=\x00-\x1f\x7f]+=[^/\x00-\x1f\x7f]*")
"""A folder of a partitioned table: `column=value`."""


def new_final_name(job: str, batch: int) -> str:
    """A name for a file that nobody else writes."""
    return f"{_new_name(job, batch)}.parquet"


def final_name(job: str, batch: int, unique: str) -> str:
    """The name of a file. `unique` are 32 hex digits that no other file has."""
    return f"{_name(job, batch, unique)}.parquet"


def empty_name(job: str) -> str:
    """The name of the job's file without rows. It sorts before the names of all files with rows."""
    return f"empty-{job}.parquet"


def staged_name(final: str) -> str:
    """The path of the file until it is published. All files are staged in one folder, also those of partitions."""
    return f"{STAGING_FOLDER}/{final.rpartition('/')[2]}.staged"


def waiting_area(job: str, place: str) -> str:
    """The folder, in the checkpoint directory, in which the rows of one sink wait."""
    return f"{JobPaths(job).staged_dir}/{_hashed(place)}"


def target_description(job: str, place: str) -> str:
    """Where, in the checkpoint directory, the driver tells tasks of the target of a sink, where tasks cannot ask it."""
    return f"{JobPaths(job).sinks_dir}/{_hashed(place)}.json"


def dropped_rows(job: str, place: str) -> str:
    """Where, in the checkpoint directory, the driver notes which staged rows of a sink it has dropped."""
    return f"{JobPaths(job).sinks_dir}/{_hashed(place)}.dropped"


def commit_notes(job: str, place: str) -> str:
    """The folder, in the checkpoint directory, in which the driver notes commits to a target that have not ended."""
    return f"{JobPaths(job).sinks_dir}/{_hashed(place)}.commits"


def new_waiting_path(job: str, place: str, batch: int) -> str:
    """A path, in the checkpoint directory, for rows that nobody else writes."""
    return f"{waiting_area(job, place)}/{_new_name(job, batch)}.arrow"


def _hashed(place: str) -> str:
    """The place of a sink as a part of a path: a place may be long, and have any characters."""
    return hashlib.sha256(place.encode()).hexdigest()[:16]


def _new_name(job: str, batch: int) -> str:
    return _name(job, batch, uuid.uuid4().hex)


def _name(job: str, batch: int, unique: str) -> str:
    return f"part-{job}-{batch:020d}-{unique}"


def is_folder(place: str) -> bool:
    """Whether the place of a sink is that of a `ParquetSink`. All others begin with their kind, as in `delta:/out`."""
    return re.match(r"[a-z]+:(?!//)", place) is None


def folder_in(place: str) -> str:
    """The folder that the place of a sink of files names, with or without its kind."""
    return place if is_folder(place) else place.partition(":")[2]


def batch_of(file: SinkFile) -> int:
    """The micro-batch whose rows a staged file holds. The names were checked when the file's metadata was read."""
    name = file.staged.rpartition("/")[2].removesuffix(".staged")
    match = FINAL_NAME.fullmatch(name) or WAITING_NAME.fullmatch(name)
    assert match is not None
    return int(match["batch"])


def check_names(metadata: CheckpointMetadata) -> None:
    """Raise `MetadataError` unless all staged rows have names that the job's own stagers give.

    Publication renames, reads and deletes files, so other names in crafted metadata could do harm.
    """
    for file in metadata.sink_files:
        if not (_is_renamed(file, metadata.job) or _is_waiting(file, metadata.job)):
            raise MetadataError(
                f"checkpoint {metadata.checkpoint_id} of job {metadata.job!r} would publish {file.staged!r} as "
                f"{file.final!r}. The job gives no file such a name, so the checkpoint is refused. Restore another one."
            )


def _is_renamed(file: SinkFile, job: str) -> bool:
    """Whether a file lies in the folder of its sink, and gets its final name there."""
    *folders, final = file.final.split("/")
    match = FINAL_NAME.fullmatch(final)
    staging, _, name = file.staged.partition("/")
    return (
        match is not None
        and match["job"] == job
        and staging[:1] == "_"
        and name == f"{final}.staged"
        and all(_PARTITION.fullmatch(folder) for folder in folders)
    )


def _is_waiting(file: SinkFile, job: str) -> bool:
    """Whether a file waits in the job's checkpoint folder."""
    area, _, name = file.staged.rpartition("/")
    match = WAITING_NAME.fullmatch(name)
    return (
        match is not None
        and match["job"] == job
        and not file.final
        and re.fullmatch(rf"{re.escape(JobPaths(job).staged_dir)}/{_PLACE}", area) is not None
    )
