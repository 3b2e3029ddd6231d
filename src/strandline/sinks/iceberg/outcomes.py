"""Whether an attempt to commit to an Iceberg table took effect, as the table tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from strandline.sinks.iceberg.attempts import Attempt, metadata_folder
from strandline.sinks.iceberg.data_files import data_folder

if TYPE_CHECKING:
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

_MOST_SNAPSHOTS = 1000
"""How many snapshots are looked through for files of an attempt."""


class Outcome(Enum):
    """What a table says about an attempt."""

    UNDECIDED = auto()
    """It may take effect yet."""
    TOOK_EFFECT = auto()
    """A snapshot refers to its files, or did when they were written."""
    FAILED = auto()
    """No snapshot refers to its files, and none ever will."""


class CannotTellError(Exception):
    """It cannot be told, now or later, which files of an attempt nobody needs. The text says why."""


def outcome(attempt: Attempt, table: Table, *, own: bool) -> Outcome:
    """What the table says about an attempt of a driver that has ended, or been fenced, before the table was loaded.

    `own` says whether it is this driver's own, which sends nothing any more. Of another driver there is only a note.
    Reads the manifests that are newer than the attempt. Raises `CannotTellError`.
    """
    if attempt.table != str(table.metadata.table_uuid):
        raise CannotTellError("the table was made anew since then")
    if (attempt.data, attempt.metadata) != (data_folder(table.metadata), metadata_folder(table)):
        raise CannotTellError("the table has its files in other folders since then")
    if attempt.sequence > table.metadata.next_sequence_number():
        raise CannotTellError("the table has not come to the state for which the note says that they were written")
    if any(one.snapshot_id == attempt.snapshot or attempt.commit in one.manifest_list for one in table.snapshots()):
        return Outcome.TOOK_EFFECT
    newest = table.snapshot_by_name("main")
    if (newest.snapshot_id if newest is not None else None) == attempt.parent:
        return Outcome.UNDECIDED
    later = [one for one in table.snapshots() if (one.sequence_number or 0) >= attempt.sequence]
    # The snapshot may have expired. Its files live on in later ones.
    if any(_refers(manifest, attempt, table) for manifest in _manifests(later, table, attempt.sequence)):
        return Outcome.TOOK_EFFECT
    if own:
        return Outcome.FAILED
    if not attempt.sequence:
        # A driver that stood still may send its commit late. If the table was rolled back meanwhile to the snapshot
        # that the commit wants, only numbers would refuse it.
        raise CannotTellError("the table is of version 1, and does not number its snapshots")
    # A note that was made up may say another state of the table than that of the commit whose files it names.
    newest_lists = _manifests(list(table.snapshots())[-_MOST_SNAPSHOTS:], table, 0)
    if any(attempt.commit in manifest.manifest_path for manifest in newest_lists):
        return Outcome.TOOK_EFFECT
    return Outcome.FAILED


def _manifests(snapshots: list[Snapshot], table: Table, since: int) -> Iterator[ManifestFile]:
    """The manifests of the snapshots that are not older than the sequence number `since`, each once."""
    if len(snapshots) > _MOST_SNAPSHOTS:
        raise CannotTellError(f"{len(snapshots)} snapshots would have to be looked through")
    seen = set()
    for snapshot in snapshots:
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen and (manifest.sequence_number or 0) >= since:
                seen.add(manifest.manifest_path)
                yield manifest


def _refers(manifest: ManifestFile, attempt: Attempt, table: Table) -> bool:
    if manifest.added_snapshot_id == attempt.snapshot or attempt.commit in manifest.manifest_path:
        return True
    entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
    return any(attempt.is_data(one.data_file.file_path.rpartition("/")[2]) for one in entries)


def without_references(names: Sequence[str], table: Table) -> list[str]:
    """Those of the names that no snapshot of the table gives to a data file. Reads all manifests.

    Raises `CannotTellError`.
    """
    left = set(names)
    for manifest in _manifests(list(table.snapshots()), table, 0) if left else ():
        entries = manifest.fetch_manifest_entry(table.io, discard_deleted=False)
        left -= {one.data_file.file_path.rpartition("/")[2] for one in entries}
    return sorted(left)
