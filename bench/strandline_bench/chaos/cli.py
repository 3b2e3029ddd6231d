"""`strandline chaos`: trials with faults, two drivers of one job, and the soak."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from strandline.errors import StrandlineError
from strandline_bench import plot
from strandline_bench.chaos import realtime, sinks, soak, two_drivers
from strandline_bench.chaos.machine import Journals, Machine, Trial
from strandline_bench.chaos.plan import SINKS, STORIES, WEIGHTS, Variant, check_repeatable, variants
from strandline_bench.chaos.trial_report import failure, markdown, report, show, show_failure
from strandline_bench.chaos.trials import run_trials
from strandline_bench.cli import ProgressOnStderr
from strandline_bench.fuzz.command import fuzz_command

app = typer.Typer(
    help="Break a running job on purpose, and check that nothing is lost.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("fuzz")(fuzz_command)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
WorkDir = Annotated[
    Path | None,
    typer.Option(exists=True, file_okay=False, help="Folder for the files of trials; those of failures are kept."),
]
Minutes = Annotated[float, typer.Option(min=0.1, help="How long the job is disturbed.")]


@app.callback()
def trials_command(
    context: typer.Context,
    trials: Annotated[int, typer.Option(min=1, help="How many trials with a fault.")] = 100,
    seed: Annotated[int, typer.Option(help="Decides about variants, faults and operations.")] = 7,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no trial after this time; 0: no limit.")] = 0,
    stories: Annotated[str, typer.Option(help=f"With commas between: {', '.join(STORIES)}.")] = ",".join(STORIES),
    kinds: Annotated[str, typer.Option(help=f"With commas between: {', '.join(WEIGHTS)}.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Trials side by side, each with a JVM of its own.")] = 1,
    journals: Annotated[
        Path | None, typer.Option(help="File with the operations of every variant, so that they are known next time.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Append every trial to this file, a JSON object a line.")] = None,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """Run trials: a small job with one fault at one operation, and a look at everything that it leaves.

    The exit code is 1 if a trial did not survive.
    """
    if context.invoked_subcommand is not None:
        return
    chosen = variants(_names(stories, STORIES, "--stories"), SINKS)
    some_kinds = _names(kinds, tuple(WEIGHTS), "--kinds") if kinds else None
    errors = Console(stderr=True)
    deadline = time.monotonic() + minutes * 60 if minutes else float("inf")
    done: list[Trial] = []
    for trial in run_trials(
        trials,
        seed,
        chosen,
        some_kinds,
        workers=workers,
        work_dir=work_dir,
        journals=Journals(journals),
        until=lambda: time.monotonic() > deadline,
    ):
        done.append(trial)
        _tell(trial, len(done), errors)
        if record is not None:
            with record.open("ab") as lines:
                lines.write(msgspec.json.encode(trial) + b"\n")
    _print(report(done, seed), as_json)
    if any(trial.verdict != "survived" for trial in done):
        raise typer.Exit(1)


@app.command("repeat")
def repeat_command(
    seed: Annotated[int, typer.Option(help="The seed of the trial.")],
    variant: Annotated[str, typer.Option(help="The variant, such as plain/changelog/parquet.")],
    kind: Annotated[str, typer.Option(help="The kind of fault.")],
    at: Annotated[
        str, typer.Option(help="The operation: before or after, the number, the pattern. Default: the seed decides.")
    ] = "",
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 1,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files even if the trial survives.")] = False,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """Repeat one trial: the same input, the same fault at the same operation."""
    try:
        chosen = Variant.named(variant)
        check_repeatable(at, kind)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    done: list[Trial] = []
    with Machine(work_dir, keep_all=keep) as machine:
        for _ in range(times):
            for trial in [machine.trial_at(at, seed, chosen, kind)] if at else machine.trial(seed, chosen, kind):
                done.append(trial)
                _tell(trial, len(done), Console(stderr=True))
    _print(report(done, seed), as_json)
    if any(trial.verdict != "survived" for trial in done):
        raise typer.Exit(1)


@app.command("two-drivers")
def two_drivers_command(
    minutes: Minutes = 3,
    seed: Annotated[int, typer.Option(help="Decides about input, stops and kills.")] = 7,
    changelog: Annotated[bool, typer.Option("--changelog/--no-changelog", help="Whether the changelog is on.")] = False,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """Two drivers of one job, stopped (SIGSTOP) and continued at random: one truth at the end."""
    result = two_drivers.run(minutes, seed, changelog=changelog, work_dir=work_dir)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        two_drivers.show(result, Console())
    if result["problems"]:
        raise typer.Exit(1)


@app.command("sinks")
def sinks_command(
    minutes: Minutes = 10,
    seed: Annotated[int, typer.Option(help="Decides about input, targets and faults.")] = 7,
    only: Annotated[
        list[str] | None, typer.Option("--sink", help=f"Only this one; may be repeated: {', '.join(sinks.NAMES)}.")
    ] = None,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """A job into real targets, while its processes and the targets' servers are killed and frozen at random.

    Begins no round after this time. The exit code is 1 if a target is not what the batch computation says, or if
    something was left behind.
    """
    names = _names(",".join(only), sinks.NAMES, "--sink") if only else list(sinks.NAMES)
    errors = Console(stderr=True)
    try:
        result = sinks.run(
            minutes,
            seed,
            names,
            lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True),
            work_dir,
        )
    except StrandlineError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        sinks.show(result, Console() if sys.stdout.isatty() else Console(width=140))
    if result["problems"]:
        raise typer.Exit(1)


@app.command("realtime")
def realtime_command(
    minutes: Minutes = 10,
    seed: Annotated[int, typer.Option(help="Decides about input, faults, modes and slots.")] = 7,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """A job from Kafka, mostly in real time, while its processes and the broker are killed and frozen at random.

    Begins no round after this time. The exit code is 1 if the output is not what the batch computation says, or if
    something was left behind.
    """
    errors = Console(stderr=True)
    try:
        result = realtime.run(
            minutes, seed, lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True), work_dir
        )
    except StrandlineError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        realtime.show(result, Console())
    if result["problems"]:
        raise typer.Exit(1)


@app.command("soak")
def soak_command(
    minutes: Minutes = 60,
    seed: Annotated[int, typer.Option(help="Decides about input and victims.")] = 7,
    kill_every: Annotated[float, typer.Option(min=1, help="Seconds between two kills.")] = 60,
    changelog: Annotated[bool, typer.Option("--changelog/--no-changelog", help="Whether the changelog is on.")] = True,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw all samples over time: a PNG file.")] = None,
    work_dir: WorkDir = None,
    as_json: Json = False,
) -> None:
    """Steady load and a kill every minute: memory, threads, handles, files and recovery times must stay flat.

    After the first third, the task manager and its oldest slot are spared. The exit code is 1 if something is wrong or
    not flat. A run of less than five minutes is too short to tell what is flat.
    """
    if picture is not None:
        plot.check_available(picture)
    with ProgressOnStderr() as progress:
        result = soak.run(minutes, seed, progress.say, kill_every=kill_every, changelog=changelog, work_dir=work_dir)
    if picture is not None:
        soak.draw(result, picture)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        soak.show(result, Console())
    if result["problems"]:
        raise typer.Exit(1)


@app.command("summary")
def summary_command(
    records: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files that --record wrote.")],
    seed: Annotated[int, typer.Option(help="Printed in the title.")] = 7,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table for the documentation.")] = False,
    as_json: Json = False,
) -> None:
    """One report of several runs."""
    lines = [line for file in records for line in file.read_bytes().splitlines()]
    result = report([msgspec.json.decode(line, type=Trial) for line in lines], seed)
    if as_markdown:
        typer.echo(markdown(result))
    else:
        _print(result, as_json)


def _names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{option} {name!r}: known are {', '.join(known)}")
    return names


def _tell(trial: Trial, number: int, console: Console) -> None:
    plan = trial.plan
    took = "" if trial.recovery is None else f", whole after {trial.recovery:.1f} s"
    console.print(
        f"{number}: {trial.verdict}: {plan.kind}, {plan.variant.name}: {trial.fired or 'no fault'}"
        f" ({trial.seconds:.1f} s{took})",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    if trial.verdict != "survived":
        show_failure(failure(trial), console)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show(result, Console() if sys.stdout.isatty() else Console(width=140))
