"""The durable changelog segments of every slot since the last completed checkpoint, as the driver knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strandline.checkpoint.metadata import StateFile, last_batch
from strandline.runtime.protocol.messages import SegmentUpload
from strandline.runtime.protocol.taskmanager_calls import DurableSegment


class DurableSegments:
    """The segments from which a slot can be rebuilt on any host, on top of the checkpoint that it restores.

    They are needed when a slot's host, and with it the slot's local files, is gone.
    """

    def __init__(self, batch: int = -1) -> None:
        self._covered = batch
        self._files: dict[int, list[tuple[str, StateFile]]] = {}
        self._prepared: dict[int, Mapping[str, SegmentUpload]] = {}
        self._prepared_batch = -1
        self._newest: dict[tuple[str, int], int] = {}
        """The last batch of the segments that `take_in` has noted, by operator and slot."""
        self._gap = -1
        """The newest committed batch of which some segment is not durable."""

    @property
    def complete(self) -> bool:
        """Whether the segments lead without a gap from the last completed checkpoint to the last committed batch."""
        return self._gap <= self._covered

    def prepared(self, batch: int, index: int, segments: Mapping[str, SegmentUpload]) -> None:
        """Note what slot `index` prepared for `batch`: for each operator, whether its segment is durable, and its file.

        A later call for the same slot and batch replaces the earlier one: the batch was run again in a new round.
        """
        if batch != self._prepared_batch:
            self._prepared_batch = batch
            self._prepared = {}
        self._prepared[index] = segments

    def decided(self, batch: int, has_changelog: bool) -> None:
        """Note that `batch` is committed. Without a changelog, no segment of it is durable."""
        prepared = self._prepared if self._prepared_batch == batch else {}
        self._prepared, self._prepared_batch = {}, -1
        if not has_changelog:
            self._gap = batch
        for index, segments in prepared.items():
            for operator, upload in segments.items():
                if not upload.durable:
                    self._gap = batch
                elif upload.file is not None:
                    self._files.setdefault(index, []).append((operator, upload.file))

    def take_in(self, segments: Iterable[DurableSegment]) -> None:
        """Note segments of committed epochs, in their order. They may be noted again."""
        for one in segments:
            at = (one.operator, one.subtask)
            if last_batch(one.file) > self._newest.get(at, -1):
                self._newest[at] = last_batch(one.file)
                self._files.setdefault(one.subtask, []).append((one.operator, one.file))

    def truncate(self, batch: int) -> None:
        """Forget the segments up to `batch`: a completed checkpoint covers them."""
        self._covered = batch
        for index, files in self._files.items():
            self._files[index] = [(uid, file) for uid, file in files if last_batch(file) > batch]

    def of(self, index: int) -> list[tuple[str, StateFile]]:
        """The segments of slot `index`, each with its operator's uid, in the order of batches."""
        return list(self._files.get(index, ()))
