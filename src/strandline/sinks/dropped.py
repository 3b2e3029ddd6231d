"""Notes on rows that were staged and dropped, because the job went on from a checkpoint that does not cover them.

The job computes such rows again, in other batches. A savepoint may count on the dropped ones: one whose call did not
return, because the driver died before it had published them. Without a note, nothing would tell that they never
reached the target, once the target has rows of later batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from strandline.checkpoint.job_log import WentBack
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import MetadataError, NotFoundError
from strandline.sinks.base import SinkContext
from strandline.sinks.names import batch_of, dropped_rows
from strandline.storage import open_storage

KEPT = 200
"""How many of the last notes are kept: one for every start that dropped rows. Older savepoints are not checked."""

_notes = msgspec.json.Decoder(tuple[WentBack, ...])


class DroppedRows:
    """The notes for one sink. They lie in the job's checkpoint folder."""

    def __init__(self, context: SinkContext, place: str) -> None:
        self._storage = open_storage(context.checkpoint_dir, dict(context.storage_options))
        self._path = dropped_rows(context.job, place)

    @property
    def location(self) -> str:
        """The file with the notes."""
        return f"{self._storage.url}/{self._path}"

    def note(self, first: int, generation: int) -> None:
        """`generation` drops what earlier generations have staged from the batch `first` on."""
        known = self._known()
        new = WentBack(first, generation)
        if new not in known:
            self._storage.write(self._path, msgspec.json.encode((*known, new)[-KEPT:]))

    def among(self, files: Iterable[SinkFile]) -> tuple[SinkFile, int] | None:
        """The first of the files whose rows were dropped, and the generation that did it; None if there is none."""
        known: tuple[WentBack, ...] | None = None
        for file in files:
            known = self._known() if known is None else known
            for one in known:
                if one.voids(batch_of(file)):
                    return file, one.generation
        return None

    def _known(self) -> tuple[WentBack, ...]:
        try:
            return _notes.decode(self._storage.read(self._path))
        except NotFoundError:
            return ()
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MetadataError(
                f"{self.location}, which says what rows a sink has dropped, is damaged: {error}. Bring the file back; "
                "or delete it, if no savepoint will be restored whose call did not return"
            ) from error
