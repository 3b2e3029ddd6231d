"""The commands `strandline checkpoints ls`, `show`, `verify` and `gc`.

Each command imports what it needs when it runs: `ls` starts in a fraction of a second because of that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from strandline.admin.cli.options import (
    ChangelogDirs,
    Job,
    Json,
    Location,
    StorageOptions,
    changelog_roots,
    duration_option,
    print_json,
    storage_settings,
)
from strandline.admin.problems import UsageError
from strandline.errors import CheckpointNotFoundError, ConfigError, StrandlineError

if TYPE_CHECKING:
    from strandline.admin.inspection import JobFolder
    from strandline.admin.verification import Verification, Verified

app = typer.Typer(
    help="Look into the checkpoints of a job, and clean up.", no_args_is_help=True, rich_markup_mode="markdown"
)


@app.command("ls")
def list_checkpoints(location: Location, as_json: Json = False, storage_option: StorageOptions = None) -> None:
    """List the completed checkpoints that are retained."""
    folders = _jobs(location, storage_settings(storage_option))
    found = [(folder, folder.checkpoints()) for folder in folders]
    if as_json:
        print_json([facts.to_json() for _folder, checkpoints in found for facts in checkpoints])
    else:
        from strandline.admin.cli.reports import print_list

        for folder, checkpoints in found:
            print_list(folder, checkpoints)
    if any(facts.problem for _folder, checkpoints in found for facts in checkpoints):
        raise typer.Exit(1)


@app.command("show")
def show_checkpoint(
    location: Location,
    checkpoint: Annotated[int | None, typer.Argument(metavar="[ID]", help="Its id; without one, the newest.")] = None,
    job: Job = None,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show one checkpoint: its steps with their states, the position in the sources, its subtasks and files."""
    folder = _one_job(location, job, storage_option)
    details = folder.details(folder.metadata(checkpoint))
    if as_json:
        print_json(details)
    else:
        from strandline.admin.cli.reports import print_details

        print_details(details)


@app.command("verify")
def verify_checkpoints(
    location: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's directory (.../job/chk-N), a savepoint's, the _metadata in it; a job's folder, or all "
            "jobs'."
        ),
    ],
    changelog_dir: ChangelogDirs = None,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Read every file of a checkpoint, a savepoint, or all retained checkpoints, and compare size and checksum.

    Every file that is damaged or missing is reported; the exit code is 1 if there is any. This reads the full state. A
    checkpoint that names files outside its job's folder and --changelog-dir is reported, and these files are not read.
    """
    from strandline.admin.cli.reports import print_verified
    from strandline.admin.reading import Reading
    from strandline.progress import byte_bar

    settings = storage_settings(storage_option)
    verifications = _verifications(location, settings, changelog_roots(changelog_dir, settings))
    found: list[Verified] = []
    reading = Reading(sum(handle.size for verification in verifications for handle in verification.handles))
    with byte_bar("verifying", reading.so_far):
        for verification in verifications:
            found += verification.run(reading)
    if as_json:
        print_json([checkpoint.to_json() for checkpoint in found])
    else:
        print_verified(location, found)
    if any(checkpoint.damage for checkpoint in found):
        raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    location: Location,
    job: Job = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete.")] = False,
    min_age: Annotated[
        str, typer.Option(metavar="DURATION", help="Keep files that were modified within this time.")
    ] = "1h",
    take_over: Annotated[
        bool,
        typer.Option(
            "--take-over", help="Also delete the newest run's last uploads. If that run is alive, this ENDS it."
        ),
    ] = False,
    changelog_dir: ChangelogDirs = None,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Delete what crashes left behind: files of a job that no retained checkpoint refers to.

    The job may be running. Its newest uploads belong to no completed checkpoint yet. So every file is kept that was
    modified after the newest run took the job over, by the storage's own clock. The job's log does not record the end
    of a run: files that the last run left are found after the next start, or with --take-over. --take-over fences a
    run that is alive, so that run ends.

    Nothing is deleted if a retained checkpoint cannot be read.
    """
    from strandline.admin.cli.reports import garbage_facts, print_garbage
    from strandline.admin.garbage import delete_garbage, find_garbage

    if dry_run == yes:
        raise UsageError("choose one: --dry-run lists what would be deleted, --yes deletes it")
    if take_over and dry_run:
        raise UsageError("--take-over ends a run that is alive, so it does not go with --dry-run; use it with --yes")
    age = duration_option("--min-age", min_age, zero=True)
    folder = _one_job(location, job, storage_option)
    others = changelog_roots(changelog_dir, storage_settings(storage_option))
    garbage = find_garbage(folder.storage, folder.job, now=time.time(), min_age=age, take_over=take_over, others=others)
    if yes:
        from strandline.admin.cli.progress import progress_of
        from strandline.admin.rest_client import Progress

        deleted, orphans = 0, len(garbage.files.orphans)
        with progress_of("deleting") as reporter:

            def report(count: int) -> None:
                nonlocal deleted
                deleted += count
                reporter.report(Progress(f"{deleted:,} of {orphans:,} files", deleted, orphans))

            delete_garbage(folder.storage, garbage, report)
    if as_json:
        print_json(garbage_facts(garbage, deleted=yes))
    else:
        print_garbage(folder, garbage, min_age, deleted=yes)


