"""The command line, `strandline`: jobs, their checkpoints and their state; in a checkout also benchmarks and chaos."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Final

import typer

import strandline
from strandline.admin.cli.checkpoints import app as checkpoints_app
from strandline.admin.cli.listing import list_jobs
from strandline.admin.cli.logs import logs
from strandline.admin.cli.run import run
from strandline.admin.cli.run_words import RunCommand
from strandline.admin.cli.savepoint import savepoint
from strandline.admin.cli.state import app as state_app
from strandline.admin.cli.status import status, top
from strandline.admin.cli.steering import cancel, checkpoint, rescale, stop
from strandline.admin.cli.ui import ui
from strandline.admin.problems import exit_code
from strandline.errors import StrandlineError

app = typer.Typer(
    name="strandline",
    help="Large keyed state and incremental, fault-tolerant checkpoints for PySpark streaming jobs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=RunCommand, no_args_is_help=True, context_settings={"allow_interspersed_args": False})(run)
app.command("list")(list_jobs)
for command in (status, top, savepoint, checkpoint, rescale, stop, cancel, logs, ui):
    app.command(no_args_is_help=command is not ui)(command)
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(state_app, name="state")

OTHER_PACKAGE: Final = "strandline_bench"
FORWARD: Final = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Hands all arguments of a command on, `--help` among them, without reading them."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(strandline.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options that go before every command."""
    _Debug.on = debug


class _Debug:
    """Whether errors show their traceback. The option is read before the command runs, and used when it fails."""

    on = False


def main() -> None:
    """Run a command. A `StrandlineError` is printed as one message on standard error; see `ExitCode` for the code."""
    try:
        app()
    except StrandlineError as error:
        if _Debug.on:
            raise
        from rich.text import Text

        from strandline.admin.cli.console import SafeConsole

        SafeConsole(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)
        sys.exit(exit_code(error))


@app.command()
def version() -> None:
    """Print the version."""
    print(strandline.__version__)


@app.command(context_settings=FORWARD)
def demo(context: typer.Context) -> None:
    """Count clicks per user, kill a slot meanwhile, and compare with a batch computation (needs the repository)."""
    _hand_over("demo", "strandline_bench.demo.cli", context.args)


@app.command(context_settings=FORWARD)
def bench(context: typer.Context) -> None:
    """Measure, and check that what was measured is right (needs the repository)."""
    _hand_over("bench", "strandline_bench.cli", context.args)


@app.command(context_settings=FORWARD)
def chaos(context: typer.Context) -> None:
    """Break a running job on purpose, and check that nothing is lost (needs the repository)."""
    _hand_over("chaos", "strandline_bench.chaos.cli", context.args)


def _hand_over(command: str, module: str, arguments: list[str]) -> None:
    """Run a command of the package `strandline_bench`, which is in Strandline's repository but not in its wheel."""
    if find_spec(OTHER_PACKAGE) is None:
        raise StrandlineError(
            f"`strandline {command}` is in the package {OTHER_PACKAGE}, which is not installed: clone Strandline's "
            f"repository and run `make setup` there, then `.venv/bin/strandline {command}`."
        )
    other: typer.Typer = import_module(module).app
    other(args=arguments, prog_name=f"strandline {command}")


if __name__ == "__main__":
    main()
