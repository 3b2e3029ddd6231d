"""What the commands on checkpoints report, as text for a person."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from strandline.admin.cli.console import SafeConsole
from strandline.admin.inspection import CheckpointFacts, JobFolder
from strandline.checkpoint.steps import columns_text, duration_text
from strandline.observe.words import size

if TYPE_CHECKING:
    from strandline.admin.garbage import Garbage
    from strandline.admin.verification import Verified


def print_verified(location: str, found: list[Verified]) -> None:
    console = SafeConsole()
    if not found:
        console.print(f"{location}: no completed checkpoint yet", soft_wrap=True)
    for checkpoint in found:
        mark = ("✖ ", "bold red") if checkpoint.damage else ("✔ ", "bold green")
        bad = f", {len(checkpoint.damage)} damaged or missing" if checkpoint.damage else ", all whole"
        files = f"{checkpoint.files} files, {size(checkpoint.bytes)}"
        text = f"{checkpoint.kind} {checkpoint.id} of job {checkpoint.job}: {files}"
        console.print(Text.assemble(mark, text, bad), soft_wrap=True)
        for damage in checkpoint.damage:
            whose = f" (operator {damage.operator}, subtask {damage.subtask})" if damage.operator is not None else ""
            console.print(Text(f"  {damage.path} {damage.problem}{whose}", style="red"), soft_wrap=True)


def garbage_facts(garbage: Garbage, deleted: bool) -> dict[str, Any]:
    files = garbage.files
    return {
        "job": garbage.job,
        "generation": garbage.generation,
        "owner": garbage.owner,
        "live_since": garbage.live_since if math.isfinite(garbage.live_since) else None,
        "retained": list(garbage.retained),
        "referenced": files.referenced,
        "orphans": [{"path": file.path, "size": file.size, "modified": file.modified} for file in files.orphans],
        "orphan_bytes": sum(file.size for file in files.orphans),
        "deleted": deleted,
        "kept": {
            "possibly_live": [file.path for file in files.live],
            "young": [file.path for file in files.young],
            "number_in_use": [file.path for file in files.numbers],
        },
    }


def print_garbage(folder: JobFolder, garbage: Garbage, min_age: str, deleted: bool) -> None:
    console = SafeConsole()
    files = garbage.files

    def say(text: str | Text) -> None:
        console.print(text, soft_wrap=True)

    say(Text.assemble((f"job {folder.job}", "bold"), f" in {folder.path}"))
    for file in files.orphans:
        say(Text(f"  {_time(file.modified)}  {size(file.size):>9}  {file.path}"))
    if files.orphans:
        orphaned = size(sum(file.size for file in files.orphans))
        say(f"{len(files.orphans)} orphans of {orphaned} {'deleted' if deleted else 'found; --yes deletes them'}")
    else:
        say("no orphans")
    if files.live:
        by = f" by {garbage.owner}" if garbage.owner else ""
        say(
            f"{len(files.live)} files kept that generation {garbage.generation}, begun{by}, may still need; if it has "
            "ended, add --take-over"
        )
    if files.young:
        say(f"{len(files.young)} files kept that are younger than --min-age {min_age}")
    if files.numbers:
        say(f"{len(files.numbers)} _metadata kept until a checkpoint with a higher number has completed")


def print_list(folder: JobFolder, found: list[CheckpointFacts]) -> None:
    console = SafeConsole()
    console.print(Text.assemble((f"job {folder.job}", "bold"), f" in {folder.path}"), soft_wrap=True)
    if not found:
        console.print("  no completed checkpoint yet")
        return
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for name in ("id", "batch", "gen."):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("completed (UTC)", no_wrap=True)
    for name in ("files", "full size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("folder", no_wrap=True)
    for facts in found:
        place = facts.path.rpartition("/")[2]
        if facts.problem:
            table.add_row(str(facts.id), *[""] * 5, Text(f"{place} ✖", style="red"))
            continue
        table.add_row(
            str(facts.id),
            str(facts.batch),
            str(facts.generation),
            _time(facts.time or 0.0),
            str(facts.files),
            size(facts.full_bytes or 0),
            f"{place} {note}" if (note := _note(facts)) else place,
        )
    console.print(table)
    if any(facts.left_behind for facts in found):
        console.print("left behind: the job went back to a checkpoint before this one and computed its batches again")
    for facts in found:
        if facts.epoch_files:
            behind = f"{facts.epoch_files} files, {size(facts.epoch_bytes)}"
            console.print(f"durable epochs behind checkpoint {facts.id}: {behind}; the next start goes on behind them")
        if facts.problem:
            console.print(Text(facts.problem, style="red"), soft_wrap=True)


def _note(facts: CheckpointFacts) -> str:
    if facts.latest:
        return "newest"
    return "left behind" if facts.left_behind else ""


def print_details(details: dict[str, Any]) -> None:
    console = SafeConsole()
    head = Table.grid(padding=(0, 2))
    for name, value in (
        ("checkpoint", f"{details['id']} of job {details['job']}"),
        ("path", details["path"]),
        ("completed", f"{_time(details['time'])} UTC, generation {details['generation']}, batch {details['batch']}"),
        ("state", f"{size(details['full_bytes'])} in {details['files']} files"),
        ("parallelism", f"{details['parallelism']} of at most {details['max_parallelism']}"),
        ("published", f"{details['sink_rows']:,} rows in {details['sink_files']} files by this checkpoint"),
    ):
        head.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    console.print(head)
    print_described(console, details)
    table = Table(box=None, header_style="dim", padding=(0, 1))
    table.add_column("operator")
    for name in ("subtask", "key groups", "backend", "files", "of them shared", "full size"):
        table.add_column(name, justify="right", no_wrap=True)
    for subtask in details["subtasks"]:
        first, end = subtask["key_groups"]
        table.add_row(
            subtask["operator"],
            str(subtask["subtask"]),
            f"{first}–{end - 1}",
            subtask["backend"],
            str(len(subtask["files"])),
            str(sum(file["shared"] for file in subtask["files"])),
            size(subtask["full_bytes"]),
        )
    console.print(table)


def print_described(console: SafeConsole, facts: dict[str, Any]) -> None:
    """The position of a checkpoint or savepoint in the sources, and its steps with their states."""
    head = Table.grid(padding=(0, 2))
    for name, value in (
        ("watermark", _watermark(facts["watermark_ms"])),
        *((f"source {source['source']}", _offset(source["offset"])) for source in facts["sources"]),
    ):
        head.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    console.print(head)
    for step in facts["steps"]:
        _print_step(console, step)


def _print_step(console: SafeConsole, step: dict[str, Any]) -> None:
    state = f"{size(step['full_bytes'])} in {step['parallelism']} subtasks"
    if step["watermark_ms"] is not None:
        state += f", watermark {_watermark(step['watermark_ms'])}"
    console.print(Text.assemble("step ", (step["uid"], "bold"), f": {state}"), soft_wrap=True)
    if step["description"] is not None:
        console.print(Text(f"  {step['description']}"), soft_wrap=True)
    for state in step["states"]:
        key, lives = state.get("key_schema"), state.get("ttl_ms")
        keyed = f"{_columns(key)} → " if key else ""
        until = f", time to live {duration_text(lives) if isinstance(lives, int) else lives}" if lives else ""
        what = f"{state.get('name')}: {state.get('kind')} of {keyed}{_columns(state.get('schema'))}{until}"
        console.print(Text(f"  {what}"), soft_wrap=True)


def _columns(schema: Any) -> str:
    """A stored schema for people: `user string, n long`. What is no schema of Spark's in JSON stays as it is."""
    try:
        fields = json.loads(schema)["fields"]
        return columns_text((field["name"], _type(field["type"])) for field in fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return str(schema)


def _type(stored: Any) -> str:
    """A type of Spark's for people, from its JSON: a name, or an object for a nested or a user-defined type."""
    if isinstance(stored, str):
        return stored
    match stored["type"]:
        case "struct":
            return f"struct<{columns_text((field['name'], _type(field['type'])) for field in stored['fields'])}>"
        case "array":
            return f"array<{_type(stored['elementType'])}>"
        case "map":
            return f"map<{_type(stored['keyType'])}, {_type(stored['valueType'])}>"
        case other:
            return str(other)


def _watermark(milliseconds: int | None) -> str:
    if milliseconds is None:
        return "none"
    try:
        return f"{_time(milliseconds / 1000)} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{milliseconds} ms after 1970"  # beyond the years that Python knows


def _offset(offset: Any) -> str:
    return offset if isinstance(offset, str) else json.dumps(offset)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
