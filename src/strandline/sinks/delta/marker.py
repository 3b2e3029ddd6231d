"""The marker of a job in the log of a Delta table: versions of transactions.

A Delta commit may say that an application has reached a version (the action `txn`). The table keeps the newest version
of every application for ever: over commits of others, checkpoints of the log, its clean-up, OPTIMIZE and VACUUM. A
version is a number, so a marker takes several applications. That of the job's own name has the last batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from strandline.decoding import converted
from strandline.errors import DirectoryNotOursError
from strandline.sinks.marked import Marker

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable

_BYTES = 8
"""The bytes of a version."""
_MOST_PARTS = 64
"""A log's name is shorter than so many versions."""


def application(job: str) -> str:
    """The id of the application in the log of a table. Its version is the last batch whose rows the table has."""
    return f"strandline/{job}"


def commit_properties(marker: Marker) -> CommitProperties:
    """Has a commit write the marker, if the table's version is the one that was read."""
    from deltalake import CommitProperties, Transaction

    # Without `last_updated`, a table that forgets old applications keeps these.
    return CommitProperties(
        custom_metadata={"strandline": msgspec.to_builtins(marker)},  # for people who read the history
        max_commit_retries=0,
        app_transactions=[Transaction(name, version) for name, version in _versions(marker).items()],
    )


def _versions(marker: Marker) -> dict[str, int]:
    own = application(marker.job)
    # A zero byte is the end.
    text = (marker.log_id or "").encode() + b"\0"
    parts = [text[at : at + _BYTES].ljust(_BYTES, b"\0") for at in range(0, len(text), _BYTES)]
    return {
        own: marker.batch,
        f"{own}/checkpoint": marker.checkpoint,
        f"{own}/generation": marker.generation,
        **{f"{own}/log/{n}": int.from_bytes(part, "big", signed=True) for n, part in enumerate(parts)},
    }


def read_marker(table: DeltaTable, job: str, place: str) -> Marker | None:
    """The marker of a job; None if the table has none. Raises `DirectoryNotOursError` if it is damaged."""
    own = application(job)
    batch = table.transaction_version(own)
    if batch is None:
        return None
    try:
        found = {
            "job": job,
            "log_id": _log_id(table, own),
            "generation": table.transaction_version(f"{own}/generation"),
            "checkpoint": table.transaction_version(f"{own}/checkpoint"),
            "batch": batch,
        }
        return converted(found, Marker)
    except (msgspec.ValidationError, ValueError) as error:
        raise DirectoryNotOursError(
            f"the log of {place} has a damaged marker of job {job!r} (transactions of {own!r}), so it is not known "
            f"which rows it has: {error}. Restore the table to a version that we wrote, or give the sink another table."
        ) from error


def _log_id(table: DeltaTable, own: str) -> str | None:
    text = b""
    for number in range(_MOST_PARTS):
        part = table.transaction_version(f"{own}/log/{number}")
        if part is None:
            break
        text += part.to_bytes(_BYTES, "big", signed=True)
        if b"\0" in text:
            return text.partition(b"\0")[0].decode() or None
    raise ValueError("the name of the job's log is not complete")
