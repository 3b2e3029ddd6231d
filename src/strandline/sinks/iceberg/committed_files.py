"""Commits to an Iceberg table that leave no file behind: each is noted before it writes, and cleaned up if it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import msgspec

from strandline.checkpoint.metadata import Generation
from strandline.errors import StrandlineError
from strandline.sinks.iceberg.attempts import (
    Attempt,
    AttemptNotes,
    LeftFiles,
    Outcome,
    metadata_folder,
    outcome,
    unused_manifests,
)
from strandline.sinks.iceberg.commits import SnapshotCommit
from strandline.sinks.iceberg.data_files import data_folder, open_folder
from strandline.sinks.marked import Marker

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

logger = logging.getLogger(__name__)


class CommittedFiles:
    """Commits to one table, and deletes the files of commits that did not take effect."""

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
        self.open: list[Attempt] = []
        """Attempts of this driver that are at work, or of which it is not known whether they took effect."""

    def commit(
        self,
        table: Table,
        marker: Marker,
        write: Callable[[Iterator[str]], Sequence[DataFile]],
        replaced: Sequence[DataFile] = (),
    ) -> None:
        """Add the data files that `write` gives in place of `replaced`. `write` gets names for files that it makes.

        Raises as `SnapshotCommit.send` does.
        """
        commit = SnapshotCommit(table, marker, replaces=bool(replaced))
        attempt = commit.attempt()
        self.open.append(attempt)
        self._notes.write(attempt)
        try:
            commit.send(write(attempt.data_names()), replaced)
        except Exception:
            if not commit.sent:
                self._clear_early(attempt, table)
            raise
        self._end(attempt, commit.committed if commit.merged else None, Outcome.TOOK_EFFECT)

    def settle_open(self, table: Table) -> None:
        """Delete files of this driver's attempts that did not take effect. `table` was loaded after they had ended."""
        for attempt in tuple(self.open):
            self._settle(attempt, table)

    def settle(self, generation: Generation, load: Callable[[], Table]) -> None:
        """Delete files of all attempts up to `generation` that did not take effect.

        Their drivers have ended, or are fenced. One that stood still may go on writing files afterwards, and deletes
        them itself when it sees that its commit fails. In case it is killed before that, its note stays until a later
        generation has looked, too.
        """
        try:
            attempts = self._notes.until(generation)
            with self._errors():
                table = load() if attempts else None
        except Exception as error:  # noqa: BLE001 - catalogues raise many types; the job goes on, with its table whole
            logger.warning("%s: files of earlier commits are deleted by a later start: %s", self._place, _told(error))
            return
        for attempt in attempts:
            assert table is not None
            self._settle(attempt, table, generation)

    def _settle(self, attempt: Attempt, table: Table, generation: Generation | None = None) -> None:
        try:
            with self._errors():
                found = outcome(attempt, table, (data_folder(table.metadata), metadata_folder(table)))
        except Exception as error:  # noqa: BLE001 - libraries raise many types for files that they cannot read
            what = f"whether commit {attempt.commit} took effect"
            logger.warning("%s: %s is looked for again later: %s", self._place, what, _told(error))
            return
        self._end(attempt, table, found, generation)

    def _end(self, attempt: Attempt, table: Table | None, found: Outcome, generation: Generation | None = None) -> None:
        """Delete what an attempt has left, and its note. `generation` does it for an earlier one.

        `table` is not needed for an attempt that took effect and left nothing.
        """
        if found is Outcome.UNDECIDED:
            return
        try:
            with self._errors():
                self._settled(attempt, table, found, generation)
        except Exception as error:  # noqa: BLE001 - the commit took effect, or its rows are written again: neither fails
            logger.warning("%s: files of commit %s are deleted later: %s", self._place, attempt.commit, _told(error))
            return
        if attempt in self.open:
            self.open.remove(attempt)

    def _settled(self, attempt: Attempt, table: Table | None, found: Outcome, generation: Generation | None) -> None:
        if table is not None and not self._clear(attempt, table, found):
            self._warn(attempt)
        elif found is Outcome.FAILED and generation is not None and attempt.may_go_on(generation):
            self._notes.write(msgspec.structs.replace(attempt, cleared_by=generation))
            return
        self._notes.remove(attempt)

    def _clear_early(self, attempt: Attempt, table: Table) -> None:
        """Delete what an attempt has written that was never sent, so that a full disk has room again.

        It stays open: a thread of PyIceberg may still be writing a manifest.
        """
        try:
            with self._errors():
                self._clear(attempt, table, Outcome.FAILED)
        except Exception as error:  # noqa: BLE001 - the error of the commit is the one that counts
            logger.warning("%s: files of commit %s are deleted later: %s", self._place, attempt.commit, _told(error))

    def _clear(self, attempt: Attempt, table: Table, found: Outcome) -> bool:
        """Delete what an attempt has left; False if it cannot be told what that is."""
        if found is Outcome.UNKNOWN:
            return False
        data, metadata = (open_folder(one, self._options) for one in (attempt.data, attempt.metadata))
        if found is Outcome.TOOK_EFFECT:
            metadata.delete(unused_manifests(attempt, table, metadata))
            return True
        left = LeftFiles.of(attempt, data, metadata)
        if not left.fit(attempt, table):
            return False
        deleted = left.delete(attempt, table, data, metadata)
        logger.info("%s: commit %s failed, and its %d files are deleted", self._place, attempt.commit, deleted)
        return True

    def _warn(self, attempt: Attempt) -> None:
        logger.warning(
            "%s: a driver of generation %d did not end commit %s, and the table does not tell whether it took effect. "
            "Its files stay, if there are any; remove_orphan_files finds those that no snapshot names",
            self._place,
            attempt.generation,
            attempt.commit,
        )


def _told(error: Exception) -> str:
    """An error for the log. Texts of libraries may show secrets."""
    return str(error) if isinstance(error, StrandlineError) else type(error).__name__
