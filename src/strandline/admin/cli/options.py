"""Options and output that several commands share."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strandline.admin.problems import UsageError
from strandline.errors import ConfigError, StrandlineError
from strandline.redaction import is_secret

if TYPE_CHECKING:
    from strandline.admin.found_jobs import Where


def job_names(incomplete: str) -> list[str]:
    """The names of this host's running jobs, for the completion of the shell. It never fails."""
    from strandline.observe.registration import local_runs

    with suppress(StrandlineError, OSError):
        return sorted({run.entry.job for run in local_runs() if run.alive and run.entry.job.startswith(incomplete)})
    return []


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
JobName = Annotated[
    str, typer.Argument(metavar="JOB", help="Name, id, or the beginning of the id.", autocompletion=job_names)
]
Url = Annotated[
    str,
    typer.Option("--url", metavar="URL", help="The address of the job's page, for a job of another host or user."),
]
TokenFile = Annotated[
    str,
    typer.Option("--token-file", metavar="FILE", help="The file with its token; or set STRANDLINE_TOKEN."),
]
CheckpointDirs = Annotated[
    list[str] | None,
    typer.Option(
        "--checkpoint-dir", "-c", metavar="DIR", help="Look for the job in this checkpoint directory. Can be repeated."
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


def looked_for(
    url: str = "",
    token_file: str = "",
    checkpoint_dirs: list[str] | None = None,
    storage_option: list[str] | None = None,
) -> Where:
    """Where a command looks for its job. Raises `UsageError` if that is said in two ways.

    Raises `StrandlineError` for a folder that does not exist: a typo must not look like a folder without jobs.
    """
    from strandline.admin.found_jobs import Where

    if url and checkpoint_dirs:
        raise UsageError("--url and checkpoint directories are two places to look for a job; give one of them")
    check_folders(checkpoint_dirs or [])
    return Where(url, token_file, tuple(checkpoint_dirs or ()), storage_settings(storage_option))


def check_folders(places: list[str]) -> None:
    """Raise `StrandlineError` if one of the checkpoint directories is a folder of this host that does not exist."""
    for place in places:
        if not os.path.isdir(place.removeprefix("file://")) and "://" not in place.removeprefix("file://"):
            raise StrandlineError(f"there is no folder {place}; it should be the checkpoint_dir of jobs")


def changelog_roots(locations: list[str] | None, settings: dict[str, str]) -> tuple[str, ...]:
    """The roots given with `--changelog-dir`, as they are written in checkpoints."""
    from strandline.storage import open_storage

    return tuple(open_storage(location, settings).url for location in locations or [])


def storage_settings(pairs: list[str] | None) -> dict[str, str]:
    """The settings given as `--storage-option KEY=VALUE` or `KEY=@FILE`. Refuses a secret among the arguments."""
    return settings_of(pairs, "--storage-option")


MAX_VALUE_BYTES = 1 << 20
"""How much of a file is read for `KEY=@FILE`."""


def settings_of(pairs: list[str] | None, option: str) -> dict[str, str]:
    """The settings given as `option KEY=VALUE` or `KEY=@FILE`. Refuses a secret among the arguments."""
    settings = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"a {option} is not KEY=VALUE")
        if value.startswith("@"):
            value = _read_value(f"{option} {name}", value[1:])
        elif is_secret(name, value):
            raise ConfigError(
                f"{option} {name}: everybody on this host can see the arguments of a command; write the secret "
                f"to a file and give {name}=@FILE, or set it in the environment"
            )
        settings[name] = value
    return settings


def _read_value(option: str, file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            content = opened.read(MAX_VALUE_BYTES + 1)
        if len(content) > MAX_VALUE_BYTES:
            raise ConfigError(
                f"{option}: the file {file} has more than {MAX_VALUE_BYTES:,} bytes, too many for a value"
            )
        return content.decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{option}: cannot read the file {file}: {reason}") from None


def print_json(facts: Any) -> None:
    """Print facts as indented JSON. What a crafted checkpoint holds and JSON cannot is shown as text."""
    typer.echo(json.dumps(facts, indent=2, default=repr))


def duration_option(option: str, text: str, *, zero: bool = False) -> float:
    """The seconds that a user wrote as `500ms`, `10s` or `1min`. Raises `UsageError` that names the option."""
    from strandline.config.option import duration

    kind = duration(zero=zero)
    try:
        return kind.parse(text)
    except ValueError:
        allowed = kind.allowed.removesuffix(", or a timedelta")  # nobody can write one on a command line
        raise UsageError(f"{option} {text!r} is not {allowed}") from None
