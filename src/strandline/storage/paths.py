"""Where every file of a job lies in durable storage."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from strandline.errors import JobDefinitionError

_JOB = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,200}", re.ASCII)
_NUMBER = r"(0|[1-9][0-9]*)"


@dataclass(frozen=True, slots=True)
class JobPaths:
    """The paths of one job, relative to the storage's root; nobody else puts such a path together or takes one apart.

    The layout is Flink's, with the job's name for its id: `<job>/{shared/, taskowned/, chk-N/_metadata, log/}`.
    A name that is not allowed is a `JobDefinitionError`.
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
        """The folder of everything below."""
        return self.job

    @property
    def log_dir(self) -> str:
        """The folder of the log of takeovers and completions."""
        return f"{self.root}/log"

    def log_entry(self, n: int) -> str:
        """Entry `n` of the log; the order of the paths is the order of the numbers."""
        return f"{self.log_dir}/{_natural(n):020d}.json"

    def parse_log_entry(self, path: str) -> int | None:
        """The number of the log entry at `path`, or None if it is something else."""
        match = re.fullmatch(r"([0-9]{20})\.json", self._below(self.log_dir, path), re.ASCII)
        return int(match.group(1)) if match else None

    def checkpoint_dir(self, checkpoint_id: int) -> str:
        """The folder of what belongs to one checkpoint alone."""
        return f"{self.root}/chk-{_natural(checkpoint_id)}"

    def metadata(self, checkpoint_id: int) -> str:
        """The file that makes a folder a checkpoint."""
        return f"{self.checkpoint_dir(checkpoint_id)}/_metadata"

    def parse_metadata(self, path: str) -> int | None:
        """The id of the checkpoint whose `_metadata` is at `path`, or None if it is something else."""
        match = re.fullmatch(rf"chk-{_NUMBER}/_metadata", self._below(self.root, path), re.ASCII)
        return int(match.group(1)) if match else None

    def exclusive(self, checkpoint_id: int, unique: str) -> str:
        """A file that one checkpoint alone refers to."""
        return f"{self.checkpoint_dir(checkpoint_id)}/{unique}"

    @property
    def shared_dir(self) -> str:
        """The folder of files that several checkpoints may refer to."""
        return f"{self.root}/shared"

    def shared(self, unique: str) -> str:
        """A file that several checkpoints may refer to."""
        return f"{self.shared_dir}/{unique}"

    @property
    def taskowned_dir(self) -> str:
        """The folder of files that the coordinator never deletes."""
        return f"{self.root}/taskowned"

    @classmethod
    def split_checkpoint(cls, location: str) -> tuple[str, JobPaths, int] | None:
        """Take the path of a checkpoint's directory, or of its `_metadata`, apart: root, job and number.

        None if it does not look like one. A local path comes back absolute.
        """
        place = location
        if "://" not in location:
            place = os.path.abspath(os.path.expanduser(location))
        place = place.rstrip("/").removesuffix("/_metadata")
        parent, _, name = place.rpartition("/")
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
