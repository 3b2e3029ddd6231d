"""The steps of a trial's job: start, input, rescale, savepoint, restore, garbage collection, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import strandline as sl
from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.errors import StrandlineError
from strandline.storage import open_storage
from strandline_bench.chaos.job import JOB, Place

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRIES: Final = 4
"""How often a step is tried: its caller is told of a failure, and tries again."""

PAUSE: Final = 0.5
"""Seconds between two tries."""


class Teller:
    """Carries the steps of one trial out, and notes what its caller was told."""

    def __init__(self, place: Place, spark: SparkSession, faults: dict[str, str]) -> None:
        self.place = place
        self.notes: list[str] = []
        """Errors that the caller of a step saw. They are allowed: the caller tries again."""
        self.deaths: list[str] = []
        """Errors that ended a run. One fault must not end a run."""
        self.recoveries: list[tuple[float, float, str]] = []
        """Beginning (seconds since the epoch), seconds, and kind of every recovery."""
        self.starts: list[float] = []
        """The seconds that `job.start` took."""
        self._spark = spark
        self.faults = faults
        """Options of the storage with faults."""
        self._run: sl.JobRun | None = None
        self._options: dict[str, Any] = {}

    def tell(self) -> None:
        """The whole story of the variant, until its last `stop`."""
        story: Callable[[], None] = getattr(self, "_" + self.place.variant.story.replace("-", "_"))
        story()

    # --- the stories -----------------------------------------------------------------------------

    def _plain(self) -> None:
        self.start()
        self.process(2)
        self.place.write(1)
        self._step("checkpoint", lambda run: run.trigger_checkpoint())
        self.process(1)
        self.stop()

    def _each_batch(self) -> None:
        self.start()
        self.process(3)
        self.stop()

    def _rescale(self) -> None:
        self.start()
        self.process(2)
        self._step("rescale", lambda run: run.rescale(3))
        self.process(1)
        self._step("rescale", lambda run: run.rescale(1))
        self.process(1)
        self.stop()

    def _savepoint(self) -> None:
        self.start()
        self.process(2)
        path = self._step("savepoint", lambda run: run.savepoint(f"faulty+file://{self.place.savepoints}"))
        self.process(1)
        self.stop()
        self.start(restore=path, parallelism=3)
        self.process(1)
        self.stop()

    def _back(self) -> None:
        self._options = {"num_retained": 3, "checkpoint_interval": "1h"}
        self.start()
        for _ in range(3):
            self.process(1)
        self.stop()
        older = sorted(int(path.parent.name[4:]) for path in self.place.checkpoints.glob(f"{JOB}/chk-*/_metadata"))[-2]
        mode = "claim" if self.place.variant.changelog else "no_claim"
        self.start(restore=f"faulty+file://{self.place.checkpoints}/{JOB}/chk-{older}", claim_mode=mode)
        self.process(1)
        self._step("gc", lambda _run: self._collect_garbage())
        self.process(1)
        self.stop()

    def _cancel(self) -> None:
        self.start()
        self.process(2)
        self.place.write(1)
        self._step("cancel", lambda run: run.cancel())
        self._ended()
        self.start()
        self.process(1)
        self.stop()

    # --- the steps -------------------------------------------------------------------------------

    def start(self, **how: Any) -> None:
        """Start the job. A start that fails is repeated in the same way."""
        config = self.place.config(self.faults, **self._options)
        for attempt in range(TRIES):
            began = time.monotonic()
            try:
                self._run = self.place.job(self._spark, config).start(**how)
                self.starts.append(time.monotonic() - began)
                return
            except StrandlineError as error:
                if attempt == TRIES - 1:
                    raise
                self.notes.append(f"start: {type(error).__name__}: {error}")
                time.sleep(PAUSE)

    def process(self, files: int) -> None:
        """Write so many input files, and wait until they are covered."""
        self.place.write(files)
        self._step("process", lambda run: run.process_all_available())

    def stop(self) -> None:
        """End the run in good order. If that fails, the rows that are not covered are left for the next start."""
        if self._run is None:
            return
        try:
            self._run.stop()
        except StrandlineError as error:
            self.notes.append(f"stop: {type(error).__name__}: {error}")
        self._ended()

    def _ended(self) -> None:
        if self._run is not None:
            self.recoveries += [(one.time, one.duration_ms / 1000, one.kind) for one in self._run.recoveries()]
            self._run = None

    def _step(self, name: str, act: Callable[[sl.JobRun], Any]) -> Any:
        for attempt in range(TRIES):
            if self._run is None:
                self.start()
            assert self._run is not None
            try:
                return act(self._run)
            except StrandlineError as error:
                text = f"{name}: {type(error).__name__}: {error}"
                if attempt == TRIES - 1:
                    raise
                self.notes.append(text)
                if self._run.status in ("failed", "cancelled", "stopped"):
                    self.deaths.append(text)
                    self._ended()
                time.sleep(PAUSE)
        return None

    def _collect_garbage(self) -> None:
        """What `strandline checkpoints gc --min-age 0` does beside a live run."""
        storage = open_storage(f"faulty+file://{self.place.checkpoints}", self.faults)
        delete_garbage(storage, find_garbage(storage, JOB, now=time.time(), min_age=0.0))

    def give_up(self) -> None:
        """End the run whatever its state, so that nothing of it is in the way of what follows."""
        if self._run is not None:
            with suppress(StrandlineError):
                self._run.cancel()
            self._ended()
