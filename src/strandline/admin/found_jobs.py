"""Finds the job that a user means: by name, id or the beginning of an id; on this host, at a URL, or in storage."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from strandline.admin.problems import NoSuchJobError, NotAllowedError, NotReachedError, NotRunningError, UsageError
from strandline.admin.rest_client import RestClient
from strandline.errors import AuthenticationError
from strandline.observe.registration import local_runs, read_token, runs_in
from strandline.observe.run_entries import FoundRun, RunEntry

TOKEN_VARIABLE: Final = "STRANDLINE_TOKEN"
SHOWN_CANDIDATES: Final = 10
MAX_TOKEN: Final = 4096

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Where:
    """Where jobs are looked for: at a server, in checkpoint directories, or else on this host.

    Attributes:
        url: The address of a server; empty for none.
        token_file: The file with its token; without one, the environment variable `STRANDLINE_TOKEN` counts.
        checkpoint_dirs: Directories with checkpoints of jobs, which may run elsewhere or have ended.
        storage_options: The settings of their storage.
    """

    url: str = ""
    token_file: str = ""
    checkpoint_dirs: tuple[str, ...] = ()
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that somebody named.

    Attributes:
        id: Its id.
        name: Its name.
        run: The entry of its newest run; None for a job at a server that the user named.
        served: Its server; None if the server cannot be reached from here with what is known.
    """

    id: str
    name: str
    run: FoundRun | None
    served: RestClient | None
    no_token: str = ""
    """Why there is no token for the server: reading may go without one, steering does not."""

    def steered(self) -> RestClient:
        """Its server, for calls that need the token. Raises as `client` does, and `NotAllowedError` without a token."""
        client = self.client()
        if self.no_token:
            raise NotAllowedError(self.no_token)
        return client

    def client(self) -> RestClient:
        """Its server. Raises `NotRunningError` if the job has ended, and `NotReachedError` if it runs elsewhere."""
        if self.served is not None:
            return self.served
        assert self.run is not None
        entry = self.run.entry
        if not self.run.alive:
            raise NotRunningError(f"job {self.name!r} does not run: {run_words(self.run)}")
        if not entry.rest_url:
            raise NotReachedError(
                f"job {self.name!r} runs without a REST server (rest_port='off'), so it cannot answer"
            )
        raise NotReachedError(
            f"job {self.name!r} runs on {entry.host} as user {entry.user}, process {entry.pid}, and its token is not "
            f"here: run the command there, or give --url {entry.rest_url} and --token-file FILE"
        )


def find_job(reference: str, where: Where) -> FoundJob:
    """The job that `reference` means.

    Raises `NoSuchJobError` if there is none or more than one; the error names the candidates.
    """
    if where.url:
        client = RestClient(where.url, given_token(where))
        known = client.jobs()
        id, name = _chosen(reference, [(id, name, (id, name), name) for id, name in known], f"at {client.url}")
        return FoundJob(id, name, None, client)
    runs = newest_of_each(known_runs(where))
    place = f"in {', '.join(where.checkpoint_dirs)}" if where.checkpoint_dirs else "of this user on this host"
    candidates = [
        (run.entry.job_id, run.entry.job, run, f"{run.entry.job} in {run.entry.checkpoint_dir}: {run_words(run)}")
        for run in runs
    ]
    run = _chosen(reference, candidates, place, [row for row in candidates if row[2].alive])
    return _found(run, where)


def known_runs(where: Where) -> list[FoundRun]:
    """All runs there; those of this host first, because their tokens are here. Damaged entries are among them."""
    here = local_runs()
    if not where.checkpoint_dirs:
        return here
    stored = [run for place in where.checkpoint_dirs for run in runs_in(place, where.storage_options)]
    return [next((own for own in here if _is_entry_of(own, run)), run) for run in stored]


def _is_entry_of(own: FoundRun, stored: FoundRun) -> bool:
    """Whether an entry of this host is that of a run in storage. A copy of a directory is not the job's directory."""
    mine, other = own.entry, stored.entry
    if own.problem or (mine.run, mine.job) != (other.run, other.job):
        return False
    if mine.checkpoint_dir == other.checkpoint_dir:
        return True
    try:
        return os.path.samefile(mine.checkpoint_dir, other.checkpoint_dir)  # by a link, or mounted twice
    except (OSError, ValueError):
        return False


