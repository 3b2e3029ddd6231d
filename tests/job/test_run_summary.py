"""A run in one line and in one table, without a run."""

from __future__ import annotations

import inspect
import re
import time

import pytest

import strandline as sl
from strandline.checkpoint.stats import CheckpointStats
from strandline.errors import JobFailedError
from strandline.job.run_summary import summary_html, summary_text
from strandline.runtime.driver.figures import RunSummary
from strandline.runtime.protocol.figures import Facts


def summary(**facts: object) -> RunSummary:
    known: dict[str, object] = {
        "name": "visits",
        "status": sl.RunStatus.RUNNING,
        "generation": 3,
        "batches": 1234,
        "rows": 56789,
        "last_checkpoint": None,
        "error": None,
    }
    return RunSummary(**{**known, **facts})  # type: ignore[arg-type]  # the facts are of mixed types


def test_a_run_without_a_checkpoint_in_one_line() -> None:
    assert (
        summary_text(summary())
        == "<JobRun 'visits' running: generation 3, batches 1,234, rows 56,789, last checkpoint none>"
    )


def test_the_last_checkpoint_is_shown_with_its_age_and_size() -> None:
    last = CheckpointStats(
        id=7,
        status="completed",
        kind="checkpoint",
        batch_id=1,
        trigger_time=time.time() - 60,
        end_to_end_ms=1000.0,
        sync_ms=0.0,
        async_ms=0.0,
        start_delay_ms=0.0,
        alignment_ms=0.0,
        alignment_bytes=0,
        barrier_to_completed_ms=0.0,
        checkpointed_bytes=10,
        full_bytes=123456,
    )
    assert "last checkpoint 7 (59 s ago, 123,456 bytes)" in summary_text(summary(last_checkpoint=last))


def test_the_table_escapes_every_text() -> None:
    error = JobFailedError("<script>alert(1)</script>\nmore")
    table = summary_html(summary(name="<i>", status=sl.RunStatus.FAILED, error=error))
    assert "<script>" not in table
    assert "<caption>&lt;i&gt;</caption>" in table
    assert "<td>JobFailedError: &lt;script&gt;alert(1)&lt;/script&gt;</td>" in table


@pytest.mark.parametrize(
    "record",
    [
        sl.RunFigures,
        sl.SourceFigures,
        sl.StepFigures,
        sl.RestoreFigures,
        sl.StateMemory,
        sl.ChangelogFigures,
        sl.RunProcesses,
        sl.TaskManagerProcess,
        sl.SlotProcess,
    ],
)
def test_help_describes_every_field_of_the_figures(record: type[Facts]) -> None:
    described = re.findall(r"^    (\w+): \S", inspect.getdoc(record) or "", re.MULTILINE)
    assert tuple(described) == record.__struct_fields__


def test_help_describes_every_status() -> None:
    text = inspect.getdoc(sl.RunStatus) or ""
    assert re.findall(r"^    (\w+): \S", text, re.MULTILINE) == [status.name for status in sl.RunStatus]
    assert "run.status.ended" in text


def test_a_status_equals_its_text() -> None:
    assert [str(status) for status in sl.RunStatus if status == "running"] == ["running"]
    assert str(sl.RunStatus("cancelled")) == "cancelled"
    ended = [str(status) for status in sl.RunStatus if status.ended]
    assert ended == ["finished", "stopped", "cancelled", "failed"]


def test_the_table_shows_what_is_wrong_and_where_the_page_is() -> None:
    finding = sl.Finding("back-pressure", "warning", "<b>slow</b>", "71 % of the time.", "Rescale.", "counts")
    table = summary_html(summary(), [finding], 'http://127.0.0.1:8081/"')
    assert "<th>health: warning</th><td>&lt;b&gt;slow&lt;/b&gt;: 71 % of the time. Rescale.</td>" in table
    assert '<a href="http://127.0.0.1:8081/&quot;">' in table
    assert "health" not in summary_html(summary())
