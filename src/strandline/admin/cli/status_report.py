"""One screen about one job: health in words first, then figures, then the busiest subtasks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from strandline.admin.cli.words import lasted, moment, one_line, plural, rate
from strandline.observe.catching_up import CatchingUp
from strandline.observe.facts import Finding, JobFacts, SubtaskFacts, Vertex
from strandline.observe.words import percent, size
from strandline.rest.flink_vertices import level

if TYPE_CHECKING:
    from strandline.checkpoint.stats import CheckpointStats
    from strandline.runtime.driver.figures import RunFigures

SHOWN_SUBTASKS: Final = 10
SHOWN_FINDINGS: Final = 8
SHOWN_SOURCES: Final = 6
SHOWN_STEPS: Final = 12
LONG_BATCH_MS: Final = 2000.0
"""A batch that has been running for so long is shown while it runs."""
_MARKS = {"critical": ("✖", "bold red"), "warning": ("▲", "bold yellow"), "info": ("·", "blue")}


def status_screen(facts: JobFacts, catching: CatchingUp | None = None, subtasks: int = SHOWN_SUBTASKS) -> Group:
    """The screen, to be printed by a `SafeConsole`."""
    parts: list[RenderableType] = [_head(facts), *_health(facts), _figures(facts, catching)]
    if facts.steps:
        parts.append(_steps(facts))
    if facts.subtasks and subtasks:
        parts += _subtasks(facts, subtasks)
    return Group(*parts)


def status_facts(facts: JobFacts, catching: CatchingUp | None = None) -> dict[str, Any]:
    """The facts for `--json`. Plots and the history of checkpoints are left out: REST has them."""
    document = facts.as_dict()
    for name in ("samples", "key_group_rows"):
        document.pop(name, None)
    document["checkpoints"].pop("history", None)
    for name in ("last_completed", "last_failed", "last_savepoint"):
        one = document["checkpoints"].get(name)
        if isinstance(one, dict):
            one.pop("subtasks", None)
    document["runs"] = facts.runs
    document["healthy"] = healthy(facts)
    document["catching_up"] = None if catching is None else catching.as_dict()
    return document


def healthy(facts: JobFacts) -> bool:
    """Whether the job runs, and breaks no rule of health that asks for something to be done."""
    return facts.runs and all(finding.severity == "info" for finding in facts.health)


def status_words(facts: JobFacts) -> str:
    """Where the job stands, in a few words."""
    if facts.driver_lost:
        return f"driver lost, last seen {facts.status}"
    return str(facts.status)


def _head(facts: JobFacts) -> Text:
    style = "bold green" if facts.runs else "bold red" if facts.driver_lost or facts.error else "bold"
    end = facts.end_ms if facts.end_ms is not None else facts.taken_ms
    ran, began = ("for", "since") if facts.runs else ("after", "started")
    driver = facts.driver
    where = f"{one_line(driver.user)}@{one_line(driver.host)}, process {driver.pid}" if driver.pid else "driver unknown"
    return Text.assemble(
        (one_line(facts.name), "bold"),
        "  ",
        (status_words(facts), style),
        f" {ran} {lasted(end - facts.start_ms)}, {began} {moment(facts.start_ms)} UTC\n",
        (f"{one_line(facts.id)}  {where}  {one_line(driver.ui_url)}".rstrip(), "dim"),
        no_wrap=False,
        overflow="fold",
    )


def _health(facts: JobFacts) -> Iterable[Text]:
    if facts.error:
        yield Text.assemble(("✖ ", "bold red"), (one_line(facts.error, 500), "red"))
    elif facts.driver_lost:
        yield Text.assemble(
            ("✖ the driver is gone", "bold red"),
            f": last seen {moment(facts.taken_ms)} UTC. Start the job again: it goes on from its newest checkpoint",
        )
    for finding in facts.health[:SHOWN_FINDINGS]:
        yield _finding(finding)
    if len(facts.health) > SHOWN_FINDINGS:
        yield Text(f"  and {len(facts.health) - SHOWN_FINDINGS} more: see --json", style="dim")
    if healthy(facts):
        yield Text("✔ healthy", style="bold green")


def _finding(finding: Finding) -> Text:
    mark, style = _MARKS[finding.severity]
    about = f" ({one_line(finding.subject)})" if finding.subject else ""
    return Text.assemble(
        (f"{mark} {one_line(finding.title)}", style),
        f"{about}: {one_line(finding.text, 400)}\n",
        (f"  → {one_line(finding.remedy, 400)}", "italic"),
        (f" [{finding.rule}]", "dim"),
    )


def _figures(facts: JobFacts, catching: CatchingUp | None) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in _rows(facts, catching):
        grid.add_row(name, Text(value))
    return grid


def _rows(facts: JobFacts, catching: CatchingUp | None) -> Iterable[tuple[str, str]]:
    figures = facts.figures
    if figures is not None:
        if figures.restoring is not None:
            seen = figures.restoring
            yield "restoring", f"{size(seen.done_bytes)} of {size(seen.total_bytes)} on local disks"
        if facts.runs:
            yield "batch", _batch_words(figures)
        if figures.batch_duration_ms or not facts.runs:
            yield "rows in", f"{rate(figures.rows_per_second)} in the last minute, {figures.rows:,} in all"
            yield "rows out", f"{rate(figures.rows_out_per_second)}, {figures.rows_out:,} in all"
            lag = (
                "no event time so far"
                if figures.watermark_lag_ms is None
                else f"{lasted(figures.watermark_lag_ms)} behind"
            )
            yield "watermark", f"{lag}; {plural(figures.late_rows, 'late row')}"
        else:
            yield "rows", "counted when a batch has ended"
        for source in figures.sources[:SHOWN_SOURCES]:
            behind = "" if source.offsets_behind is None else f", {plural(source.offsets_behind, 'offset')} behind"
            yield "source", f"{one_line(source.description)}: {plural(source.rows, 'row')}{behind}"
        if len(figures.sources) > SHOWN_SOURCES:
            yield "", f"and {len(figures.sources) - SHOWN_SOURCES} more sources"
        yield "state", _state_words(facts)
    yield "checkpoint", _checkpoint_words(facts)
    if facts.subtasks:
        worst = max(facts.subtasks, key=lambda subtask: subtask.back_pressured)
        name = _names(facts).get(worst.vertex, "?")
        yield (
            "back pressure",
            f"{level(worst.back_pressured).upper()}: at most {percent(worst.back_pressured)}, {one_line(name)} subtask "
            f"{worst.index}",
        )
    if figures is not None:
        yield (
            "recovered",
            f"{plural(figures.restarts, 'restart')}, {plural(figures.replaced_slots, 'slot')} replaced, "
            f"{plural(len(facts.rescalings), 'rescale')}; generation {figures.generation}",
        )
    if catching is not None:
        yield "catching up", catching.in_words()


def _batch_words(figures: RunFigures) -> str:
    """What batch runs, and since when; of one that has just begun, only if it is the first one."""
    running, last = figures.running_batch, f"the last one took {lasted(figures.batch_duration_ms)}"
    if figures.batch_duration_ms == 0:
        last = "none has ended so far"
    if running is not None and (running.first or running.running_ms >= LONG_BATCH_MS):
        which = "the first batch" if running.first else f"batch {running.number}"
        return f"{which} of generation {figures.generation} has been running for {lasted(running.running_ms)}; {last}"
    return last


def _state_words(facts: JobFacts) -> str:
    figures = facts.figures
    assert figures is not None
    words = f"{size(figures.state_bytes)}, {size(figures.state_memory_bytes)} of it in memory"
    ratios = [one.cache_hit_ratio for one in facts.subtasks if one.cache_hit_ratio is not None]
    return f"{words}, cache hits at least {percent(min(ratios))}" if ratios else words


def _checkpoint_words(facts: JobFacts) -> str:
    checkpoints = facts.checkpoints
    counts = checkpoints.counts
    totals = f"{counts.completed:,} completed, {counts.failed:,} failed in this run"
    last = checkpoints.last_completed
    if last is None:
        return f"none completed yet; {totals}"
    words = f"number {last.id}, {_ago(last, facts)}, in {lasted(last.end_to_end_ms)}"
    sizes = f"{size(last.checkpointed_bytes)} of {size(last.full_bytes)} uploaded"
    failed = checkpoints.last_failed
    worse = ""
    if failed is not None and failed.id > last.id:
        worse = f"; {failed.id} failed: {one_line(failed.failure or 'no cause known', 200)}"
    return f"{words}, {sizes}; {totals}{worse}"


def _ago(last: CheckpointStats, facts: JobFacts) -> str:
    completed_ms = last.end_time * 1000
    if not facts.runs:
        return f"at {moment(completed_ms)} UTC"
    return f"{lasted(facts.taken_ms - completed_ms)} ago"


def _names(facts: JobFacts) -> dict[str, str]:
    return {vertex.id: vertex.name for vertex in facts.graph}


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number != 0, overflow="fold")
    return table


def _steps(facts: JobFacts) -> Table:
    table = _table("step", "subtasks", "busy", "back pr.", "rows in/s", "rows out/s", "state")
    for vertex in facts.steps[:SHOWN_STEPS]:
        own = [one for one in facts.subtasks if one.vertex == vertex.id]
        table.add_row(one_line(vertex.name), str(vertex.parallelism), *_step_figures(facts, vertex, own))
    if len(facts.steps) > SHOWN_STEPS:
        table.add_row(f"and {len(facts.steps) - SHOWN_STEPS} more", *[""] * 6)
    return table


def _step_figures(facts: JobFacts, vertex: Vertex, own: list[SubtaskFacts]) -> list[str]:
    figures = facts.figures.steps.get(vertex.name) if facts.figures is not None else None
    state = size(figures.state_bytes) if figures is not None else ""
    if not own:
        return ["", "", "", "", state]
    return [
        percent(max(one.busy for one in own)),
        percent(max(one.back_pressured for one in own)),
        rate(sum(one.rows_in_per_second for one in own)),
        rate(sum(one.rows_out_per_second for one in own)),
        state or size(sum(one.state_bytes for one in own)),
    ]


def _subtasks(facts: JobFacts, most: int) -> Iterable[RenderableType]:
    """The subtasks that have most to do."""
    names = _names(facts)
    busiest = sorted(facts.subtasks, key=lambda one: (one.busy + one.back_pressured, one.rows_in), reverse=True)
    table = _table("busiest subtasks", "busy", "back pr.", "rows in/s", "state", "host", "process")
    for one in busiest[:most]:
        table.add_row(
            f"{one_line(names.get(one.vertex, '?'), 40)} {one.index}",
            percent(one.busy),
            percent(one.back_pressured),
            rate(one.rows_in_per_second),
            size(one.state_bytes),
            one_line(one.host, 40),
            str(one.pid),
        )
    yield table
    if len(busiest) > most:
        yield Text(f"{most} of {len(busiest):,} subtasks; --subtasks N shows more", style="dim")
