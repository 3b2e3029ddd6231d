"""The commands `strandline checkpoints ls`, `show`, `verify` and `gc`."""

from __future__ import annotations

import json
import math
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from strandline.admin.garbage import Garbage, delete_garbage, find_garbage
from strandline.admin.inspection import CheckpointFacts, JobFolder
from strandline.admin.verification import Verification, Verified
from strandline.config.option import parse_duration
from strandline.errors import ConfigError

app = typer.Typer(
    help="Look into the checkpoints of a job, and clean up.", no_args_is_help=True, rich_markup_mode="markdown"
)

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Location = Annotated[str, typer.Argument(help="A job's checkpoint folder (checkpoint_dir/job), or the checkpoint_dir.")]
Job = Annotated[str | None, typer.Option(help="Which job, where the location holds several.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", "-o", metavar="KEY=VALUE", help="A setting of the object store, e.g. endpoint."),
]


@app.command("ls")
def list_checkpoints(location: Location, as_json: Json = False, storage_option: StorageOptions = None) -> None:
    """List the completed checkpoints that are retained."""
    folders = JobFolder.find(location, storage_settings(storage_option))
    found = [(folder, folder.checkpoints()) for folder in folders]
    if as_json:
        _print_json([facts.to_json() for _folder, checkpoints in found for facts in checkpoints])
    else:
        for folder, checkpoints in found:
            _print_list(folder, checkpoints)
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
    """Show one checkpoint with its subtasks and files."""
    folder = _one_job(location, job, storage_option)
    details = folder.details(folder.metadata(checkpoint))
    if as_json:
        _print_json(details)
    else:
        _print_details(details)


