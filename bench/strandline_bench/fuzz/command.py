"""The command `strandline chaos fuzz`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from strandline.errors import ConfigError
from strandline_bench.fuzz.format import MODES
from strandline_bench.fuzz.formats import NAMES
from strandline_bench.fuzz.machine import Result, fuzz, input_of


def fuzz_command(
    inputs: Annotated[int, typer.Option(help="How many mutated inputs.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Decides about every input, together with its number.")] = 7,
    first: Annotated[int, typer.Option(help="The number of the first input: repeat one with --inputs 1.")] = 0,
    formats: Annotated[str, typer.Option(help=f"With commas between: {', '.join(NAMES)}.")] = "",
    keep: Annotated[
        Path | None, typer.Option(help="Folder for the inputs of findings; for the input itself with --inputs 1.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Read mutated files of every format: metadata, job log, segments, snapshots, stored values, config files.

    Some inputs are mutated as they are, the others inside right checksums. A reader may accept an input or refuse it
    with an error of Strandline. Everything else is a finding: another error, a crash, a read of more than two seconds,
    much memory. The exit code is 1 if there is one.
    """
    names = [name.strip() for name in formats.split(",")] if formats else NAMES
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"--formats {name!r}: known are {', '.join(NAMES)}")
    if inputs == 1 and keep is not None:
        name, mode, data = input_of(seed, first, names)
        _keep(keep, first, data)
        typer.echo(f"input {first}: {name}, {mode}, {len(data)} bytes, in {keep}")
    console = Console(stderr=True)

    def tell(done: int, result: Result) -> None:
        if (done + 1) % 50_000 < 2000:
            console.print(f"{done + 1 - first:,} inputs, {result.found} findings", highlight=False)

    result = fuzz(inputs, seed, first=first, names=names, tell=tell)
    facts = report(result)
    for finding in result.findings:
        if keep is not None:
            _keep(keep, finding.number, finding.data)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _show(facts, Console())
    if result.found:
        raise typer.Exit(1)


def report(result: Result) -> dict[str, Any]:
    """The result as plain values."""
    return {
        "seed": result.seed,
        "inputs": result.inputs,
        "findings": result.found,
        "slowest_seconds": round(result.slowest, 3),
        "peak_bytes": result.peak_bytes,
        "seconds": round(result.seconds, 1),
        "formats": [
            {
                "format": name,
                **{mode: result.read[name, mode] + result.refused[name, mode] for mode in MODES},
                "read": sum(result.read[name, mode] for mode in MODES),
                "refused": sum(result.refused[name, mode] for mode in MODES),
                "findings": sum(finding.format == name for finding in result.findings),
            }
            for name in NAMES
        ],
        "found": [
            {
                "number": finding.number,
                "format": finding.format,
                "mode": finding.mode,
                "kind": finding.kind,
                "detail": finding.detail,
            }
            for finding in result.findings
        ],
    }


def _keep(folder: Path, number: int, data: bytes) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"input-{number}").write_bytes(data)


def _show(facts: dict[str, Any], console: Console) -> None:
    table = Table("format", *MODES, "read", "refused", "findings", title=f"seed {facts['seed']}")
    for column in table.columns[1:]:
        column.justify = "right"
    columns = (*MODES, "read", "refused", "findings")
    for row in facts["formats"]:
        table.add_row(row["format"], *(f"{row[column]:,}" for column in columns))
    table.add_section()
    table.add_row("all", *(f"{sum(row[column] for row in facts['formats']):,}" for column in columns))
    console.print(table)
    console.print(
        f"{facts['inputs']:,} inputs in {facts['seconds']:,} s; the slowest read took {facts['slowest_seconds']} s; at "
        f"most {facts['peak_bytes'] >> 20:,} MB of memory; {facts['findings']} findings",
        highlight=False,
        soft_wrap=True,
    )
    for found in facts["found"]:
        title = f"input {found['number']} ({found['format']}, {found['mode']}): {found['kind']}"
        console.print(f"{title}\n{found['detail']}", markup=False, highlight=False, soft_wrap=True)
