"""The path of every file of a job in durable storage."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from strandline.errors import JobDefinitionError

_JOB = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]{0,17})"
_RUN = r"(?P<run>[0-9A-Za-z-]{1,64})"
_HISTORY = re.compile(
    rf"(?P<started>[0-9]{{15}})-{_RUN}/(?:entry\.json|(?P<number>[0-9]{{8}})\.(?P<kind>part|whole))", re.ASCII
)
_LOG = re.compile(rf"{_RUN}/(?P<process>(?!\.)[0-9A-Za-z._-]{{1,100}})\.log", re.ASCII)


@dataclass(frozen=True, slots=True)
class HistoryFile:
    """A file in the history of a run: its entry, if there is no number, or a part of its history."""

    started_ms: int
    run: str
    number: int | None
    whole: bool


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Builds and parses the paths of one job, relative to the storage's root. No other code does.

    The layout is Flink's, with the job's name as the id: `<job>/{shared/, chk-N/_metadata, log/}`. Flink's
    `taskowned/` does not exist here, because the coordinator owns every file. Flink does not have `epochs/`, epochs in
    real time that no checkpoint needs to cover, `history/`, what happened to the runs of the job, `staged/`, rows that
    wait for their sinks, and `sinks/`, what tasks must know of a target. Raises `JobDefinitionError` for a forbidden
    name.
    """

    job: str

    def __post_init__(self) -> None:
        if not _JOB.fullmatch(self.job):
            raise JobDefinitionError(
                f"the job name {self.job!r} cannot be used in a path; allowed: 1 to 200 letters (a-z, A-Z), digits, "
                "'-', '_' and '.', and no '.' at the start"
            )

    @property
    def root(self) -> str:
        """The folder that holds all files of the job."""
        return self.job

    @property
    def log_dir(self) -> str:
        """The folder of the log of takeovers and completions."""
        return f"{self.root}/log"

    def log_entry(self, n: int) -> str:
        """The path of log entry `n`. Paths sort in the order of their numbers."""
        return f"{self.log_dir}/{_natural(n):020d}.json"

    def parse_log_entry(self, path: str) -> int | None:
        """The number of the log entry at `path`, or None if `path` is not a log entry."""
        match = re.fullmatch(r"([0-9]{20})\.json", self._below(self.log_dir, path), re.ASCII)
        return int(match.group(1)) if match else None

    def checkpoint_dir(self, checkpoint_id: int) -> str:
        """The folder of the files that belong to one checkpoint alone."""
        return f"{self.root}/chk-{_natural(checkpoint_id)}"

    def metadata(self, checkpoint_id: int) -> str:
        """The path of the `_metadata` file. A folder with this file is a checkpoint."""
        return f"{self.checkpoint_dir(checkpoint_id)}/_metadata"

    def parse_metadata(self, path: str) -> int | None:
        """The id of the checkpoint whose `_metadata` is at `path`, or None if `path` is not a `_metadata` file."""
        match = re.fullmatch(rf"chk-{_NUMBER}/_metadata", self._below(self.root, path), re.ASCII)
        return int(match.group(1)) if match else None

    def exclusive(self, checkpoint_id: int, unique: str) -> str:
        """The path of a file that only this checkpoint refers to."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{unique}"

    @property
    def shared_dir(self) -> str:
        """The folder of files that several checkpoints may refer to."""
        return f"{self.root}/shared"

    def shared(self, unique: str) -> str:
        """The path of a file that several checkpoints may refer to."""
        return f"{self.shared_dir}/{unique}"

    @property
    def epochs_dir(self) -> str:
        """The folder of the files that make epochs durable by themselves, with a folder for each generation."""
        return f"{self.root}/epochs"

    def epochs(self, generation: int, number: int) -> str:
        """The path of the file of epochs whose first one has this number in its generation."""
        return f"{self.epochs_dir}/{_natural(generation)}/{_natural(number):020d}"

    def parse_epochs(self, path: str) -> tuple[int, int] | None:
        """The generation of the epochs at `path` and the number of the first one; None for another file."""
        match = re.fullmatch(rf"{_NUMBER}/([0-9]{{20}})", self._below(self.epochs_dir, path), re.ASCII)
        return (int(match[1]), int(match[2])) if match else None

    @property
    def staged_dir(self) -> str:
        """The folder of rows that wait until the target of their sink has them."""
        return f"{self.root}/staged"

    @property
    def sinks_dir(self) -> str:
        """The folder of what the driver tells tasks of the targets of sinks."""
        return f"{self.root}/sinks"

    def probe(self, unique: str) -> str:
        """The path of a file that a driver creates and deletes, to learn whether the storage can fence drivers."""
        return self.shared(f"{unique}-probe")

    def is_probe(self, path: str) -> bool:
        """Whether `path` is that of a probe."""
        return re.fullmatch(r"[0-9a-f]+-probe", self._below(self.shared_dir, path), re.ASCII) is not None

    @property
    def history_dir(self) -> str:
        """The folder of what happened to the runs of the job. No checkpoint needs anything in it."""
        return f"{self.root}/history"

    def is_history(self, path: str) -> bool:
        """Whether `path` lies in the history."""
        return path.startswith(f"{self.history_dir}/")

    @property
    def history_runs_dir(self) -> str:
        """The folder with a folder for every run in the history."""
        return f"{self.history_dir}/runs"

    def history_run(self, started_ms: int, run: str) -> str:
        """The folder of one run. The folders of later runs sort behind those of earlier ones."""
        return f"{self.history_runs_dir}/{_natural(started_ms):015d}-{run}"

    def run_entry(self, started_ms: int, run: str) -> str:
        """The path of the entry by which a run can be found."""
        return f"{self.history_run(started_ms, run)}/entry.json"

    def history_part(self, started_ms: int, run: str, number: int, *, whole: bool) -> str:
        """The path of part `number` of a run's history; a `whole` part repeats all parts before it."""
        return f"{self.history_run(started_ms, run)}/{_natural(number):08d}.{'whole' if whole else 'part'}"

    def parse_history(self, path: str) -> HistoryFile | None:
        """What the file at `path` is in the history of a run, or None if it is something else."""
        match = _HISTORY.fullmatch(self._below(self.history_runs_dir, path))
        if match is None:
            return None
        number = None if match["number"] is None else int(match["number"])
        return HistoryFile(int(match["started"]), match["run"], number, match["kind"] == "whole")

    def is_of_history(self, path: str) -> bool:
        """Whether `path` is that of a file that a run writes into the history."""
        return self.parse_history(path) is not None or self.parse_history_log(path) is not None

    def history_logs_dir(self, run: str) -> str:
        """The folder of the ends of logs of a run's processes."""
        return f"{self.history_dir}/logs/{run}"

    def history_log(self, run: str, process: str) -> str:
        """The path of the end of the log of one process."""
        return f"{self.history_logs_dir(run)}/{process}.log"

    def parse_history_log(self, path: str) -> tuple[str, str] | None:
        """The run and the process whose log is at `path`, or None if `path` is no such log."""
        match = _LOG.fullmatch(self._below(f"{self.history_dir}/logs", path))
        return (match["run"], match["process"]) if match else None

    @classmethod
    def split_checkpoint(cls, location: str) -> tuple[str, JobPaths, int] | None:
        """Split the path of a checkpoint's folder, or of its `_metadata`, into root, job and checkpoint id.

        Returns None if `location` is not such a path. A local root is returned as an absolute path.
        """
        full = location
        if "://" not in location:
            full = os.path.abspath(os.path.expanduser(location))
        full = full.rstrip("/").removesuffix("/_metadata")
        parent, _, name = full.rpartition("/")
        root, _, job = parent.rpartition("/")
        try:
            paths = cls(job)
        except JobDefinitionError:
            return None
        number = paths.parse_metadata(f"{paths.root}/{name}/_metadata")
        if number is None or root.endswith(":/"):
            return None
        return root or "/", paths, number

    @staticmethod
    def _below(folder: str, path: str) -> str:
        return path.removeprefix(f"{folder}/") if path.startswith(f"{folder}/") else ""


def _natural(n: int) -> int:
    if n < 0:
        raise ValueError(f"log entries and checkpoints are numbered from 0, not {n}")
    return n