@app.command("verify")
def verify_checkpoints(
    location: Annotated[
        str,
        typer.Argument(
            help="A checkpoint's directory (.../job/chk-N) or _metadata file, a job's folder, or all jobs'."
        ),
    ],
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Read every file of a checkpoint, or of all retained ones, and compare size and checksum.

    Every file that is damaged or missing is reported; the exit code is 1 if there is any. This reads the full state.
    """
    settings = storage_settings(storage_option)
    one = JobFolder.find_checkpoint(location, settings)
    if one is not None:
        verifications = [Verification(one[0].storage, one[0].job, one[1])]
    else:
        verifications = [Verification(folder.storage, folder.job) for folder in JobFolder.find(location, settings)]
    found: list[Verified] = []
    with _progress() as bar:
        total = sum(handle.size for verification in verifications for handle in verification.handles)
        task = bar.add_task("verifying", total=total)
        for verification in verifications:
            found += verification.run(lambda handle: bar.advance(task, handle.size))
    if as_json:
        _print_json([checkpoint.to_json() for checkpoint in found])
    else:
        _print_verified(location, found)
    if any(checkpoint.damage for checkpoint in found):
        raise typer.Exit(1)


@app.command("gc")
def collect_garbage(
    location: Location,
    job: Job = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete.")] = False,
    min_age: Annotated[
        str, typer.Option(metavar="DURATION", help="Leave files alone that were modified in this time.")
    ] = "1h",
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Also what the newest run uploaded last. If it is still alive, this ENDS it."),
    ] = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Delete what crashes left behind: files of a job that no retained checkpoint refers to.

    A job may be running meanwhile. What it uploads belongs to no completed checkpoint yet, so all files are kept that
    were modified since the newest run took the job over, on the storage's own clock. The log does not say that a run
    has ended: files that the last run left are found after the next start, or with --take-over, which fences a run that
    is alive.

    Nothing is deleted if a retained checkpoint cannot be read.
    """
    if dry_run == yes:
        raise ConfigError("choose one: --dry-run lists what would be deleted, --yes deletes it")
    if take_over and dry_run:
        raise ConfigError("--take-over ends a run that is alive, so it does not go with --dry-run; use it with --yes")
    try:
        age = parse_duration(min_age)
    except ValueError as error:
        raise ConfigError(f"--min-age {min_age!r}: {error}") from error
    folder = _one_job(location, job, storage_option)
    garbage = find_garbage(folder.storage, folder.job, now=time.time(), min_age=age, take_over=take_over)
    if yes:
        with _progress(sizes=False) as bar:
            task = bar.add_task("deleting", total=len(garbage.files.orphans))
            delete_garbage(folder.storage, garbage, lambda count: bar.advance(task, count))
    if as_json:
        _print_json(_garbage_facts(garbage, deleted=yes))
    else:
        _print_garbage(folder, garbage, deleted=yes)


def _one_job(location: str, job: str | None, storage_option: list[str] | None) -> JobFolder:
    folders = JobFolder.find(location, storage_settings(storage_option))
    names = ", ".join(folder.job for folder in folders)
    chosen = [folder for folder in folders if job in (None, folder.job)]
    if len(chosen) != 1:
        raise ConfigError(
            f"{location} holds {'no job ' + repr(job) if job else 'several jobs'}; choose one with --job: {names}"
        )
    return chosen[0]


def _progress(sizes: bool = True) -> Progress:
    """A bar on standard error while it lasts, and nothing where nobody watches."""
    console = Console(stderr=True)
    columns = [DownloadColumn(), TransferSpeedColumn()] if sizes else [TextColumn("{task.completed}/{task.total}")]
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _print_verified(location: str, found: list[Verified]) -> None:
    console = Console()
    if not found:
        console.print(f"{location}: no completed checkpoint yet", soft_wrap=True, highlight=False)
    for checkpoint in found:
        mark = ("✖ ", "bold red") if checkpoint.damage else ("✔ ", "bold green")
        bad = f", {len(checkpoint.damage)} damaged or missing" if checkpoint.damage else ", all whole"
        text = (
            f"checkpoint {checkpoint.id} of job {checkpoint.job}: {checkpoint.files} files, {_bytes(checkpoint.bytes)}"
        )
        console.print(Text.assemble(mark, text, bad), soft_wrap=True, highlight=False)
        for damage in checkpoint.damage:
            whose = f" (operator {damage.operator}, subtask {damage.subtask})" if damage.operator is not None else ""
            console.print(Text(f"  {damage.path} {damage.problem}{whose}", style="red"), soft_wrap=True)


def _garbage_facts(garbage: Garbage, deleted: bool) -> dict[str, Any]:
    files = garbage.files
    return {
        "job": garbage.job,
        "generation": garbage.generation,
        "owner": garbage.owner,
        "live_since": garbage.live_since if math.isfinite(garbage.live_since) else None,
        "retained": list(garbage.retained),
        "referenced": files.referenced,
        "orphans": [{"path": file.path, "size": file.size, "modified": file.modified} for file in files.orphans],
        "orphan_bytes": sum(file.size for file in files.orphans),
        "deleted": deleted,
        "kept": {
            "possibly_live": [file.path for file in files.live],
            "young": [file.path for file in files.young],
            "number_in_use": [file.path for file in files.numbers],
        },
    }


def _print_garbage(folder: JobFolder, garbage: Garbage, deleted: bool) -> None:
    console = Console()
    files = garbage.files

    def say(text: str | Text) -> None:
        console.print(text, soft_wrap=True, highlight=False)

    say(Text.assemble((f"job {folder.job}", "bold"), f" in {folder.path}"))
    for file in files.orphans:
        say(Text(f"  {_time(file.modified)}  {_bytes(file.size):>9}  {file.path}"))
    size = _bytes(sum(file.size for file in files.orphans))
    say(f"{len(files.orphans)} orphans of {size} {'deleted' if deleted else 'found; --yes deletes them'}")
    if files.live:
        by = f" by {garbage.owner}" if garbage.owner else ""
        say(
            f"{len(files.live)} files kept that generation {garbage.generation}, begun{by}, may still need; if it has "
            "ended, add --take-over"
        )
    if files.young:
        say(f"{len(files.young)} files kept that are younger than --min-age")
    if files.numbers:
        say(f"{len(files.numbers)} _metadata kept until a checkpoint with a higher number has completed")


def storage_settings(pairs: list[str] | None) -> dict[str, str]:
    settings = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--storage-option {pair!r} is not KEY=VALUE")
        settings[name] = value
    return settings


def _print_list(folder: JobFolder, found: list[CheckpointFacts]) -> None:
    console = Console()
    console.print(Text.assemble((f"job {folder.job}", "bold"), f" in {folder.path}"), soft_wrap=True, highlight=False)
    if not found:
        console.print("  no completed checkpoint yet")
        return
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in ("id", "batch", "gen."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("completed (UTC)", no_wrap=True)
    for name in ("files", "full size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("folder", no_wrap=True)
    for facts in found:
        place = facts.path.rpartition("/")[2]
        if facts.problem:
            table.add_row(str(facts.id), *[""] * 5, Text(f"{place} ✖", style="red"))
            continue
        table.add_row(
            str(facts.id),
            str(facts.batch),
            str(facts.generation),
            _time(facts.time or 0.0),
            str(facts.files),
            _bytes(facts.full_bytes or 0),
            f"{place} newest" if facts.latest else place,
        )
    console.print(table)
    for facts in found:
        if facts.problem:
            console.print(Text(facts.problem, style="red"), soft_wrap=True)


def _print_details(details: dict[str, Any]) -> None:
    console = Console()
    head = Table.grid(padding=(0, 2))
    for name, value in (
        ("checkpoint", f"{details['id']} of job {details['job']}"),
        ("path", details["path"]),
        ("completed", f"{_time(details['time'])} UTC, generation {details['generation']}, batch {details['batch']}"),
        ("state", f"{_bytes(details['full_bytes'])} in {details['files']} files"),
        ("parallelism", f"{details['parallelism']} of at most {details['max_parallelism']}"),
        ("published", f"{details['sink_rows']:,} rows in {details['sink_files']} files"),
    ):
        head.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    console.print(head)
    table = Table(box=None, header_style="dim", padding=(0, 1))
    table.add_column("operator")
    for name in ("subtask", "key groups", "backend", "files", "of them shared", "full size"):
        table.add_column(name, justify="right", no_wrap=True)
    for subtask in details["subtasks"]:
        first, end = subtask["key_groups"]
        table.add_row(
            subtask["operator"],
            str(subtask["subtask"]),
            f"{first}–{end - 1}",
            subtask["backend"],
            str(len(subtask["files"])),
            str(sum(file["shared"] for file in subtask["files"])),
            _bytes(subtask["full_bytes"]),
        )
    console.print(table)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _bytes(count: int) -> str:
    for unit, limit in (("B", 1e3), ("kB", 1e6), ("MB", 1e9)):
        if count < limit:
            return f"{count} B" if unit == "B" else f"{count / limit * 1e3:.1f} {unit}"
    return f"{count / 1e9:.1f} GB"


def _print_json(facts: Any) -> None:
    typer.echo(json.dumps(facts, indent=2))
