"""The commands `strandline status` and `strandline top`: one screen about one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from strandline.admin.cli.options import (
    CheckpointDirs,
    JobName,
    Json,
    StorageOptions,
    TokenFile,
    Url,
    duration_option,
    looked_for,
    print_json,
)
from strandline.admin.problems import ExitCode

if TYPE_CHECKING:
    from strandline.observe.catching_up import CatchingUp
    from strandline.observe.facts import JobFacts

Loss = Annotated[
    str, typer.Option("--loss", metavar="DURATION", help="Say how long catching up after such a loss would take.")
]
Subtasks = Annotated[int, typer.Option("--subtasks", min=0, help="How many of the busiest subtasks are shown.")]


def status(
    job: JobName,
    loss: Loss = "60s",
    subtasks: Subtasks = 10,
    check: Annotated[
        bool,
        typer.Option("--check", help="Exit with 1 if a rule of health is broken, and with 4 if the job does not run."),
    ] = False,
    checkpoint_dir: CheckpointDirs = None,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show one job: its health in words, rows per second, lag, state, last checkpoint, back pressure, subtasks.

    The job may have ended, or its driver may be gone: then the screen shows what its history knows.
    """
    from strandline.admin.cli.console import SafeConsole
    from strandline.admin.cli.status_report import healthy, status_facts, status_screen
    from strandline.admin.found_jobs import find_job
    from strandline.admin.job_facts import facts_of

    seconds = duration_option("--loss", loss)
    where = looked_for(url, token_file, checkpoint_dir, storage_option)
    facts = facts_of(find_job(job, where), where)
    catching = _catching_up(facts, seconds)
    if as_json:
        print_json(status_facts(facts, catching))
    else:
        SafeConsole().print(status_screen(facts, catching, subtasks))
    if check and not facts.runs:
        raise typer.Exit(ExitCode.NOT_RUNNING)
    if check and not healthy(facts):
        raise typer.Exit(ExitCode.FAILED)


def _catching_up(facts: JobFacts, loss_seconds: float) -> CatchingUp | None:
    """How long catching up after a loss takes; None if that cannot be told, or if the job does not run."""
    from strandline.observe.catching_up import catching_up

    return catching_up(facts, loss_seconds) if facts.runs else None


def top(
    job: JobName,
    loss: Loss = "60s",
    subtasks: Subtasks = 20,
    url: Url = "",
    token_file: TokenFile = "",
) -> None:
    """Show one job live; q leaves. Without a terminal, one snapshot is printed."""
    from strandline.admin.cli.live_screen import show_live
    from strandline.admin.cli.status_report import status_screen
    from strandline.admin.found_jobs import find_job
    from strandline.admin.job_facts import facts_of

    seconds = duration_option("--loss", loss)
    where = looked_for(url, token_file)
    found = find_job(job, where)

    def screen() -> tuple[object, bool]:
        facts = facts_of(found, where)
        return status_screen(facts, _catching_up(facts, seconds), subtasks), facts.runs

    show_live(screen)
