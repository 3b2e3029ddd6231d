"""Publishes the rows of completed checkpoints in all sinks, and holds batches up while a sink falls behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from strandline.checkpoint.metadata import CheckpointMetadata
from strandline.errors import StrandlineError
from strandline.runtime.driver.restore.takeover import Claim
from strandline.runtime.driver.sink_progress import SinkProgress
from strandline.runtime.liveness.threads import all_done
from strandline.sinks.base import SinkCommit, SinkTarget

log = logging.getLogger(__name__)

LOOK_EVERY = 0.05
"""Seconds between two looks at the sinks, while a batch waits for them."""


class SinkCommits:
    """The sinks of one generation.

    Rows are published beside the next batches. Meanwhile these batches stage more rows. If a commit is still under way
    when `backlog` bytes are staged, batches wait until it is done: the job gets as slow as its slowest sink, and
    nothing grows without bound.
    """

    def __init__(self, claim: Claim, progress: SinkProgress | None = None, backlog: int = 512 << 20) -> None:
        self._job = claim.paths.job
        self._log = claim.store
        self._retries = claim.store.retries
        self._targets = claim.sinks
        self._progress = progress or SinkProgress()
        self._progress.recovered()  # whoever has a claim has recovered the sinks
        self._backlog = backlog
        self._committing = threading.Event()

    def publish(self, metadata: CheckpointMetadata) -> None:
        """Make the rows of a completed checkpoint visible, in all sinks at the same time.

        The log entry is won, so this has to happen. If a target refuses, the others still get their rows, the run
        fails, and its restart publishes the rest. Raises `FencedError` if a target was handed to another driver.
        """
        self._committing.set()
        try:
            all_done(
                [
                    (f"sink-{number}", partial(self._publish, target, metadata))
                    for number, target in enumerate(self._targets.values())
                ]
            )
        finally:
            self._committing.clear()

    def _publish(self, target: SinkTarget, metadata: CheckpointMetadata) -> None:
        files = tuple(file for file in metadata.sink_files if file.sink == target.place)
        commit = SinkCommit(metadata.checkpoint_id, metadata.batch_id, files, self._log.job_log)
        began = time.monotonic()

        def attempt() -> None:
            try:
                target.publish(commit)
            except StrandlineError as error:
                self._progress.failed(target.place, error)
                raise

        self._retries.call(f"job {self._job}: publishing to {target.place}", attempt)
        if files:
            self._progress.published(
                target.place,
                metadata.checkpoint_id,
                sum(file.rows for file in files),
                (time.monotonic() - began) * 1000,
            )

    def positions(self) -> Mapping[str, int]:
        """The last batch that each target has, for targets that keep one."""
        return {place: batch for place, target in self._targets.items() if (batch := target.position) is not None}

    def wait_for_room(self, staged_bytes: Callable[[], int], given_up: Callable[[], bool]) -> None:
        """Return when another batch may stage rows, or when `given_up` returns True."""
        if not self._is_behind(staged_bytes):
            return
        log.warning(
            "job %s: the sinks are behind: %.0f MB of rows are staged while a commit is under way, so batches wait",
            self._job,
            staged_bytes() / 1e6,
        )
        began = time.monotonic()
        while self._is_behind(staged_bytes) and not given_up():
            self._progress.held_up(True)
            time.sleep(LOOK_EVERY)
        self._progress.held_up(False)
        log.info("job %s: batches waited %.1f s for the sinks", self._job, time.monotonic() - began)

    def _is_behind(self, staged_bytes: Callable[[], int]) -> bool:
        return self._committing.is_set() and staged_bytes() > self._backlog

    def close(self) -> None:
        """Let go of connections."""
        for target in self._targets.values():
            target.close()
