"""Commits to an Iceberg table that leave no file behind: each is noted before it writes, and cleaned up if it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from strandline.checkpoint.metadata import Generation
from strandline.errors import StrandlineError
from strandline.sinks.iceberg.attempts import Attempt, AttemptNotes, DataNames, metadata_folder
from strandline.sinks.iceberg.commits import SnapshotCommit
from strandline.sinks.iceberg.data_files import data_folder, open_folder
from strandline.sinks.iceberg.left_files import LeftFiles, TableFolders, unused_manifests
from strandline.sinks.iceberg.outcomes import CannotTellError, Outcome, outcome, without_references
from strandline.sinks.marked import Marker

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Own:
    """What this driver knows of an attempt of its own, so that no folder has to be listed."""

    commit: SnapshotCommit
    names: DataNames

    def left(self, attempt: Attempt, folders: TableFolders) -> LeftFiles:
        """What the attempt has written. A data file that was begun is looked for if writing may have failed."""
        halves = () if self.commit.sent else tuple(file.path for file in folders.halves(attempt))
        return LeftFiles(tuple(self.names.given), halves, self.commit.manifests)


class NotedCommits:
    """Commits to one table, and deletes the files of commits that did not take effect.

    No error of a clean-up makes a commit look failed: it is logged, and the attempt is kept for the next clean-up.
    """

    def __init__(
        self,
        notes: AttemptNotes,
        options: Mapping[str, str],
        place: str,
        errors: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`options` are the settings of the storage of the table's files. `errors` translates what libraries raise."""
        self._notes = notes
        self._options = options
        self._place = place
        self._errors = errors
        self._open: dict[Attempt, _Own] = {}
        """Attempts of this driver that are at work, or of which it is not known whether they took effect."""

    def commit(
        self,
        table: Table,
        marker: Marker,
        write: Callable[[Callable[[], str]], Sequence[DataFile]],
        replaced: Sequence[DataFile] = (),
        rewritten: Sequence[str] = (),
    ) -> None:
        """Add the data files that `write` gives in place of `replaced`.

        `write` gets a function that gives names for files that it makes. `rewritten` are as in `Attempt`, and are
        deleted. Raises as `SnapshotCommit.send` does.
        """
        commit = SnapshotCommit(table, marker, replaces=bool(replaced))
        attempt = commit.attempt(rewritten)
        own = self._open[attempt] = _Own(commit, DataNames(attempt))
        self._notes.write(attempt)
        try:
            commit.send(write(own.names.new), replaced)
        except Exception:
            if not commit.sent:
                self._clear_early(attempt, table, own)
            raise
        with self._logged(attempt):
            self._clear_up(attempt, commit.after, own)
            self._forget(attempt)

    def settle_own(self, load: Callable[[], Table]) -> None:
        """Delete files of this driver's attempts that did not take effect. `load` loads the table, if there are any."""
        if self._open:
            self._settle(tuple(self._open), load)

    def settle_earlier(self, generation: Generation, load: Callable[[], Table]) -> None:
        """Delete files of all attempts up to `generation` that did not take effect.

        Their drivers have ended, or are fenced. One that stood still may go on writing files afterwards, and deletes
        them itself when it sees that its commit fails. In case it is killed before that, its note stays until a later
        generation has looked, too.
        """
        try:
            attempts = self._notes.until(generation)
        except Exception as error:  # noqa: BLE001 - the job goes on, with its table whole
            logger.warning("%s: files of earlier commits are deleted by a later start: %s", self._place, _told(error))
            return
        if attempts:
            self._settle(attempts, load, generation)

    def _settle(
        self, attempts: Sequence[Attempt], load: Callable[[], Table], generation: Generation | None = None
    ) -> None:
        try:
            with self._errors():
                table = load()
        except Exception as error:  # noqa: BLE001 - catalogues raise many types; the job goes on, with its table whole
            logger.warning("%s: files of earlier commits are deleted later: %s", self._place, _told(error))
            return
        for attempt in attempts:
            with self._logged(attempt):
                self._settle_one(attempt, table, generation)

    def _settle_one(self, attempt: Attempt, table: Table, generation: Generation | None) -> None:
        """Delete what an attempt has left, and its note. `generation` does it for an earlier one."""
        own = self._open.get(attempt)
        try:
            found = outcome(attempt, table, own=own is not None)
            if found is Outcome.UNDECIDED:
                return
            if found is Outcome.TOOK_EFFECT:
                self._clear_up(attempt, table, own)
            else:
                self._clear(attempt, table, own)
                if generation is not None and attempt.may_go_on(generation):
                    self._notes.write(msgspec.structs.replace(attempt, cleared_by=generation))
                    return
        except CannotTellError as error:
            logger.warning(
                "%s: files of commit %s, of generation %d, stay if there are any: %s. remove_orphan_files finds those "
                "that no snapshot names",
                self._place,
                attempt.commit,
                attempt.generation,
                error,
            )
        self._forget(attempt)

    def _clear_early(self, attempt: Attempt, table: Table, own: _Own) -> None:
        """Delete what an attempt has written that was never sent, so that a full disk has room again.

        It stays open: a thread of PyIceberg may still be writing a manifest.
        """
        with self._logged(attempt):
            self._clear(attempt, table, own)

    def _clear(self, attempt: Attempt, table: Table, own: _Own | None) -> None:
        """Delete what an attempt that failed has written."""
        folders = self._folders(table)
        left = own.left(attempt, folders) if own is not None else LeftFiles.found(attempt, table, folders)
        left.delete(attempt, table, folders)
        logger.info("%s: commit %s failed, and its files are deleted", self._place, attempt.commit)

    def _clear_up(self, attempt: Attempt, table: Table, own: _Own | None) -> None:
        """Delete what an attempt that took effect has left."""
        if own is not None and not own.commit.merged and not attempt.rewritten:
            return
        folders = self._folders(table)
        if own is None:
            manifests = [file.path for file in folders.manifests(attempt)]
            rewritten: Sequence[str] = without_references(attempt.rewritten, table)
        else:
            manifests, rewritten = list(own.commit.manifests), attempt.rewritten
        folders.metadata.delete(unused_manifests(manifests, attempt, table))
        folders.data.delete(rewritten)

    def _folders(self, table: Table) -> TableFolders:
        locations = (data_folder(table.metadata), metadata_folder(table))
        return TableFolders(*(open_folder(one, self._options) for one in locations))

    def _forget(self, attempt: Attempt) -> None:
        self._notes.remove(attempt)
        self._open.pop(attempt, None)

    @contextmanager
    def _logged(self, attempt: Attempt) -> Iterator[None]:
        """Errors are only logged: the commit took effect, or its rows are written again, or its own error counts."""
        try:
            with self._errors():
                yield
        except Exception as error:  # noqa: BLE001 - libraries raise many types; the attempt is kept for later
            logger.warning("%s: files of commit %s are deleted later: %s", self._place, attempt.commit, _told(error))


def _told(error: Exception) -> str:
    """An error for the log. Texts of libraries may show secrets."""
    return str(error) if isinstance(error, StrandlineError) else type(error).__name__
