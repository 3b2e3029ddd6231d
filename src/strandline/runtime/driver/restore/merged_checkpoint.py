"""One checkpoint of the newest one and the durable epochs behind it, completed before a generation begins.

Everything that follows is a restore of that checkpoint. Each step may be repeated by the next driver, if this one dies:
the rows are staged again, under new names, and `_metadata` gets another number. Only the entry in the job's log counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from strandline.checkpoint.epochs import extended
from strandline.checkpoint.home import Home
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile, decode, encode
from strandline.checkpoint.retention import retain
from strandline.errors import AlreadyExistsError
from strandline.runtime.driver.restore.epoch_log import EpochChain
from strandline.runtime.driver.restore.job_log import JobLogStore
from strandline.sinks.positions import with_positions_of
from strandline.storage import JobPaths, Storage

log = logging.getLogger(__name__)


class MergedCheckpoint:
    """Completes the checkpoint that a chain of epochs makes of the newest one."""

    def __init__(
        self, storage: Storage, paths: JobPaths, store: JobLogStore, others: tuple[str, ...], num_retained: int
    ) -> None:
        """`others` are the roots of other storages that may hold files of the job."""
        self._storage = storage
        self._paths = paths
        self._store = store
        self._others = others
        self._num_retained = num_retained

    def complete(
        self,
        restored: CheckpointMetadata,
        chain: EpochChain,
        files: list[SinkFile],
        number: int,
        properties: Mapping[str, str],
    ) -> CheckpointMetadata:
        """Complete `restored` with the epochs of `chain`, whose rows are staged in `files`.

        The checkpoint gets the id `number` or a higher one. Raises `FencedError` if another driver has taken the job
        over, and `UnknownOutcomeError` if nobody knows whether the log has the entry: the next takeover finds out.
        """
        now = time.time()
        while True:
            made = extended(
                restored,
                chain.files,
                checkpoint_id=number,
                generation=self._store.job_log.generation,
                sink_files=files,
                now=now,
                properties=with_positions_of(properties, restored),
            )
            if self._write(made):
                break
            number += 1
        known = self._store.job_log
        retained, dropped = retain(known.retained, number, self._num_retained)
        self._store.complete(number, self._paths.metadata(number), made.batch_id, retained, dropped)
        log.info(
            "job %s: checkpoint %d has checkpoint %d and the durable epochs up to %d",
            self._paths.job,
            number,
            restored.checkpoint_id,
            made.batch_id,
        )
        return made

    def _write(self, metadata: CheckpointMetadata) -> bool:
        """Create `_metadata`; False if a driver that was taken over has written another one there."""
        path, data = self._paths.metadata(metadata.checkpoint_id), encode(metadata)
        # The files of epochs may be crafted. Nobody could restore a checkpoint that is refused.
        decode(data, f"{path}, before it is written", Home(self._paths.job, metadata.checkpoint_id, self._others))

        def attempt() -> bool:
            self._store.check_not_fenced()
            try:
                self._storage.create(path, data)
            except AlreadyExistsError:
                return self._storage.read(path) == data
            return True

        return self._store.retries.call(f"job {self._paths.job}: writing {path}", attempt)
