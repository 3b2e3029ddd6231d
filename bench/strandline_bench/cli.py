"""`strandline bench`: the benchmarks as commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from strandline.errors import ConfigError, StrandlineError
from strandline_bench import changelog as rated
from strandline_bench import (
    coordinator,
    growth,
    latency,
    observation,
    operators,
    plot,
    recovery,
    report,
    rescale,
    sinks,
    spark_peer,
    state_reader,
    value_state,
)
from strandline_bench.rated_run import Mode, RatedWork, Settings
from strandline_bench.rated_value_state import rated_value_state
from strandline_bench.rated_window import WindowKeeping, rated_window

VALUE_STATE_RATE = 50_000
WINDOW_RATE = 5_000
FILE_DRIVEN = ("rows", "keys", "batch_rows", "operator", "peer", "peer_rows", "interval", "incremental_keys")
RATE_DRIVEN = ("rate", "seconds", "warm_up", "picture")

app = typer.Typer(
    help="Measure, and check that what was measured is right.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class OperatorChoice(StrEnum):
    """Which operator does the work."""

    aggregate = "aggregate"
    process = "process"
    both = "both"


class WriteMode(StrEnum):
    """What a sink does with rows."""

    append = "append"
    upsert = "upsert"


class BackendChoice(StrEnum):
    """Where state is kept."""

    rocksdb = "rocksdb"
    heap = "heap"


class PeerChoice(StrEnum):
    """What Strandline is compared with."""

    spark = "spark"


class PeerOrNone(StrEnum):
    """What Strandline is compared with, or nothing."""

    spark = "spark"
    none = "none"


class ChangelogChoice(StrEnum):
    """In which mode the rate-driven workload runs."""

    on = "on"
    off = "off"
    both = "both"


class WindowChoice(StrEnum):
    """How the windows are kept in state."""

    entries = "entries"
    window = "window"
    both = "both"


@app.callback()
def bench() -> None:
    """Measure, and check that what was measured is right."""


@app.command("value-state")
def value_state_command(
    context: typer.Context,
    rows: Annotated[int, typer.Option(help="Rows of input.")] = 5_000_000,
    keys: Annotated[int, typer.Option(help="Keys, drawn evenly.")] = 1_000_000,
    batch_rows: Annotated[
        int, typer.Option(help="Rows of a file, which is one micro-batch; at most a quarter of --rows.")
    ] = 250_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    operator: Annotated[OperatorChoice, typer.Option(help="What does the work.")] = OperatorChoice.both,
    peer: Annotated[PeerChoice | None, typer.Option(help="Measure this as well, in the same run.")] = None,
    peer_rows: Annotated[int, typer.Option(help="Rows for Spark's transformWithState, which is slow.")] = 20_000,
    interval: Annotated[str, typer.Option(help="Checkpoint interval.")] = "1s",
    backend: Annotated[BackendChoice, typer.Option(help="Where state is kept.")] = BackendChoice.rocksdb,
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    incremental_keys: Annotated[
        int,
        typer.Option(help="Also load this many keys once each and measure checkpoints after 1 % changed; 0: do not."),
    ] = 0,
    changelog: Annotated[
        ChangelogChoice | None,
        typer.Option(help="Measure rows at a fixed rate, with the changelog, without it, or both."),
    ] = None,
    rate: Annotated[
        int, typer.Option(help="With --changelog: rows per second; 0: as fast as they are taken.")
    ] = VALUE_STATE_RATE,
    seconds: Annotated[float, typer.Option(help="With --changelog: how long rows arrive.")] = 120,
    warm_up: Annotated[
        float,
        typer.Option(
            help="With --changelog: seconds before row latency and full size are looked at; at most half of --seconds."
        ),
    ] = 60,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="With --changelog: draw the checkpoints over time, a PNG file.")
    ] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Small state for many keys, read and updated by every row: throughput, checkpoints, recovery.

    With --changelog, rows arrive at a fixed rate instead, most of them with a new key, and checkpoints are made as
    often as can be: their durations and sizes, with the changelog, without it, or both side by side.
    """
    if changelog is not None:
        _refuse(context, FILE_DRIVEN, "is for the workload on files; leave it out with --changelog")
        with _errors_told():
            settings = _settings(rate, VALUE_STATE_RATE, seconds, warm_up, backend, memory, parallelism)
            _rated([rated_value_state(value_bytes)], changelog, settings, picture, work_dir, as_json)
        return
    _refuse(context, RATE_DRIVEN, "is for the rate-driven workload; give --changelog on, off or both with it")
    every: tuple[value_state.OperatorName, ...] = ("aggregate", "process")
    try:
        parameters = value_state.Parameters(
            rows=rows,
            keys=keys,
            batch_rows=min(batch_rows, max(1, rows // 4)),
            value_bytes=value_bytes,
            operators=tuple(name for name in every if operator in (OperatorChoice.both, name)),
            peer=peer is not None,
            peer_rows=peer_rows,
            interval=interval,
            backend=backend.value,
            memory=memory,
            parallelism=parallelism,
            incremental_keys=incremental_keys,
        )
        if parameters.peer:
            spark_peer.check_available()
        with ProgressOnStderr() as progress:
            result = value_state.run(parameters, progress.say, work_dir)
    except StrandlineError as error:
        raise _failed(error) from None
    _print(result, as_json, report.show)


@app.command("window")
def window_command(
    rate: Annotated[int, typer.Option(help="Rows per second; 0: as fast as they are taken.")] = WINDOW_RATE,
    keys: Annotated[int, typer.Option(help="Keys, drawn evenly.")] = 100_000,
    seconds: Annotated[float, typer.Option(help="How long rows arrive.")] = 120,
    warm_up: Annotated[
        float, typer.Option(help="Seconds before row latency and full size are looked at; at most half of --seconds.")
    ] = 60,
    changelog: Annotated[ChangelogChoice, typer.Option(help="With it, without it, or both.")] = ChangelogChoice.both,
    operator: Annotated[
        WindowChoice, typer.Option(help="One state entry per key and window, the window operator, or both.")
    ] = WindowChoice.both,
    backend: Annotated[BackendChoice, typer.Option(help="Where state is kept.")] = BackendChoice.rocksdb,
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the checkpoints over time: a PNG file.")] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Rows at a fixed rate in windows of 10 s that slide by 1 s: checkpoints with and without the changelog."""
    every: tuple[WindowKeeping, ...] = ("entries", "window")
    with _errors_told():
        settings = _settings(rate, WINDOW_RATE, seconds, warm_up, backend, memory, parallelism)
        works = [rated_window(name, keys) for name in every if operator in (WindowChoice.both, name)]
        _rated(works, changelog, settings, picture, work_dir, as_json)


def _settings(
    rate: int,
    usual_rate: int,
    seconds: float,
    warm_up: float,
    backend: BackendChoice,
    memory: str,
    parallelism: int,
) -> Settings:
    return Settings(
        rate=rate or usual_rate,
        paced=rate != 0,
        seconds=seconds,
        warm_up=warm_up,
        backend=backend.value,
        memory=memory,
        parallelism=parallelism,
    )


def _rated(
    works: list[RatedWork],
    changelog: ChangelogChoice,
    settings: Settings,
    picture: Path | None,
    work_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure rate-driven workloads; print the figures and draw the picture."""
    every: tuple[Mode, ...] = ("on", "off")
    if picture is not None:
        plot.check_available(picture)
    with ProgressOnStderr() as progress:
        modes = [mode for mode in every if changelog in (ChangelogChoice.both, mode)]
        outcome = rated.run(works, modes, settings, progress.say, work_dir)
    if picture is not None:
        plot.draw(outcome.timelines, picture)
    _print(outcome.figures, as_json, rated.show)


@app.command("coordinator")
def coordinator_command(
    subtasks: Annotated[int, typer.Option(help="Subtasks that acknowledge every checkpoint.")] = 10_000,
    files: Annotated[int, typer.Option(help="Files of each subtask's snapshot.")] = 100,
    new: Annotated[int, typer.Option(help="How many of them each checkpoint uploads.")] = 5,
    retained: Annotated[int, typer.Option(help="Retained checkpoints.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What a checkpoint of a very large job costs the coordinator: no Spark, no storage, one process."""
    try:
        parameters = coordinator.Parameters(subtasks=subtasks, files=files, new=new, retained=retained)
    except StrandlineError as error:
        raise _failed(error) from None
    with ProgressOnStderr() as progress:
        result = coordinator.run(parameters, progress.say)
    _print(result, as_json, coordinator.show)


@app.command("operators")
def operators_command(
    rows: Annotated[int, typer.Option(help="Rows of input.")] = 2_000_000,
    keys: Annotated[int, typer.Option(help="Keys, drawn evenly.")] = 1_000_000,
    batches: Annotated[int, typer.Option(help="Micro-batches that the rows come in; the first one warms up.")] = 8,
    hot: Annotated[float, typer.Option(help="Share of the rows that have one of four keys; 0.5 as Nexmark's.")] = 0.0,
    only: Annotated[
        str, typer.Option(help=f"Only these operators, with commas between: {', '.join(operators.NAMES)}.")
    ] = ",".join(operators.NAMES),
    peer: Annotated[PeerOrNone, typer.Option(help="Measure this as well, in the same run.")] = PeerOrNone.spark,
    peer_rows: Annotated[
        int, typer.Option(help="Rows for Spark's transformWithState in both flavours, which is slow.")
    ] = 20_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    interval: Annotated[str, typer.Option(help="Checkpoint interval.")] = "1s",
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Every operator next to Spark's own counterpart: rows per second on the same input, and the ratio."""
    try:
        parameters = operators.Parameters(
            rows=rows,
            keys=keys,
            batches=batches,
            hot=hot,
            value_bytes=value_bytes,
            only=tuple(name.strip() for name in only.split(",")),
            peer=peer is PeerOrNone.spark,
            peer_rows=peer_rows,
            interval=interval,
            memory=memory,
            parallelism=parallelism,
        )
        if parameters.peer:
            spark_peer.check_available()
        with ProgressOnStderr() as progress:
            result = operators.run(parameters, progress.say, work_dir)
    except StrandlineError as error:
        raise _failed(error) from None
    _print(result, as_json, operators.show)


@app.command("growth")
def growth_command(
    keys: Annotated[str, typer.Option(help="Numbers of keys, with commas between.")] = "1000000,5000000,20000000",
    batches: Annotated[int, typer.Option(help="Batches of changes after the load; the first one warms up.")] = 30,
    batch_rows: Annotated[int, typer.Option(help="Rows of such a batch, which is covered by one checkpoint.")] = 50_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """The same rate of change on a growing number of keys: throughput, checkpoints and memory."""
    try:
        parameters = growth.Parameters(
            keys=_numbers(keys),
            batches=batches,
            batch_rows=batch_rows,
            value_bytes=value_bytes,
            memory=memory,
            parallelism=parallelism,
        )
        with ProgressOnStderr() as progress:
            result = growth.run(parameters, progress.say, work_dir)
    except StrandlineError as error:
        raise _failed(error) from None
    _print(result, as_json, growth.show)


@app.command("state-reader")
def state_reader_command(
    keys: Annotated[int, typer.Option(help="Keys of the state.")] = 5_000_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    repeats: Annotated[int, typer.Option(help="How often each reader reads all of the state.")] = 3,
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Read the state of a stopped job as a table, beside Spark's reader of its own state store."""
    with _errors_told():
        parameters = state_reader.Parameters(
            keys=keys, value_bytes=value_bytes, repeats=repeats, parallelism=parallelism
        )
        with ProgressOnStderr() as progress:
            result = state_reader.run(parameters, progress.say, work_dir)
    _print(result, as_json, state_reader.show)


@app.command("sinks")
def sinks_command(
    only: Annotated[
        list[str] | None, typer.Option("--sink", help=f"Only this one; may be repeated: {', '.join(sinks.NAMES)}.")
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of input.")] = 2_000_000,
    batch_rows: Annotated[int, typer.Option(help="Rows of a file, which is one micro-batch.")] = 100_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    peer: Annotated[
        bool | None,
        typer.Option("--peer/--no-peer", help="Measure another writer to each target, too; by default for appends."),
    ] = None,
    mode: Annotated[
        WriteMode, typer.Option(help="Keep all rows, or the last one of every key: a tenth as many keys as rows.")
    ] = WriteMode.append,
    parallelism: Annotated[int, typer.Option(help="Tasks, and cores for Spark.")] = 2,
    work_dir: Annotated[
        Path | None, typer.Option(help="Folder for input, tables and checkpoints; emptied again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Rows into every target, beside Spark's own writer or that of the target's library: rates, and time to visible."""
    with _errors_told():
        parameters = sinks.Parameters(
            rows=rows,
            batch_rows=batch_rows,
            value_bytes=value_bytes,
            only=tuple(only or (sinks.NAMES if mode is WriteMode.append else sinks.UPSERTING)),
            peer=mode is WriteMode.append if peer is None else peer,
            parallelism=parallelism,
            mode=mode.value,
        )
        with ProgressOnStderr() as progress:
            result = sinks.run(parameters, progress.say, work_dir)
    _print(result, as_json, sinks.show)


@app.command("latency")
def latency_command(
    rate: Annotated[list[int] | None, typer.Option(help="Rows per second; may be repeated.")] = None,
    seconds: Annotated[float, typer.Option(help="How long rows arrive.")] = 60,
    warm_up: Annotated[float, typer.Option(help="Seconds before latency is looked at.")] = 20,
    keys: Annotated[int, typer.Option(help="Keys, drawn evenly.")] = 100_000,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    partitions: Annotated[int, typer.Option(help="Partitions of the topic.")] = 2,
    mode: Annotated[
        list[str] | None, typer.Option(help=f"Only this one; may be repeated: {', '.join(latency.MODES)}.")
    ] = None,
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    output_seconds: Annotated[float, typer.Option(min=0, help="How long for a CallbackSink; 0: not measured.")] = 30,
    full_speed_rows: Annotated[
        int, typer.Option(min=0, help="Rows that are in Kafka before a job starts; 0: not measured.")
    ] = 1_000_000,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """From the arrival of a row in Kafka until it is durable, at fixed rates, beside Spark's own operator."""
    with _errors_told():
        parameters = latency.Parameters(
            rates=tuple(rate or latency.Parameters().rates),
            seconds=seconds,
            warm_up=warm_up,
            keys=keys,
            value_bytes=value_bytes,
            partitions=partitions,
            modes=tuple(mode or latency.MODES),
            parallelism=parallelism,
            output_seconds=output_seconds,
            full_speed_rows=full_speed_rows,
        )
        with ProgressOnStderr() as progress:
            result = latency.run(parameters, progress.say, work_dir)
    _print(result, as_json, latency.show)


@app.command("observation")
def observation_command(
    rows: Annotated[int, typer.Option(help="Rows of each phase.")] = 2_000_000,
    keys: Annotated[int, typer.Option(help="Keys of the state.")] = 100_000,
    batch_rows: Annotated[int, typer.Option(help="Rows of a batch.")] = 250_000,
    turns: Annotated[int, typer.Option(help="Pairs of phases; the median counts.")] = 60,
    process: Annotated[bool, typer.Option("--process", help="Python per key instead of a vectorised step.")] = False,
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what it costs that a page is open and that metrics are scraped every second."""
    with _errors_told():
        parameters = observation.Parameters(
            rows=rows,
            keys=keys,
            batch_rows=batch_rows,
            turns=turns,
            operator="process" if process else "aggregate",
            parallelism=parallelism,
        )
        with ProgressOnStderr() as progress:
            result = observation.run(parameters, progress.say, work_dir)
    _print(result, as_json, observation.show)


@app.command("rescale")
def rescale_command(
    keys: Annotated[int, typer.Option(help="Keys in state.")] = 2_000_000,
    before: Annotated[int, typer.Option("--from", help="Subtasks that the state was made with.")] = 2,
    after: Annotated[int, typer.Option("--to", help="Subtasks that it is restored with.")] = 4,
    repeats: Annotated[int, typer.Option(help="Restores of each kind; the median counts.")] = 3,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    changelog: Annotated[bool, typer.Option("--changelog/--no-changelog", help="Whether the changelog is on.")] = False,
    peer: Annotated[PeerOrNone, typer.Option(help="Measure this as well, in the same run.")] = PeerOrNone.spark,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Restore at another parallelism, restore at the same one, rescale a live run; the same on Spark."""
    with _errors_told():
        parameters = rescale.Parameters(
            keys=keys,
            before=before,
            after=after,
            repeats=repeats,
            value_bytes=value_bytes,
            memory=memory,
            changelog=changelog,
            peer=peer is PeerOrNone.spark,
        )
        with ProgressOnStderr() as progress:
            result = rescale.run(parameters, progress.say, work_dir)
    _print(result, as_json, rescale.show)


@app.command("recovery")
def recovery_command(
    keys: Annotated[int, typer.Option(help="Keys in state.")] = 2_000_000,
    storage_rate: Annotated[float, typer.Option(help="Megabytes per second that storage gives, all in all.")] = 50.0,
    repeats: Annotated[int, typer.Option(help="Restarts of each kind; the median counts.")] = 3,
    value_bytes: Annotated[int, typer.Option(help="Size of a value.")] = 100,
    memory: Annotated[str, typer.Option(help="Memory for state, all slots together.")] = "512mb",
    parallelism: Annotated[int, typer.Option(help="Subtasks, and cores for Spark.")] = 2,
    changelog: Annotated[bool, typer.Option("--changelog/--no-changelog", help="Whether the changelog is on.")] = False,
    work_dir: Annotated[Path | None, typer.Option(help="Folder for input, state and output; emptied again.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Compare a restart from local copies with a restart from a slow storage."""
    with _errors_told():
        parameters = recovery.Parameters(
            keys=keys,
            storage_mb_per_s=storage_rate,
            repeats=repeats,
            value_bytes=value_bytes,
            memory=memory,
            parallelism=parallelism,
            changelog=changelog,
        )
        with ProgressOnStderr() as progress:
            result = recovery.run(parameters, progress.say, work_dir)
    _print(result, as_json, recovery.show)


def _refuse(context: typer.Context, names: tuple[str, ...], why: str) -> None:
    """End with an error if one of these options was given."""
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            raise _failed(ConfigError(f"{option.opts[0]} {why}"))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number.replace("_", "")) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"--keys {text}: give whole numbers with commas between, such as 1000000,5000000") from None


def _print(result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        show(result, Console())


@contextmanager
def _errors_told() -> Iterator[None]:
    try:
        yield
    except StrandlineError as error:
        raise _failed(error) from None


def _failed(error: StrandlineError) -> typer.Exit:
    Console(stderr=True).print(f"[red]{type(error).__name__}[/red]: ", error, sep="", markup=True, highlight=False)
    return typer.Exit(1)


class ProgressOnStderr:
    """Progress bars on standard error, one for each step."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._said: set[str] = set()

    def __enter__(self) -> ProgressOnStderr:
        self._bars.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._bars.stop()

    def say(self, text: str, done: int, total: int) -> None:
        """Show that `done` of `total` are done."""
        task = self._tasks.get(text)
        if task is None:
            task = self._tasks[text] = self._bars.add_task(text, total=total)
        self._bars.update(task, completed=done)
        if not self._console.is_terminal and done == total and text not in self._said:
            self._said.add(text)
            self._console.print(f"{text}: {total:,}")
