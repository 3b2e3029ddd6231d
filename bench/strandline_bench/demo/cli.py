"""The command `strandline demo`, and its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from strandline_bench.demo.runner import DemoOptions, run_demo

INTERRUPTED = 130

app = typer.Typer(
    add_completion=False, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)


@app.command()
def demo(
    users: Annotated[int, typer.Option(help="How many users click.")] = 100_000,
    rows: Annotated[int, typer.Option(help="How many clicks there are.")] = 2_000_000,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep input, output, checkpoints and log in this folder.")
    ] = None,
    kill: Annotated[bool, typer.Option("--kill/--no-kill", help="Kill a slot process in the middle.")] = True,
    plain: Annotated[bool, typer.Option("--plain", help="Print one line per event instead of the live view.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")] = False,
) -> None:
    """Count a click stream per user, kill a slot in the middle, and compare the result with a batch computation."""
    # With --json standard output belongs to the facts.
    console = Console(stderr=as_json)
    options = DemoOptions(users=users, rows=rows, keep=keep, kill=kill, plain=plain)
    try:
        facts = run_demo(options, console)
    except KeyboardInterrupt:
        console.print("interrupted: everything that was started has been stopped")
        raise typer.Exit(INTERRUPTED) from None
    report(facts, console)
    if as_json:
        print(json.dumps(facts, indent=2))
    if not facts["equal"] or facts["processes_left"]:
        raise typer.Exit(1)


def report(facts: dict[str, Any], console: Console) -> None:
    """Print what the demo found out, one line per finding, with a mark that says whether it is as it should be."""

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
