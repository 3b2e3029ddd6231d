"""One conditional commit to an Iceberg table: data files, a snapshot and the marker together, or nothing.

The marker stands in the summary of the snapshot, and as a property of the table. Every commit that changes the marker
adds a snapshot, so the requirement that the branch `main` has not moved keeps out whoever has seen an older marker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strandline.sinks.iceberg.attempts import Attempt, is_manifest, metadata_folder, named_for, version_of
from strandline.sinks.iceberg.data_files import data_folder
from strandline.sinks.marked import Marker

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from pyiceberg.table.snapshots import Snapshot

PREFIX = "strandline."
_BRANCH = "main"


class MovedError(Exception):
    """The catalogue says that the table has changed since it was loaded, and that nothing was committed.

    Whether that is so, the table shows: a request that a proxy or a client has repeated is refused the second time,
    although it took effect the first time.
    """


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


class SnapshotCommit:
    """A commit that adds one snapshot with a marker, if the table is still as it was loaded. Nothing is written yet."""

    def __init__(self, table: Table, marker: Marker, *, replaces: bool = False) -> None:
        """`replaces` says whether data files of the table are replaced."""
        from pyiceberg.table import Table, Transaction

        self._before, self._marker = table, marker
        key, text = marker_key(marker.job), marker.encoded()
        summary = {
            f"{PREFIX}job": marker.job,
            f"{PREFIX}checkpoint": str(marker.checkpoint),
            f"{PREFIX}batch": str(marker.batch),
            key: text,
        }
        self._once = _CommitsOnce(table.catalog)
        self._outputs = _recorded(table.io)
        self._after = Table(
            table.name(),
            table.metadata,
            table.metadata_location,
            self._outputs,
            self._once,  # type: ignore[arg-type]  # it has what a transaction calls
            table.config,
        )
        self._transaction = Transaction(self._after)
        update = self._transaction.update_snapshot(snapshot_properties=summary, branch=_BRANCH)
        merges = table.properties.get("commit.manifest-merge.enabled", "false").lower() == "true"
        self._merges = merges and not replaces
        self._producer = update.overwrite() if replaces else update.merge_append() if merges else update.fast_append()
        self._once.name = str(self._producer.commit_uuid)

    @property
    def sent(self) -> bool:
        """Whether the catalogue was asked to commit. Before that, nothing can take effect."""
        return self._once.sent

    @property
    def manifests(self) -> tuple[str, ...]:
        """The names of the manifests that were written so far."""
        return tuple(self._outputs.manifests)

    @property
    def merged(self) -> bool:
        """Whether manifests were merged: PyIceberg leaves the one of the added files there, which nobody names."""
        return self._merges and len(self.manifests) > 1

    @property
    def after(self) -> Table:
        """The table after the commit."""
        return self._after

    def attempt(self, rewritten: Sequence[str] = ()) -> Attempt:
        """What is to be noted before anything is written. `rewritten` as in `Attempt`."""
        table, branch = self._before, self._before.snapshot_by_name(_BRANCH)
        return Attempt(
            job=self._marker.job,
            generation=self._marker.generation,
            batch=self._marker.batch,
            commit=self._once.name,
            snapshot=self._producer.snapshot_id,
            parent=branch.snapshot_id if branch is not None else None,
            sequence=table.metadata.next_sequence_number(),
            version=version_of(table.metadata_location) if self._once.writes_metadata else -1,
            table=str(table.metadata.table_uuid),
            data=data_folder(table.metadata),
            metadata=metadata_folder(table),
            rewritten=tuple(rewritten),
        )

    def send(self, added: Sequence[DataFile], replaced: Sequence[DataFile] = ()) -> None:
        """Add `added` to the table in place of `replaced`, with the marker.

        Raises `MovedError` if the table has changed since it was loaded. After any other error the outcome is not known
        if the commit was `sent`.
        """
        key, text = marker_key(self._marker.job), self._marker.encoded()
        with self._producer:
            for file in replaced:
                self._producer.delete_data_file(file)
            for file in added:
                self._producer.append_data_file(file)
        number = str(self._before.metadata.next_sequence_number())
        self._transaction.set_properties({key: text, sequence_key(self._marker.job): number})
        self._transaction.commit_transaction()


def _recorded(io: FileIO) -> Any:
    """The same files, with `manifests`: the names of those that were written, or begun."""
    from pyiceberg.io import FileIO, InputFile, OutputFile

    class Recorded(FileIO):
        def __init__(self) -> None:
            super().__init__(io.properties)
            self.manifests: list[str] = []

        def new_input(self, location: str) -> InputFile:
            return io.new_input(location)

        def new_output(self, location: str) -> OutputFile:
            if is_manifest(location):
                self.manifests.append(location.rpartition("/")[2])
            return io.new_output(location)

        def delete(self, location: str | InputFile | OutputFile) -> None:
            io.delete(location)

    return Recorded()


class _CommitsOnce:
    """A catalogue as a transaction of PyIceberg sees it, without PyIceberg's own retries.

    PyIceberg repeats a commit that failed on the newest state of the table, whatever marker that has. It would also
    delete the manifests of a commit that is reported as failed although it came through.
    """

    def __init__(self, catalog: Any) -> None:
        self._catalog = catalog
        self.name = ""
        """What the file with the table's new metadata is named after, if this process writes it."""
        self.sent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    @property
    def writes_metadata(self) -> bool:
        """Whether PyIceberg writes the table's metadata. The server of a REST catalogue does it itself."""
        from pyiceberg.catalog import MetastoreCatalog

        return isinstance(self._catalog, MetastoreCatalog)

    def _delete_old_metadata(self, io: Any, base: Any, metadata: Any) -> None:
        """Called by PyIceberg after a commit. The server of a REST catalogue has done it already."""
        from pyiceberg.catalog.rest import RestCatalog

        if not isinstance(self._catalog, RestCatalog):
            self._catalog._delete_old_metadata(io, base, metadata)

    def commit_table(self, table: Any, requirements: tuple[Any, ...], updates: tuple[Any, ...]) -> Any:
        from pyiceberg.exceptions import CommitFailedException
        from pyiceberg.table.update import AssertRefSnapshotId

        assert any(isinstance(one, AssertRefSnapshotId) for one in requirements)
        self.sent = True
        try:
            with self._metadata_named():
                return self._catalog.commit_table(table, requirements, updates)
        except CommitFailedException as error:
            raise MovedError from error
        except ValueError as error:
            if "older than last sequence number" not in str(error):
                raise
            raise MovedError from error  # PyIceberg's words for a commit to another branch that came in between

    @contextmanager
    def _metadata_named(self) -> Iterator[None]:
        """The file with the table's new metadata gets a name that is known beforehand.

        PyIceberg has no setting for that, and writes the file before it looks whether the commit may take effect. If
        its method is renamed one day, such files have random names again, and nothing else changes.
        """
        stage = getattr(self._catalog, "_update_and_stage_table", None)
        if stage is None or not self.writes_metadata:
            yield
            return

        def staged(*arguments: Any, **options: Any) -> Any:
            found = stage(*arguments, **options)
            found.metadata_location = named_for(found.metadata_location, self.name)
            return found

        self._catalog._update_and_stage_table = staged
        try:
            yield
        finally:
            del self._catalog._update_and_stage_table
