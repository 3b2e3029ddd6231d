"""Options and output that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from strandline.errors import ConfigError
from strandline.redaction import is_secret

Json = Annotated[bool, typer.Option("--json", help="Print the facts as JSON on standard output.")]
Location = Annotated[str, typer.Argument(help="A job's checkpoint folder (checkpoint_dir/job), or the checkpoint_dir.")]
Job = Annotated[str | None, typer.Option(help="Which job, if the location holds several.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        "-o",
        metavar="KEY=VALUE",
        help="A setting of the object store, e.g. endpoint. KEY=@FILE reads the value from a file; secrets must be "
        "given so, because everybody on the host can see the arguments of a command.",
    ),
]
ChangelogDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--changelog-dir",
        metavar="PATH",
        help="The job's changelog_dir, or another storage that holds files of its checkpoints. Can be repeated.",
    ),
]


def changelog_roots(locations: list[str] | None, settings: dict[str, str]) -> tuple[str, ...]:
    """The roots given with `--changelog-dir`, as they are written in checkpoints."""
    from strandline.storage import open_storage

    return tuple(open_storage(location, settings).url for location in locations or [])


def storage_settings(pairs: list[str] | None) -> dict[str, str]:
    """The settings given as `--storage-option KEY=VALUE` or `KEY=@FILE`. Refuses a secret among the arguments."""
    settings = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError("a --storage-option is not KEY=VALUE")
        if value.startswith("@"):
            value = _read_value(name, value[1:])
        elif is_secret(name, value):
            raise ConfigError(
                f"--storage-option {name}: everybody on this host can see the arguments of a command; write the secret "
                f"to a file and give {name}=@FILE, or set it in the environment"
            )
        settings[name] = value
    return settings


def _read_value(name: str, file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--storage-option {name}: cannot read the file {file}: {reason}") from None


def print_json(facts: Any) -> None:
    """Print facts as indented JSON. What a crafted checkpoint holds and JSON cannot is shown as text."""
    typer.echo(json.dumps(facts, indent=2, default=repr))
