"""A job that can be steered without Spark: it waits where a real one works."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import StorageError
from strandline.observe.views import Folded
from strandline.runtime.driver.recoveries import Rescaling
from strandline.runtime.driver.restore.savepoints import SavepointFormat
from tests.observe.generated import generated_facts


@dataclass
class SteeredJob:
    """Answers as a job does. Operations end when `go_on` is set."""

    go_on: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[object, ...]] = field(default_factory=list)

    def trigger_checkpoint(self, full: bool = False) -> CheckpointStats:
        self._work("checkpoint", full)
        return generated_facts(samples=0).checkpoints.history[-2]

    def savepoint(self, directory: str | None, format: SavepointFormat) -> str:
        self._work("savepoint", directory, format)
        if directory == "/full":
            raise StorageError("the disk of /full has no space left; free some, and try again")
        return f"{directory}/savepoint-1"

    def stop(self, directory: str | None, format: SavepointFormat, *, drain: bool = False) -> str | None:
        self._work("stop", directory, format, drain)
        return None if directory is None else f"{directory}/savepoint-1"

    def cancel(self) -> None:
        self._work("cancel")

    def rescale(self, parallelism: int, step: Callable[[str], None] = lambda _text: None) -> Rescaling:
        step("taking a last checkpoint")
        self._work("rescale", parallelism)
        return Rescaling(0.0, 2, parallelism, 7, 1.0, 1.0, 1.0, 1.0, 5, 0, 0)

    def profile(self, subtask: int, seconds: float) -> Folded:
        self._work("profile", subtask, seconds)
        return Folded(seconds, 2, {"main;work": 2})

    def _work(self, *what: object) -> None:
        self.asked.append(what)
        assert self.go_on.wait(20), "nobody let the operation go on"
