"""Settings that whoever starts a script lays over its jobs, as `strandline run` does."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from strandline.config import Config
from strandline.runtime.driver.restore.takeover import ClaimMode


@dataclass(frozen=True, slots=True)
class StartArguments:
    """What `Job.start` was asked for, as far as an overlay can change it."""

    restore: str | None = None
    parallelism: int | None = None
    claim_mode: ClaimMode = "no_claim"
    allow_non_restored_state: bool = False
    repeat_rows: bool = False


@dataclass(frozen=True, slots=True)
class Overlay:
    """Settings over those that a script gives to its jobs. What is None or False leaves the script's own."""

    job: str | None = None
    """The only job that takes the settings; None for every job of the script."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of `Config`, with the keys of `Config.from_mapping`."""
    restore: str | None = None
    parallelism: int | None = None
    claim_mode: ClaimMode | None = None
    allow_non_restored_state: bool = False
    repeat_rows: bool = False
    take_over: bool = True
    """Whether a job may be taken over from another process of this host that runs it."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing that a job could take."""
        return replace(self, take_over=True) == Overlay()


class Overlaid:
    """An overlay in force, and the jobs that came by."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay
        self.started: list[str] = []
        """The names of the jobs that were started, whether the overlay is for them or not."""
        self._restored: set[str] = set()

    def config(self, job: str, config: Config) -> Config:
        """The config that a job runs with. Raises `ConfigError` as `Config.from_mapping` does."""
        return config.with_mapping(self.overlay.options) if self._is_for(job) and self.overlay.options else config

    def start(self, job: str, given: StartArguments) -> StartArguments:
        """The arguments that a job starts with.

        The savepoint counts for the first start of a job: a script that starts its job again goes on from where the
        job was, not from the savepoint once more.
        """
        self.started.append(job)
        if not self._is_for(job):
            return given
        over = self.overlay
        if over.restore is not None and job not in self._restored:
            self._restored.add(job)
            given = replace(given, restore=over.restore)
        if over.parallelism is not None:
            given = replace(given, parallelism=over.parallelism)
        if over.claim_mode is not None:
            given = replace(given, claim_mode=over.claim_mode)
        return replace(
            given,
            allow_non_restored_state=given.allow_non_restored_state or over.allow_non_restored_state,
            repeat_rows=given.repeat_rows or over.repeat_rows,
        )

    def untaken(self) -> str | None:
        """Why no job took the settings, in words; None if one did, or if there are no settings."""
        wanted = self.overlay.job
        if self.overlay.empty or any(self._is_for(job) for job in self.started):
            return None
        if wanted is None or not self.started:
            return "the script started no job, so nothing took the settings of the command line"
        names = ", ".join(sorted(set(self.started)))
        nearest = difflib.get_close_matches(wanted, self.started, n=1, cutoff=0.0)[0]
        return f"the script started no job {wanted!r}; it started {names}; did you mean --job {nearest}?"

    def _is_for(self, job: str) -> bool:
        return self.overlay.job in (None, job)


_in_force: Overlaid = Overlaid(Overlay())


def lay_over(overlay: Overlay) -> Overlaid:
    """Put `overlay` in force for every job that this process makes from now on."""
    global _in_force
    _in_force = Overlaid(overlay)
    return _in_force


def overlaid() -> Overlaid:
    """The overlay in force; an empty one if there is no other."""
    return _in_force
