"""The command line: `strandline demo`, `bench`, `checkpoints`, `version`."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import strandline
from strandline.bench.cli import app as bench_app
from strandline.errors import ConfigError, StrandlineError
from strandline.inspection import CheckpointFacts, JobFolder

app = typer.Typer(
    name="strandline",
    help="Large keyed state and incremental, fault-tolerant checkpoints for PySpark streaming jobs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
checkpoints_app = typer.Typer(help="Look into the checkpoints of a job.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(bench_app, name="bench")

INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Location = Annotated[str, typer.Argument(help="A job's checkpoint folder (checkpoint_dir/job), or the checkpoint_dir.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", "-o", metavar="KEY=VALUE", help="A setting of the object store, e.g. endpoint."),
]


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that go before every command."""
    _Debug.on = debug


class _Debug:
    """Whether errors show their traceback; known before the command runs, needed after it has failed."""

    on = False


def main() -> None:
    """The entry point: an error of ours is one message on standard error and exit code 1."""
    try:
        app()
    except StrandlineError as error:
        if _Debug.on:
            raise
        Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True, highlight=False)
        sys.exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    print(strandline.__version__)


# --- demo ------------------------------------------------------------------------------------------


@app.command()
def demo(
    users: Annotated[int, typer.Option(help="How many users click.")] = 100_000,
    rows: Annotated[int, typer.Option(help="How many clicks there are.")] = 2_000_000,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep input, output, checkpoints and log in this folder.")
    ] = None,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill a slot process in the middle.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="One line an event instead of the live view.")] = False,
    as_json: Json = False,
) -> None:
    """Count a click stream per user, kill a slot in the middle, and compare the result with a batch computation."""
    from strandline.demo import DemoOptions, run_demo

    # With --json standard output belongs to the facts.
    console = Console(stderr=as_json)
    options = DemoOptions(users=users, rows=rows, keep=keep, kill=kill, plain=plain)
    try:
        facts = run_demo(options, console)
    except KeyboardInterrupt:
        console.print("interrupted: everything that was started has been stopped")
        raise typer.Exit(INTERRUPTED) from None
    _say_how_it_went(facts, console)
    if as_json:
        _print_json(facts)
    if not facts["equal"] or facts["processes_left"]:
        raise typer.Exit(1)


def _say_how_it_went(facts: dict[str, Any], console: Console) -> None:
    def say(good: bool, text: str) -> None:
        mark = ("✔ ", "bold green") if good else ("✖ ", "bold red")
        console.print(Text.assemble(mark, text), highlight=False, soft_wrap=not console.is_terminal)

    counted = f"{facts['rows']:,} rows, {facts['users']:,} users"
    if facts["wrong_users"]:
        say(
            False,
            f"{counted}: {facts['wrong_users']:,} users DIFFER from the batch computation "
            f"(max difference {facts['max_difference']:,})",
        )
    else:
        say(True, f"{counted}: output equals the batch computation (max difference {facts['max_difference']})")
    if facts["wrong_badges"]:
        say(False, f"{facts['wrong_badges']:,} of {facts['badges']:,} badges are missing, doubled or wrong")
    else:
        say(True, f"{facts['badges']:,} badges: each was awarded exactly once")
    if facts["killed_pid"] is not None:
        after = facts["recovery_seconds"]
        how = f"replaced after {after:.1f} s" if after is not None else "replaced"
        say(
            facts["replaced_slots"] > 0,
            f"{facts['killed_slot']} killed with SIGKILL at row {facts['killed_at_row']:,}: {how}, "
            f"{facts['restarts']} restarts of the job",
        )
    say(
        True,
        f"{facts['rows_per_second'] or 0:,} rows/s; {facts['checkpoints']} checkpoints, p50 "
        f"{facts['checkpoint_ms_p50'] or 0:,.0f} ms, of {facts['state_bytes'] / 1e6:,.1f} MB of state",
    )
    if facts["processes_left"]:
        say(False, f"processes that did not end: {', '.join(map(str, facts['processes_left']))}")
    if facts["folder"]:
        console.print(f"  kept in {facts['folder']}", highlight=False, soft_wrap=True)


# --- checkpoints -----------------------------------------------------------------------------------


@checkpoints_app.command("ls")
def list_checkpoints(location: Location, as_json: Json = False, storage_option: StorageOptions = None) -> None:
    """List the completed checkpoints that are retained."""
    folders = JobFolder.find(location, _settings(storage_option))
    found = [(folder, folder.checkpoints()) for folder in folders]
    if as_json:
        _print_json([facts.to_json() for _folder, checkpoints in found for facts in checkpoints])
    else:
        for folder, checkpoints in found:
            _print_list(folder, checkpoints)
    if any(facts.problem for _folder, checkpoints in found for facts in checkpoints):
        raise typer.Exit(1)


@checkpoints_app.command("show")
def show_checkpoint(
    location: Location,
    checkpoint: Annotated[int | None, typer.Argument(metavar="[ID]", help="Its id; without one, the newest.")] = None,
    job: Annotated[str | None, typer.Option(help="Which job, where the location holds several.")] = None,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show one checkpoint with its subtasks and files."""
    folders = JobFolder.find(location, _settings(storage_option))
    names = ", ".join(folder.job for folder in folders)
    chosen = [folder for folder in folders if job in (None, folder.job)]
    if len(chosen) != 1:
        raise ConfigError(
            f"{location} holds {'no job ' + repr(job) if job else 'several jobs'}; choose one with --job: {names}"
        )
    details = chosen[0].details(chosen[0].metadata(checkpoint))
    if as_json:
        _print_json(details)
    else:
        _print_details(details)


def _settings(pairs: list[str] | None) -> dict[str, str]:
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
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
