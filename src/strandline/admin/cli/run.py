"""The command `strandline run`: starts a script with settings over those of its jobs, here or detached."""

from __future__ import annotations

import os
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strandline.admin.cli.options import Json, print_json, settings_of
from strandline.admin.problems import UsageError
from strandline.errors import ConfigError, StrandlineError
from strandline.logs import FORMAT_VARIABLE
from strandline.redaction import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from strandline.admin.detached import Detached
    from strandline.admin.rest_client import Progress
    from strandline.observe.run_entries import FoundRun


class ClaimModes(StrEnum):
    """Who owns the restored checkpoint."""

    claim = "claim"
    no_claim = "no_claim"


class LogFormats(StrEnum):
    """How log lines look."""

    text = "text"
    json = "json"


def run(
    script: Annotated[str, typer.Argument(metavar="APP.py", help="The script that starts the job.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.", show_default=False)
    ] = None,
    from_savepoint: Annotated[
        str | None,
        typer.Option("--from-savepoint", "-s", metavar="PATH", help="Start from this savepoint or checkpoint."),
    ] = None,
    parallelism: Annotated[
        int | None, typer.Option("--parallelism", "-p", min=1, help="The number of subtasks of each stateful step.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-D",
            metavar="KEY=VALUE",
            help="An option of the job's Config, by our name or Flink's key. KEY=@FILE reads the value from a file; "
            "secrets must be given so. Can be repeated.",
        ),
    ] = None,
    claim_mode: Annotated[
        ClaimModes | None, typer.Option("--claim-mode", help="Who owns what --from-savepoint names.")
    ] = None,
    allow_non_restored_state: Annotated[
        bool,
        typer.Option(
            "--allow-non-restored-state", "-n", help="Leave out stored state that the job does not have any more."
        ),
    ] = False,
    repeat_rows: Annotated[
        bool,
        typer.Option(
            "--repeat-rows",
            help="With -s: go back behind rows that a sink cannot take back; it gets them a second time.",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="If a process of this host runs the job already, end that run at once."),
    ] = False,
    job: Annotated[
        str | None,
        typer.Option("--job", help="The job that takes these settings; without it, every job of the script."),
    ] = None,
    log_format: Annotated[
        LogFormats | None, typer.Option("--log-format", help="How log lines look; json: one object a line.")
    ] = None,
    detached: Annotated[
        bool, typer.Option("--detached", "-d", help="Return once the job runs, and leave it running.")
    ] = False,
    timeout: Annotated[
        str | None,
        typer.Option("--timeout", metavar="DURATION", help="With --detached: how long the start may take; else 3min."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a script as `python APP.py` does, with these settings over those of its jobs.

    Options stand before APP.py or right behind it. All other words are the script's; `--` ends our options.
    """
    options = _checked_options(option)
    if from_savepoint is not None:
        _check_there(from_savepoint)
    if log_format is not None:
        os.environ[FORMAT_VARIABLE] = log_format.value  # also for the process of a detached script
    if detached:
        switches = {
            "--allow-non-restored-state": allow_non_restored_state,
            "--repeat-rows": repeat_rows,
            "--take-over": take_over,
        }
        again = _again(from_savepoint, parallelism, option, claim_mode, job)
        again += [name for name, given in switches.items() if given]
        _detach([*again, "--", script, *(arguments or [])], script, job, timeout or "3min", as_json)
        return
    if as_json:
        raise UsageError("--json goes with --detached: otherwise the output is the script's")
    if timeout is not None:
        raise UsageError("--timeout goes with --detached: it bounds the start of a job that is left running")
    from strandline.admin.script import run_script
    from strandline.job.overlay import Overlay, lay_over

    laid = lay_over(
        Overlay(
            job,
            options,
            from_savepoint,
            parallelism,
            None if claim_mode is None else claim_mode.value,
            allow_non_restored_state,
            repeat_rows,
            take_over,
        )
    )
    code = run_script(script, arguments or [])
    untaken = laid.untaken()
    if code == 0 and untaken is not None:
        raise StrandlineError(f"{script}: {untaken}")
    raise typer.Exit(code)


def _checked_options(pairs: list[str] | None) -> Mapping[str, str]:
    """The options, checked before the script starts. Raises `UsageError` for a wrong one."""
    from strandline.config import Config

    try:
        options = settings_of(pairs, "-D")
    except ConfigError as error:
        raise UsageError(str(error)) from None
    try:
        Config(checkpoint_dir="/").with_mapping(options)
    except ConfigError as error:
        text = str(error)
        for name in {pair.partition("=")[0] for pair in pairs or [] if "=@" in pair}:
            text = text.replace(repr(options[name]), HIDDEN)  # files are the way to give secrets
        raise UsageError(f"-D: {text}") from None
    return options


def _check_there(savepoint: str) -> None:
    """Raise `UsageError` if there is no savepoint or checkpoint at a local path.

    A path in an object store is checked when the job starts: only the script knows how to reach it.
    """
    from strandline.storage.schemes import is_local

    if is_local(savepoint):
        path = Path(savepoint.removeprefix("file://"))
        if not (path if path.name == "_metadata" else path / "_metadata").is_file():
            raise UsageError(f"-s {savepoint}: there is no checkpoint or savepoint: it would have a file _metadata")


def _again(
    from_savepoint: str | None,
    parallelism: int | None,
    option: list[str] | None,
    claim_mode: ClaimModes | None,
    job: str | None,
) -> list[str]:
    """The same command, attached. Values from files are read there."""
    words = [sys.executable, "-m", "strandline.admin.cli.main", "run"]
    given: list[tuple[str, object]] = [
        ("--from-savepoint", from_savepoint),
        ("--parallelism", parallelism),
        *(("--option", pair) for pair in option or []),
        ("--claim-mode", None if claim_mode is None else claim_mode.value),
        ("--job", job),
    ]
    return [*words, *(f"{name}={value}" for name, value in given if value is not None)]


def _detach(command: list[str], script: str, job: str | None, timeout: str, as_json: bool) -> None:
    from strandline.admin.cli.options import duration_option
    from strandline.admin.cli.progress import progress_of
    from strandline.admin.detached import start_detached
    from strandline.observe.registration import local_runs, make_runs_folder, user_runs_folder
    from strandline.runtime.driver.status import RunStatus

    seconds = duration_option("--timeout", timeout)
    if not Path(script).is_file():
        raise UsageError(f"there is no script {script}")
    begun = time.time()
    starting: list[FoundRun] = []

    def find(pid: int) -> FoundRun | None:
        for found in local_runs():
            entry = found.entry
            # A process id comes again one day, so the time counts, too.
            if entry.pid != pid or entry.started_ms < (begun - 5) * 1000 or job not in (None, entry.job):
                continue
            if entry.status is RunStatus.STARTING:
                starting[:] = [found]
            elif entry.status is not RunStatus.FAILED:  # the process will say why
                return found
        return None

    folder = make_runs_folder(user_runs_folder() / "logs")
    log = folder / f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(begun))}-{_file_name(script)}.log"
    with progress_of(f"starting {script}") as reporter:
        started = start_detached(
            command,
            log,
            find,
            timeout=seconds,
            waiting=lambda: reporter.report_by(lambda: _how_far(starting)),
        )
    _print_started(started, as_json)


def _how_far(starting: list[FoundRun]) -> Progress:
    """What a job that starts is doing, as its server says."""
    from strandline.admin.rest_client import Progress, RestClient
    from strandline.observe.registration import read_token

    waiting = Progress("until its job runs")
    if not starting or not starting[0].entry.rest_url:
        return waiting
    entry = starting[0].entry
    try:
        figures = RestClient(entry.rest_url, read_token(starting[0]), timeout=2.0).facts(entry.job_id).figures
    except StrandlineError:
        return waiting  # it does not answer yet, or not any more
    seen = figures.restoring if figures is not None else None
    if seen is None:
        return waiting
    return Progress(f"restoring {entry.job}", seen.done_bytes, seen.total_bytes, "bytes")


def _file_name(script: str) -> str:
    """A name for the log that a folder takes, unique among scripts that start in one second."""
    stem = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in Path(script).stem)
    return f"{stem[:60]}-{os.getpid()}"


def _print_started(started: Detached[FoundRun], as_json: bool) -> None:
    entry = started.found.entry
    facts: dict[str, Any] = {
        "id": entry.job_id,
        "name": entry.job,
        "run": entry.run,
        "pid": started.pid,
        "url": entry.rest_url,
        "log": str(started.log),
    }
    if as_json:
        print_json(facts)
        return
    from strandline.admin.cli.console import SafeConsole

    console = SafeConsole()
    console.print(f"Job has been submitted with JobID {entry.job_id}", soft_wrap=True)
    for name, value in (("job", entry.job), ("page", entry.rest_url or "none"), ("log", str(started.log))):
        console.print(f"{name:>5}  {value}", soft_wrap=True)
