"""The command `strandline list`: the jobs of this host, of a server, or of checkpoint directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from strandline.admin.cli.options import Json, StorageOptions, TokenFile, Url, looked_for, print_json

if TYPE_CHECKING:
    from strandline.admin.found_jobs import Where
    from strandline.observe.run_entries import FoundRun

ENDED_TOO: Final = "; {} also lists jobs that have ended."


def list_jobs(
    checkpoint_dirs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT_DIR",
            help="List the jobs of these directories; without any, this host's.",
            show_default=False,
        ),
    ] = None,
    running: Annotated[bool, typer.Option("--running", "-r", help="Only jobs that run.")] = False,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that have ended.")] = False,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """List jobs: those that run, and those whose driver is gone.

    On this host, jobs of this user are listed, for a day after their end. A checkpoint directory (a folder, or a URL
    such as s3://bucket/checkpoints) knows the jobs that keep their checkpoints there, wherever they run.
    """
    where = looked_for(url, token_file, checkpoint_dirs, storage_option)
    from strandline.admin.found_jobs import entry_facts, known_runs, newest_of_each

    runs = _served_runs(where) if where.url else known_runs(where)
    damaged = [run for run in runs if run.problem]
    shown = [run for run in newest_of_each(runs) if _wanted(run.liveness, running=running, everything=everything)]
    if as_json:
        print_json([entry_facts(run) for run in [*shown, *damaged]])
        return
    ended_too = ENDED_TOO.format("-a without -r" if running else "-a")
    _print_runs(shown, damaged, where, "." if everything and not running else ended_too)


def _wanted(liveness: str, *, running: bool, everything: bool) -> bool:
    return liveness == "alive" or (everything and not running) or (liveness == "dead" and not running)


def _print_runs(shown: list[FoundRun], damaged: list[FoundRun], where: Where, hidden: str) -> None:
    """`hidden` says, after the words that there is no job, how to see others."""
    from rich.table import Table
    from rich.text import Text

    from strandline.admin.cli.console import SafeConsole
    from strandline.admin.cli.words import moment, one_line
    from strandline.admin.found_jobs import run_words

    console = SafeConsole()
    if not shown:
        directories = ", ".join(map(one_line, where.checkpoint_dirs))
        place = f"at {one_line(where.url)}" if where.url else f"in {directories}" if directories else "on this host"
        console.print(f"No jobs {place}{hidden}", soft_wrap=True)
    else:
        table = Table(box=None, header_style="dim", padding=(0, 1))
        for name in ("job", "id", "status", "since (UTC)", "where"):
            table.add_column(name, overflow="fold", no_wrap=name in ("id", "since (UTC)"))
        for run in shown:
            entry = run.entry
            style = "green" if run.alive else "red" if run.liveness == "dead" else "dim"
            place = entry.rest_url if run.alive and entry.rest_url else f"{entry.user}@{entry.host} {entry.pid}"
            table.add_row(
                Text(one_line(entry.job), style="bold"),
                Text(entry.job_id[:12]),
                Text(one_line(run_words(run)), style=style),
                Text(moment(entry.started_ms)),
                Text(one_line(place)),
            )
        console.print(table)
    for run in damaged:
        SafeConsole(stderr=True).print(Text(one_line(run.problem, 400), style="yellow"), soft_wrap=True)


def _served_runs(where: Where) -> list[FoundRun]:
    """The runs that a server shows, as if their entries had been found."""
    from strandline.admin.found_jobs import given_token
    from strandline.admin.rest_client import RestClient
    from strandline.observe.run_entries import FoundRun, RunEntry

    client = RestClient(where.url, given_token(where))
    found = []
    for id, _name in client.jobs():
        facts = client.facts(id)
        driver = facts.driver
        entry = RunEntry(
            job=facts.name,
            job_id=facts.id,
            run=facts.run,
            user=driver.user,
            host=driver.host,
            host_id="",
            pid=driver.pid,
            pid_started=0,
            started_ms=facts.start_ms,
            checkpoint_dir=facts.checkpoint_dir,
            status=facts.status,
            rest_url=driver.ui_url,
            beat_ms=facts.taken_ms,
        )
        found.append(FoundRun(entry, "alive" if facts.runs else "dead" if facts.driver_lost else "ended", client.url))
    return found
