"""The command `strandline logs`: the end of the log of a process of a job, also after the job ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import typer

from strandline.admin.cli.options import (
    CheckpointDirs,
    JobName,
    Json,
    StorageOptions,
    TokenFile,
    Url,
    looked_for,
    print_json,
)
from strandline.admin.problems import NotReachedError, NotRunningError, UsageError
from strandline.errors import StrandlineError
from strandline.redaction import without_controls

if TYPE_CHECKING:
    from strandline.observe.views import LogText

LOG_BYTES: Final = 1_000_000
FOLLOW_SECONDS: Final = 1.0

Read = Callable[[], "LogText"]


def logs(
    job: JobName,
    subtask: Annotated[int | None, typer.Option("--subtask", min=0, help="The slot of this number.")] = None,
    task_manager: Annotated[
        str | None, typer.Option("--task-manager", metavar="ID", help="The task manager of this name.")
    ] = None,
    driver: Annotated[bool, typer.Option("--driver", help="The driver; so it is without any of these.")] = False,
    lines: Annotated[int, typer.Option("--lines", min=1, help="How many of the last lines.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with lines that are added, until the job ends.")
    ] = False,
    checkpoint_dir: CheckpointDirs = None,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Print the end of the log of a process: of the driver, a task manager, or the slot of a subtask."""
    if sum((subtask is not None, task_manager is not None, driver)) > 1:
        raise UsageError("give one of --subtask, --task-manager and --driver")
    if follow and as_json:
        raise UsageError("--json prints one document, so it does not go with --follow")
    where = looked_for(url, token_file, checkpoint_dir, storage_option)
    from strandline.admin.found_jobs import find_job
    from strandline.admin.job_facts import logs_of

    found = logs_of(find_job(job, where), where)
    name = _chosen(found.names(), subtask, task_manager)
    read: Read = lambda: found.read(name, LOG_BYTES)  # noqa: E731 - it is given on
    text = read()
    if as_json:
        shown = text.text.splitlines()
        print_json({"process": text.process, "cut": text.cut or len(shown) > lines, "lines": shown[-lines:]})
        return
    _print("\n".join(text.text.splitlines()[-lines:]))
    if not text.text:
        typer.echo(f"The log of {name} is empty. Lines below WARNING need a level in the logging of the job.", err=True)
    if follow and found.grow:
        _follow(read, text.text)


def _chosen(names: list[str], subtask: int | None, task_manager: str | None) -> str:
    """The process that was asked for. Raises `StrandlineError` that lists those that have a log."""
    wanted = f"slot-{subtask}" if subtask is not None else task_manager if task_manager is not None else "driver"
    found = [name for name in names if name == wanted] or [
        name for name in names if task_manager is not None and name == f"task-manager-{task_manager}"
    ]
    if not found:
        known = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
        raise StrandlineError(f"there is no log of {wanted}; there are logs of: {known or 'no process'}")
    return found[0]


def _follow(read: Read, before: str) -> None:
    """Print what is added to a log, until the job has ended."""
    while True:
        time.sleep(FOLLOW_SECONDS)
        try:
            now = read().text
        except NotRunningError:
            return
        except NotReachedError:
            continue  # a busy driver answers again
        _print(added(before, now))
        before = now


def added(before: str, now: str) -> str:
    """What was added to the end of a log, of which only the end is known.

    The two texts overlap, unless so much was added that the text before is gone.
    """
    if now.startswith(before):
        return now[len(before) :]
    tail = before[-2000:]
    at = now.rfind(tail) if tail else -1
    return now[at + len(tail) :] if at >= 0 else now


def _print(text: str) -> None:
    shown = without_controls(text).encode("utf-8", "backslashreplace").decode()
    if shown:
        typer.echo(shown, nl=not shown.endswith("\n"))
