"""The logs of a run's processes on this host, as their task manager keeps them: bounded, and there after the run."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from strandline.errors import StrandlineError
from strandline.redaction import without_values
from strandline.runtime.protocol.logs import (
    KEPT_BYTES,
    KEPT_RUNS,
    MOST_LOGS,
    LogText,
    ReadLog,
    bound_file,
    in_order,
    log_folder,
    log_names,
    read_end,
    write_ends,
)
from strandline.runtime.protocol.messages import RunInfo
from strandline.runtime.protocol.user_folder import make_private

log = logging.getLogger(__name__)

LOOK_EVERY: Final = 5.0
"""Seconds between two looks at the sizes of log files."""
MOST_KEPT_BYTES: Final = 8_000_000
"""So many bytes of the ends of all logs a host gives: of many logs, shorter ends."""
KEEP_PATIENCE: Final = 10.0
"""Seconds that storage gets to take the ends of logs when the driver is gone."""


class HostLogs:
    """The log files of a run on this host. Any task manager of the run there can read them all."""

    def __init__(self, run: RunInfo) -> None:
        self.folder = make_private(log_folder(run.local_dir, run.job, run.run_id))
        self._run = run
        self._looked = 0.0

    def names(self) -> list[str]:
        return log_names(self.folder)

    def read(self, request: ReadLog) -> LogText:
        end = read_end(self.folder, request)
        # Log lines hold no secrets. What user code and libraries print may.
        return msgspec.structs.replace(end, text=without_values(end.text, self._run.secrets))

    def ends(self) -> dict[str, LogText]:
        """The ends of all logs; those of task managers first."""
        names = in_order(self.names())
        each = min(KEPT_BYTES, MOST_KEPT_BYTES // max(1, len(names)))
        return {name: self.read(ReadLog(name, each)) for name in names[:MOST_LOGS]}

    def look(self) -> None:
        """Bound the files that have grown too large. Cheap enough to be called every second."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY:
            return
        self._looked = now
        for name in self.names():
            with suppress(OSError):  # a full disk: the run will say so elsewhere
                bound_file(self.folder / f"{name}.log")

    def delete_old(self) -> None:
        """Delete the logs of old runs of the job."""
        others = [path for path in self.folder.parent.iterdir() if path != self.folder and path.is_dir()]
        for path in sorted(others, key=_last_written, reverse=True)[KEPT_RUNS - 1 :]:
            shutil.rmtree(path, ignore_errors=True)

    def keep_durably(self) -> None:
        """Write the ends of the logs into the job's history: the driver is gone and cannot. Errors are only logged."""
        thread = threading.Thread(target=self._keep, daemon=True, name="keep-logs")
        thread.start()
        thread.join(KEEP_PATIENCE)

    def _keep(self) -> None:
        try:
            write_ends(self._run, self.ends())
        except (StrandlineError, OSError) as error:
            log.warning("the ends of the logs stay in %s: %s", self.folder, error)


def _last_written(folder: Path) -> float:
    with suppress(OSError):
        return max((path.stat().st_mtime for path in folder.iterdir()), default=folder.stat().st_mtime)
    return 0.0
