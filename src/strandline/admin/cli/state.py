"""The commands `strandline state ls` and `strandline state read`: the state of a checkpoint or savepoint as tables."""

from __future__ import annotations

import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strandline.admin.cli.options import Json, StorageOptions, print_json, storage_settings
from strandline.admin.problems import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from strandline.state_reader.tables import Table

app = typer.Typer(
    help="Look into the state of a checkpoint or savepoint. The job may be running.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

DEFAULT_ROWS = 20
"""How many rows are shown on a terminal if nothing else is said."""

StatePath = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The folder of a checkpoint (.../job/chk-N), of a savepoint, or of a job: its newest checkpoint.",
    ),
]
OtherDirs = Annotated[
    list[str] | None,
    typer.Option("--changelog-dir", metavar="PATH", help="The job's changelog_dir. Can be repeated."),
]


class Format(StrEnum):
    """How rows are printed."""

    table = "table"
    json = "json"
    csv = "csv"
    parquet = "parquet"


@app.command("ls")
def list_states(
    path: StatePath, changelog_dir: OtherDirs = None, as_json: Json = False, storage_option: StorageOptions = None
) -> None:
    """List the states: their steps, kinds and columns."""
    from strandline.checkpoint.metadata import state_bytes
    from strandline.state_reader.locations import locate
    from strandline.state_reader.tables import tables_of

    located = locate(path, storage_settings(storage_option), changelog_dir or ())
    metadata = located.metadata
    states = [_facts(table) for table in tables_of(metadata)]
    if as_json:
        sizes = {uid: sum(state_bytes(s) for s in metadata.subtasks if s.operator == uid) for uid in metadata.operators}
        print_json(
            {
                "path": located.path,
                "job": metadata.job,
                "kind": metadata.kind,
                "id": metadata.checkpoint_id,
                "operators": sizes,
                "states": states,
            }
        )
        return
    from rich.table import Table as RichTable
    from rich.text import Text

    from strandline.admin.cli.console import SafeConsole

    console = SafeConsole()
    console.print(Text(located.where, style="bold"), soft_wrap=True)
    shown = RichTable("operator", "state", "kind", "columns")
    for state in states:
        columns = ", ".join(f"{name} {kind}" for name, kind in state["columns"])
        shown.add_row(state["operator"], state["state"], state["kind"], columns)
    console.print(shown)


@app.command("read")
def read_rows(
    path: StatePath,
    operator: Annotated[str | None, typer.Option(help="The uid of the step; not needed if there is one.")] = None,
    state: Annotated[str | None, typer.Option(help="The state; not needed if the step has one.")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Read one key. Repeat the option if there are several key columns, in their order."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"At most so many rows; {DEFAULT_ROWS} for a table, else all.")
    ] = None,
    format_: Annotated[
        Format, typer.Option("--format", help="json: an object a line. parquet: needs --output.")
    ] = Format.table,
    output: Annotated[str | None, typer.Option(metavar="FILE", help="Write to a file, not to the terminal.")] = None,
    changelog_dir: OtherDirs = None,
    storage_option: StorageOptions = None,
) -> None:
    """Print the rows of a state."""
    from strandline.state_reader.reader import Selection, Wanted, begun

    if format_ is Format.parquet and output is None:
        raise UsageError("--format parquet writes a file: give --output FILE")
    if format_ is Format.table and output is not None:
        raise UsageError("--output needs --format json, csv or parquet")
    wanted = Wanted(path, operator, state, storage_settings(storage_option), changelog_dir or ())
    table, batches = wanted.rows(
        lambda table: begun(table.batches(Selection(keys=None if key is None else (_key(table.table, key),))))
    )
    rows = _limited(batches, DEFAULT_ROWS if limit is None and format_ is Format.table else limit)
    schema = table.table.schema
    from strandline.admin.cli.rows import print_table, write_csv, write_json, write_parquet

    match format_:
        case Format.table:
            print_table(schema, rows)
        case Format.parquet:
            write_parquet(schema, rows, str(output))
        case Format.json | Format.csv:
            write = write_json if format_ is Format.json else write_csv
            if output is None:
                write(schema, rows, sys.stdout)
            else:
                with open(output, "w", encoding="utf-8", newline="") as file:
                    write(schema, rows, file)


def _facts(table: Table) -> dict[str, Any]:
    return {
        "operator": table.operator,
        "state": table.name,
        "kind": table.kind,
        "key": table.key_names,
        "columns": [[field.name, str(field.type)] for field in table.schema],
        "ttl_ms": table.ttl_ms,
    }


def _key(table: Table, texts: list[str]) -> tuple[Any, ...]:
    """A key from the texts of its columns. Raises `UsageError` if a text does not fit."""
    import pyarrow as pa

    names = table.key_names
    if len(texts) != len(names):
        raise UsageError(f"the key columns are {', '.join(names)}: give --key once for each of them, in this order")
    values = []
    for name, text in zip(names, texts, strict=True):
        kind = table.schema.field(name).type
        try:
            values.append(pa.array([text]).cast(kind)[0].as_py())
        except pa.ArrowException:
            raise UsageError(f"--key {text!r}: the key column {name!r} is {kind}") from None
    return tuple(values)


def _limited(batches: Iterator[pa.RecordBatch], limit: int | None) -> Iterator[pa.RecordBatch]:
    left = limit
    for batch in batches:
        if left is None:
            yield batch
            continue
        if left <= 0:
            return
        yield batch.slice(0, left)
        left -= batch.num_rows
        if left <= 0:
            return
