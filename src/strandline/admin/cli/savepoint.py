"""The command `strandline savepoint`: what a savepoint holds, and its disposal."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strandline.admin.cli.options import Json, StorageOptions, print_json, storage_settings

if TYPE_CHECKING:
    from strandline.checkpoint.metadata import CheckpointMetadata
    from strandline.storage import Storage


def savepoint(
    location: Annotated[str, typer.Argument(metavar="PATH", help="The savepoint's folder, or the _metadata in it.")],
    dispose: Annotated[bool, typer.Option("--dispose", help="Delete the savepoint with all its files.")] = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show what a savepoint holds: its steps with their states, the position in the sources. --dispose deletes it."""
    from strandline.admin.savepoints import dispose_savepoint
    from strandline.runtime.driver.restore.savepoints import open_savepoint

    storage, metadata = open_savepoint(location, storage_settings(storage_option))
    facts = _facts(storage, metadata)
    if dispose:
        facts["disposed_files"] = dispose_savepoint(storage, metadata)
    if as_json:
        print_json(facts)
        return
    from rich.table import Table
    from rich.text import Text

    from strandline.admin.cli.console import SafeConsole
    from strandline.admin.cli.reports import print_described, size_text

    console = SafeConsole()
    if dispose:
        console.print(f"Savepoint disposed: {facts['path']} ({facts['disposed_files']} files)", soft_wrap=True)
        return
    when = datetime.fromtimestamp(facts["time"], UTC).strftime("%Y-%m-%d %H:%M:%S")
    console.print(Text(facts["path"], style="bold"), soft_wrap=True)
    console.print(
        f"{facts['format']} savepoint of job {facts['job']}, {when} UTC, after batch {facts['batch']}; "
        f"{facts['parallelism']} subtasks of at most {facts['max_parallelism']}",
        soft_wrap=True,
    )
    table = Table("step", "size")
    table.columns[1].justify = "right"
    for operator, size in facts["operators"].items():
        table.add_row(operator, size_text(size))
    console.print(table)
    print_described(console, facts)


def _facts(storage: Storage, metadata: CheckpointMetadata) -> dict[str, Any]:
    from strandline.admin.inspection import described
    from strandline.checkpoint.metadata import all_files

    sizes: Counter[str] = Counter(dict.fromkeys(metadata.operators, 0))
    for state, file in all_files(metadata):
        sizes[state.operator] += file.size
    return {
        "path": storage.url,
        "job": metadata.job,
        "id": metadata.checkpoint_id,
        "format": "native" if any(state.incremental for state in metadata.subtasks) else "canonical",
        "time": metadata.completed_time,
        "batch": metadata.batch_id,
        "parallelism": metadata.parallelism,
        "max_parallelism": metadata.max_parallelism,
        "operators": dict(sizes),
        "full_bytes": sizes.total(),
        **described(metadata),
    }