def newest_of_each(runs: Iterable[FoundRun]) -> list[FoundRun]:
    """The run of each job that counts: one that is alive, or else the newest. Damaged entries are left out."""
    chosen: dict[str, FoundRun] = {}
    for run in runs:
        if run.problem:
            continue
        other = chosen.get(run.entry.job_id)
        if other is None or (run.alive, run.entry.started_ms) > (other.alive, other.entry.started_ms):
            chosen[run.entry.job_id] = run
    return sorted(chosen.values(), key=lambda run: (run.alive, run.entry.started_ms), reverse=True)


def run_words(run: FoundRun) -> str:
    """Where a run stands, in a few words."""
    entry = run.entry
    if run.problem:
        return run.problem
    if run.alive:
        return str(entry.status)
    return f"{entry.status}" if run.liveness == "ended" else f"driver lost, last seen {entry.status}"


def given_token(where: Where) -> str | None:
    """The token that the user gave. Raises `UsageError` if its file cannot be read."""
    if not where.token_file:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        with Path(where.token_file).open(encoding="ascii") as file:
            token = file.read(MAX_TOKEN).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no token"
        raise UsageError(f"the token file {where.token_file} cannot be read: {reason}") from None
    if not token or not token.isprintable() or " " in token:
        raise UsageError(f"the token file {where.token_file} holds no token")
    return token


def _found(run: FoundRun, where: Where) -> FoundJob:
    """A job with its server, if it runs on this host. A URL from storage is never called: anybody can write there."""
    entry = run.entry
    here = any(run.source == other.source and not other.problem for other in local_runs())
    if not here or not run.alive or not entry.rest_url:
        return FoundJob(entry.job_id, entry.job, run, None)
    token, problem = None, ""
    if where.token_file:
        token = given_token(where)
    else:
        try:
            token = read_token(run)
        except AuthenticationError as error:
            problem = str(error)
    return FoundJob(entry.job_id, entry.job, run, RestClient(entry.rest_url, token), problem)


Row = tuple[str, str, T, str]
"""A candidate: id, name, what it stands for, and how an error shows it."""


def _chosen(reference: str, rows: Sequence[Row[T]], place: str, preferred: Sequence[Row[T]] = ()) -> T:
    for candidates in (preferred, rows):
        found = _matching(reference, candidates)
        if len(found) == 1:
            return found[0][2]
        if found:
            shown = "\n".join(f"  {id}  {words}" for id, _name, _one, words in found[:SHOWN_CANDIDATES])
            more = f"\n  and {len(found) - SHOWN_CANDIDATES} more" if len(found) > SHOWN_CANDIDATES else ""
            raise NoSuchJobError(f"{len(found)} jobs {place} match {reference!r}; give more of the id:\n{shown}{more}")
    if not rows:
        raise NoSuchJobError(f"there is no job {reference!r} {place}: there is none at all")
    names = sorted({name for _id, name, _one, _words in rows})
    nearest = "".join(f"the nearest is {name!r}, and " for name in difflib.get_close_matches(reference, names, n=1))
    shown = ", ".join(names[:SHOWN_CANDIDATES]) + (", …" if len(names) > SHOWN_CANDIDATES else "")
    raise NoSuchJobError(f"there is no job {reference!r} {place}; {nearest}there are: {shown}")


def _matching(reference: str, rows: Sequence[Row[T]]) -> list[Row[T]]:
    """The rows of that id; or else of that name; or else those whose id begins so."""
    by_id = [row for row in rows if row[0] == reference]
    by_name = [row for row in rows if row[1] == reference]
    by_beginning = [row for row in rows if reference and row[0].startswith(reference.lower())]
    return by_id or by_name or by_beginning


def entry_facts(run: FoundRun) -> dict[str, object]:
    """An entry as plain values, for `--json`."""
    entry: RunEntry = run.entry
    return {
        "id": entry.job_id,
        "name": entry.job,
        "run": entry.run,
        "status": str(entry.status),
        "liveness": run.liveness,
        "user": entry.user,
        "host": entry.host,
        "pid": entry.pid,
        "started_ms": entry.started_ms,
        "seen_ms": entry.beat_ms,
        "url": entry.rest_url,
        "checkpoint_dir": entry.checkpoint_dir,
        "problem": run.problem,
    }
