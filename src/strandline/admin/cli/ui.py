"""The command `strandline ui`: the page of a running job, or a history server over checkpoint directories."""

from __future__ import annotations

import os
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strandline.admin.cli.options import (
    Json,
    StorageOptions,
    TokenFile,
    check_folders,
    looked_for,
    print_json,
    storage_settings,
)
from strandline.admin.problems import NoSuchJobError, NotReachedError, NotRunningError, UsageError

if TYPE_CHECKING:
    from strandline.admin.found_jobs import FoundJob, Where


def ui(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[JOB | CHECKPOINT_DIR...]", help="A running job, or checkpoint directories."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    bind: Annotated[str, typer.Option("--bind", help="For directories: the address to listen at.")] = "127.0.0.1",
    port: Annotated[str, typer.Option("--port", help="For directories: a port, or a range.")] = "8081-8130",
    token_file: TokenFile = "",
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Print the address of a job's page with its token; or serve the page of jobs that ended or run elsewhere.

    With a JOB, or without anything if one job runs on this host: the address of the page that the job itself serves.
    With directories (ckpt/, s3://bucket/checkpoints): a server over their jobs' history, until Ctrl-C.
    """
    places = [one for one in what or [] if _is_place(one)]
    if len(places) < len(what or []) and (places or len(what or []) > 1):
        raise UsageError("give one job, or one or more checkpoint directories (a folder is written as ./folder)")
    where = looked_for("", token_file)
    check_folders(places)
    if places:
        _serve(places, storage_settings(storage_option), where, bind, port, open_page=open_page, as_json=as_json)
    else:
        _show(_running(what[0] if what else None, where), open_page=open_page, as_json=as_json)


def _is_place(text: str) -> bool:
    """Whether an argument is a directory. The name of a job holds no slash."""
    return "/" in text or os.path.isdir(text)


def _running(job: str | None, where: Where) -> FoundJob:
    from strandline.admin.found_jobs import find_job, known_runs, newest_of_each

    if job is not None:
        return find_job(job, where)
    alive = [run for run in newest_of_each(known_runs(where)) if run.alive]
    if not alive:
        raise NoSuchJobError(
            "no job of this user runs on this host; for jobs that have ended or run elsewhere, give their checkpoint "
            "directory: strandline ui CHECKPOINT_DIR"
        )
    if len(alive) > 1:
        names = ", ".join(sorted({run.entry.job for run in alive}))
        raise NoSuchJobError(f"{len(alive)} jobs of this user run on this host; name one of them: {names}")
    return find_job(alive[0].entry.job_id, where)


def _show(job: FoundJob, *, open_page: bool, as_json: bool) -> None:
    from strandline.admin.found_jobs import run_words
    from strandline.observe.registration import read_token
    from strandline.rest.access import with_token

    if job.served is None and job.run is not None and not job.run.alive:
        entry = job.run.entry
        raise NotRunningError(
            f"job {job.name!r} does not run: {run_words(job.run)}; its page is in its history: "
            f"strandline ui {shlex.quote(entry.checkpoint_dir)}"
        )
    client = job.steered()
    if job.run is None:
        raise NotReachedError(f"job {job.name!r} is not one of this host")
    link = with_token(client.url, read_token(job.run))
    if as_json:
        print_json({"id": job.id, "name": job.name, "url": client.url, "link": link})
    else:
        typer.echo(link)
    if open_page:
        _open(link)


def _serve(
    places: list[str],
    settings: dict[str, str],
    where: Where,
    bind: str,
    port: str,
    *,
    open_page: bool,
    as_json: bool,
) -> None:
    from strandline.admin.cli.console import SafeConsole
    from strandline.admin.found_jobs import given_token
    from strandline.config import Config
    from strandline.errors import ConfigError
    from strandline.observe.history_jobs import HistoryJobs
    from strandline.rest.server import RestSettings, serve_jobs

    try:
        asked = RestSettings.of(Config.from_mapping({"checkpoint_dir": "/", "rest_port": port, "rest_bind": bind}))
    except ConfigError as error:
        raise UsageError(str(error).replace("rest_port", "--port").replace("rest_bind", "--bind")) from None
    jobs = HistoryJobs(places, settings)
    jobs.all()  # a place that cannot be read is an error now, not an empty page later
    served = serve_jobs(jobs, replace(asked, token=given_token(where)))
    try:
        if as_json:
            print_json({"url": served.url, "link": served.url_with_token, "checkpoint_dirs": places})
        else:
            typer.echo(served.url_with_token)
        SafeConsole(stderr=True).print(f"Serving {', '.join(places)}; Ctrl-C ends it.", soft_wrap=True)
        if open_page:
            _open(served.url_with_token)
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        served.close()


def _open(link: str) -> None:
    """Open a link in a browser by way of a file: everybody on the host can see the arguments of a process."""
    import html
    import webbrowser

    from strandline.observe.registration import make_runs_folder, user_runs_folder

    page: Path = make_runs_folder(user_runs_folder()) / f"open-{os.getpid()}.html"
    page.unlink(missing_ok=True)
    with os.fdopen(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(link)}">')
    webbrowser.open(page.as_uri())
