"""The command `strandline savepoint`: takes one of a running job, shows what one holds, or deletes one."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from strandline.admin.cli.options import (
    Json,
    StorageOptions,
    TokenFile,
    Url,
    job_names,
    looked_for,
    print_json,
    storage_settings,
)
from strandline.admin.cli.steering import Detached, SavepointType, Type, take_savepoint
from strandline.admin.problems import UsageError

if TYPE_CHECKING:
    from strandline.checkpoint.metadata import CheckpointMetadata
    from strandline.storage import Storage

METADATA: Final = "_metadata"


def savepoint(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="JOB | PATH",
            help="A running job: name, id, or the beginning of the id. Or the folder of a savepoint, or the _metadata "
            "in it: a path with a slash, or a folder that holds a savepoint.",
            autocompletion=job_names,
        ),
    ],
    directory: Annotated[
        str | None,
        typer.Argument(metavar="[DIR]", help="Where the savepoint goes; without it, the job's option savepoint_dir."),
    ] = None,
    kind: Type = SavepointType.canonical,
    detached: Detached = False,
    dispose: Annotated[bool, typer.Option("--dispose", help="Delete the savepoint PATH with all its files.")] = False,
    url: Url = "",
    token_file: TokenFile = "",
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Take a savepoint of a running job, show what a savepoint holds, or delete one.

    `strandline savepoint JOB [DIR]` takes one, and the job goes on. `strandline savepoint PATH` shows its steps with
    their states and the position in the sources. `strandline savepoint --dispose PATH` deletes it.
    """
    if dispose or (directory is None and not url and _is_savepoint(subject)):
        if directory is not None:
            raise UsageError("--dispose takes one argument: the path of the savepoint")
        _look(subject, dispose, as_json, storage_option)
    else:
        take_savepoint(subject, directory, kind, looked_for(url, token_file), detached=detached, as_json=as_json)


def _is_savepoint(subject: str) -> bool:
    """Whether the argument is a path. The name of a job holds no slash."""
    return "/" in subject or subject == METADATA or os.path.exists(os.path.join(subject, METADATA))


def _look(location: str, dispose: bool, as_json: bool, storage_option: list[str] | None) -> None:
    """Show a savepoint, or delete it."""
    from strandline.runtime.driver.restore.disposal import dispose_savepoint
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
    from strandline.admin.cli.reports import print_described
    from strandline.admin.cli.words import moment
    from strandline.observe.words import size

    console = SafeConsole()
    if dispose:
        console.print(f"Savepoint disposed: {facts['path']} ({facts['disposed_files']} files)", soft_wrap=True)
        return
    console.print(Text(facts["path"], style="bold"), soft_wrap=True)
    console.print(
        f"{facts['format']} savepoint of job {facts['job']}, {moment(facts['time'] * 1000)} UTC, "
        f"after batch {facts['batch']}; {facts['parallelism']} subtasks of at most {facts['max_parallelism']}",
        soft_wrap=True,
    )
    table = Table("step", "size")
    table.columns[1].justify = "right"
    for operator, held in facts["operators"].items():
        table.add_row(operator, size(held))
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
