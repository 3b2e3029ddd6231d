"""Options and output that several commands share."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from strandline.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Location = Annotated[str, typer.Argument(help="A job's checkpoint folder (checkpoint_dir/job), or the checkpoint_dir.")]
Job = Annotated[str | None, typer.Option(help="Which job, if the location holds several.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", "-o", metavar="KEY=VALUE", help="A setting of the object store, e.g. endpoint."),
]


def storage_settings(pairs: list[str] | None) -> dict[str, str]:
    """The settings given as `--storage-option KEY=VALUE`."""
    settings = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"--storage-option {pair!r} is not KEY=VALUE")
        settings[name] = value
    return settings


def print_json(facts: Any) -> None:
    """Print facts as indented JSON."""
    typer.echo(json.dumps(facts, indent=2))
