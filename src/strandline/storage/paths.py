"""The path of every file of a job in durable storage."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from strandline.errors import JobDefinitionError

_JOB = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]{0,17})"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """Builds and parses the paths of one job, relative to the storage's root. No other code does.

    The layout is Flink's, with the job's name as the id: `<job>/{shared/, chk-N/_metadata, log/}`. Flink's `taskowned/`
    does not exist here, because the coordinator owns every file. Raises `JobDefinitionError` for a forbidden name.
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

    def probe(self, unique: str) -> str:
        """The path of a file that a driver creates and deletes, to learn whether the storage can fence drivers."""
        return self.shared(f"{unique}-probe")

    def is_probe(self, path: str) -> bool:
        """Whether `path` is that of a probe."""
        return re.fullmatch(r"[0-9a-f]+-probe", self._below(self.shared_dir, path), re.ASCII) is not None

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
