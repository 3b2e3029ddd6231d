"""One conditional commit to an Iceberg table: data files, a snapshot and the marker together, or nothing.

The marker stands in the summary of the snapshot, and as a property of the table. Every commit that changes the marker
adds a snapshot, so the requirement that the branch `main` has not moved keeps out whoever has seen an older marker.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strandline.sinks.marked import Marker

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

logger = logging.getLogger(__name__)

PREFIX = "strandline."
_BRANCH = "main"


class MovedError(Exception):
    """The catalogue says that the table has changed since it was loaded, and that nothing was committed.

    Whether that is so, the table shows: a request that a proxy or a client has repeated is refused the second time,
    although it took effect the first time.
    """

    def __init__(self, snapshot: Snapshot | None) -> None:
        super().__init__("the table has changed since it was loaded")
        self.snapshot = snapshot
        """The snapshot that was to be committed."""
        self.written: Sequence[DataFile] = ()
        """The data files that were written for this commit alone."""


def marker_key(job: str) -> str:
    """The name of the table's property, and of the entry in a snapshot's summary, that hold the job's marker."""
    return f"{PREFIX}marker.{job}"


def sequence_key(job: str) -> str:
    """The name of the table's property that holds the sequence number of the last snapshot with the job's marker."""
    return f"{PREFIX}sequence.{job}"


def read_marker(table: Table, job: str) -> str | None:
    """The marker of the job, as text; None if the table has none.

    The newest snapshot of `main` with a marker has it. So a table that was rolled back has the marker that it had then.
    Old snapshots expire; then the table's property has the marker.
    """
    key = marker_key(job)
    snapshot = oldest = table.snapshot_by_name(_BRANCH)
    while snapshot is not None:
        found = snapshot.summary.get(key) if snapshot.summary is not None else None
        if found is not None:
            return found
        oldest = snapshot
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    return table.properties.get(key) if oldest is not None and _follows_marker(oldest, table, job) else None


def _follows_marker(oldest: Snapshot, table: Table, job: str) -> bool:
    """Whether the marker of the property was set before `oldest`, the oldest snapshot of `main` that has not expired.

    Whether that one has a parent says nothing: Iceberg's Java library keeps the id of a parent that has expired, and
    PyIceberg removes it.
    """
    number = int(table.properties.get(sequence_key(job), "0"))
    if not number:  # tables of version 1 do not number their snapshots
        return oldest.parent_snapshot_id is not None
    key = marker_key(job)
    text, tagged = table.properties.get(key), {ref.snapshot_id for ref in table.metadata.refs.values()}
    for one in table.snapshots():
        if one.summary is not None and one.summary.get(key) == text and one.snapshot_id not in tagged:
            return False  # it has not expired, and is not on `main` any more: the table was rolled back behind it
    return (oldest.sequence_number or 0) > number


def commit_snapshot(table: Table, marker: Marker, added: Sequence[DataFile], replaced: Sequence[DataFile] = ()) -> None:
    """Add `added` to the table in place of `replaced`, with the marker, if the table is still as it was loaded.

    Raises `MovedError` if it is not. After any other error the outcome is not known.
    """
    from pyiceberg.table import Table, Transaction

    key, text = marker_key(marker.job), marker.encoded()
    summary = {
        f"{PREFIX}job": marker.job,
        f"{PREFIX}checkpoint": str(marker.checkpoint),
        f"{PREFIX}batch": str(marker.batch),
        key: text,
    }
    once = _CommitsOnce(table.catalog)
    loaded = Table(table.name(), table.metadata, table.metadata_location, table.io, once, table.config)  # type: ignore[arg-type]
    transaction = Transaction(loaded)
    update = transaction.update_snapshot(snapshot_properties=summary, branch=_BRANCH)
    merges = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
    producer = update.overwrite() if replaced else update.merge_append() if merges else update.fast_append()
    with producer:
        for file in replaced:
            producer.delete_data_file(file)
        for file in added:
            producer.append_data_file(file)
    transaction.set_properties({key: text, sequence_key(marker.job): str(table.metadata.next_sequence_number())})
    transaction.commit_transaction()


class _CommitsOnce:
    """A catalogue as a transaction of PyIceberg sees it, without PyIceberg's own retries.

    PyIceberg repeats a commit that failed on the newest state of the table, whatever marker that has. It would also
    delete the manifests of a commit that is reported as failed although it came through.
    """

    def __init__(self, catalog: Any) -> None:
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def _delete_old_metadata(self, io: Any, base: Any, metadata: Any) -> None:
        """Called by PyIceberg after a commit. The server of a REST catalogue has done it already."""
        from pyiceberg.catalog.rest import RestCatalog

        if not isinstance(self._catalog, RestCatalog):
            self._catalog._delete_old_metadata(io, base, metadata)

    def commit_table(self, table: Any, requirements: tuple[Any, ...], updates: tuple[Any, ...]) -> Any:
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.table.update import AddSnapshotUpdate, AssertRefSnapshotId

        assert any(isinstance(one, AssertRefSnapshotId) for one in requirements)
        try:
            return self._catalog.commit_table(table, requirements, updates)
        except CommitFailedException as error:
            added = [one.snapshot for one in updates if isinstance(one, AddSnapshotUpdate)]
            raise MovedError(added[0] if added else None) from error


def delete_files_of(moved: MovedError, table: Table) -> None:
    """Delete what was written for a commit, unless `table`, which was loaded after it had failed, has its snapshot."""
    snapshot = moved.snapshot
    if snapshot is None or table.snapshot_by_id(snapshot.snapshot_id) is not None:
        return
    try:
        manifests = [one for one in snapshot.manifests(table.io) if one.added_snapshot_id == snapshot.snapshot_id]
        lists = [*(one.manifest_path for one in manifests), snapshot.manifest_list]
        for path in [*lists, *(one.file_path for one in moved.written)]:
            table.io.delete(path)
    except OSError as error:
        logger.warning("%s: files of a commit that failed stay behind: %s", ".".join(table.name()), error)
