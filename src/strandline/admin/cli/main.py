"""The command line: `strandline demo`, `bench`, `checkpoints`, `savepoint`, `version`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import strandline
from strandline.admin.cli.checkpoints import app as checkpoints_app
from strandline.admin.cli.savepoint import savepoint
from strandline.errors import StrandlineError
from strandline_bench.cli import app as bench_app

app = typer.Typer(
    name="strandline",
    help="Large keyed state and incremental, fault-tolerant checkpoints for PySpark streaming jobs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(bench_app, name="bench")
app.command()(savepoint)

INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]


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
    from strandline_bench.demo import DemoOptions, run_demo

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


def _print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