def _verifications(location: str, settings: dict[str, str], others: tuple[str, ...]) -> list[Verification]:
    """What is to be verified at `location`: one checkpoint, the retained ones of every job there, or a savepoint."""
    from strandline.admin.inspection import JobFolder
    from strandline.admin.verification import Verification
    from strandline.runtime.driver.restore.savepoints import open_savepoint

    one = JobFolder.find_checkpoint(location, settings)
    if one is not None:
        folder, number = one
        return [Verification.of_checkpoint(folder.storage, folder.job, number, others)]
    try:
        return [
            Verification.of_job(folder.storage, folder.job, others) for folder in JobFolder.find(location, settings)
        ]
    except CheckpointNotFoundError as error:
        try:
            return [Verification.of_savepoint(*open_savepoint(location, settings))]
        except CheckpointNotFoundError:
            raise error from None


def _jobs(location: str, settings: dict[str, str]) -> list[JobFolder]:
    """The jobs at `location`. The error for a checkpoint or a savepoint names the command for it."""
    from strandline.admin.inspection import JobFolder

    try:
        return JobFolder.find(location, settings)
    except CheckpointNotFoundError as error:
        hint = _better_command(location, settings)
        if hint is None:
            raise
        raise CheckpointNotFoundError(f"{location} {hint}") from error


def _better_command(location: str, settings: dict[str, str]) -> str | None:
    from strandline.storage import JobPaths

    parts = JobPaths.split_checkpoint(location)
    if parts is not None:
        root, paths, number = parts
        folder = location.rstrip("/").removesuffix("/_metadata").rpartition("/")[0] or f"{root}/{paths.job}"
        return (
            f"is the folder of one checkpoint; give the job's folder and the id: strandline checkpoints show {folder} "
            f"{number}"
        )
    from strandline.runtime.driver.restore.savepoints import open_savepoint

    try:
        open_savepoint(location, settings)
    except StrandlineError:
        return None
    return f"is a savepoint; see what it holds with: strandline savepoint {location}"


def _one_job(location: str, job: str | None, storage_option: list[str] | None) -> JobFolder:
    folders = _jobs(location, storage_settings(storage_option))
    names = ", ".join(folder.job for folder in folders)
    chosen = [folder for folder in folders if job in (None, folder.job)]
    if len(chosen) != 1:
        raise ConfigError(
            f"{location} holds {'no job ' + repr(job) if job else 'several jobs'}; choose one with --job: {names}"
        )
    return chosen[0]
