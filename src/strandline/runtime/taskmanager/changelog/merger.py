"""Merges long runs of segments, so that checkpoints name few files and overwritten changes go."""

from __future__ import annotations

import logging
from pathlib import Path

from strandline.checkpoint.metadata import StateFile, last_batch, segment_file
from strandline.checkpoint.pending import Subtask
from strandline.runtime.taskmanager.changelog.files import SubtaskFiles
from strandline.runtime.taskmanager.changelog.segment_queue import SegmentQueue
from strandline.runtime.taskmanager.changelog.segment_uploader import SegmentUploader
from strandline.runtime.taskmanager.changelog.shared import Shared
from strandline.runtime.taskmanager.changelog.tuning import ChangelogTuning
from strandline.state.batch.merge import AT_ONCE_BYTES, merge
from strandline.state.batch.segment import SegmentHeader, read_table, write_table

log = logging.getLogger(__name__)


class SegmentMerger:
    """Replaces many segments of a subtask by one with the same effect."""

    def __init__(self, shared: Shared, queue: SegmentQueue, uploader: SegmentUploader, tuning: ChangelogTuning) -> None:
        self.merges = 0
        self._shared = shared
        self._lock = shared.lock
        self._queue = queue
        self._uploader = uploader
        self._tuning = tuning

    def merge_next(self) -> bool:
        """Merge segments of one subtask, if one has many; False if that failed."""
        with self._lock:
            found = self._next_run()
            if found is None:
                return True
            subtask, known, run = found
            generation = self._shared.generation
            local = [self._shared.local.path(file) for file in run]
        target: Path | None = None
        try:
            target = self._shared.local.new_path()
            batch = last_batch(run[-1])
            whole = merge([read_table(path) for path in local])
            write_table(target, SegmentHeader(generation, batch, 0, subtask[0], subtask[1], -1), whole)
            (handle,) = self._uploader.upload([target])
        except Exception as error:  # noqa: BLE001  # whatever it is, the thread must go on
            # The slot deletes local segments once it has a local snapshot; or storage is in trouble.
            log.info("%d segments of %s were not merged: %s", len(run), subtask, error)
            if target is not None:
                target.unlink(missing_ok=True)
            return False
        file = segment_file(batch, handle)
        with self._lock:
            self._shared.local.keep(file, target)
            if self._shared.files.merged(subtask, known, run, file):
                self.merges += 1
            self._shared.forget_local()
        return True

    def _next_run(self) -> tuple[Subtask, SubtaskFiles, list[StateFile]] | None:
        # A segment that is behind belongs between the others, so its subtask must wait.
        incomplete = {segment.subtask for segment in self._queue.behind}
        for subtask in self._shared.files.subtasks():
            known = self._shared.files[subtask]
            if subtask not in incomplete and (run := self._mergeable(known)):
                return subtask, known, run
        return None

    def _mergeable(self, known: SubtaskFiles) -> list[StateFile]:
        """The newest segments, back to one that is larger than all of them together; none if there are few segments.

        So every change is merged again only a few times, however many segments there are.
        """
        if len(known.segments) < self._tuning.merge_from:
            return []
        run: list[StateFile] = []
        size = 0
        for file in reversed(known.segments):
            if file not in self._shared.local or (len(run) >= self._tuning.merge_at_least and file.size > size):
                break
            if size + file.size > AT_ONCE_BYTES:
                break
            run.insert(0, file)
            size += file.size
        return run if len(run) >= self._tuning.merge_at_least else []
