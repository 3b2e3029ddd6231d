"""Metrics for Prometheus, their page in the documentation, and the dashboard that reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from strandline.observe.facts import Finding, JobFacts
from strandline.rest.prometheus import metrics_text
from strandline.runtime.protocol.figures import ChangelogFigures
from tests.observe.generated import generated_facts
from tests.rest.served import Client

DOCS = Path(__file__).parents[2] / "docs"
FINDING = Finding("back-pressure", "warning", "slow", "it is slow", "make it fast")


def rich_facts() -> JobFacts:
    """Facts in which every figure is known."""
    facts = generated_facts()
    assert facts.figures is not None
    sources = (msgspec.structs.replace(facts.figures.sources[0], offsets_behind=12), *facts.figures.sources[1:])
    figures = msgspec.structs.replace(facts.figures, changelog=ChangelogFigures(upload_requests=4), sources=sources)
    return msgspec.structs.replace(facts, figures=figures, health=(FINDING,))


def families(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def value(text: bytes, name: str, **labels: str) -> float:
    (found,) = [sample.value for sample in families(text)[name].samples if labels.items() <= sample.labels.items()]
    return float(found)


def test_the_metrics_of_a_job_have_flinks_names_and_the_values_of_the_facts() -> None:
    facts = rich_facts()
    text = metrics_text([facts])
    last = facts.checkpoints.last_completed
    assert last is not None
    job = "strandline_jobmanager_job"
    assert value(text, f"{job}_lastCheckpointDuration", job_name="visits") == round(last.end_to_end_ms)
    assert value(text, f"{job}_lastCompletedCheckpointId") == last.id
    assert value(text, f"{job}_numberOfFailedCheckpoints") == facts.checkpoints.counts.failed
    assert value(text, f"{job}_numRestarts") == 1
    assert value(text, f"{job}_runningState") == 1
    assert value(text, f"{job}_runningTimeTotal") == 3_596_000
    assert value(text, f"{job}_pendingRecords") == 12
    assert value(text, f"{job}_numberOfUploadRequests") == 4
    task = "strandline_taskmanager_job_task"
    subtask = next(one for one in facts.subtasks if one.index == 1)
    found = value(text, f"{task}_busyTimeMsPerSecond", subtask_index="1", task_id=subtask.vertex)
    assert found == round(1000 * subtask.busy, 1)
    shares = [
        value(text, f"{task}_{kind}TimeMsPerSecond", subtask_index="1", task_id=subtask.vertex)
        for kind in ("busy", "idle", "backPressured")
    ]
    assert abs(sum(shares) - 1000) < 1


def test_findings_of_health_are_a_metric_and_no_finding_is_zero() -> None:
    facts = rich_facts()
    text = metrics_text([facts, msgspec.structs.replace(facts, id="2", name="well", health=())])
    assert value(text, "strandline_job_health", rule="back-pressure", severity="warning") == 1
    samples = families(text)["strandline_job_health"].samples
    assert sum(one.value for one in samples if one.labels["job_name"] == "well") == 0


def test_a_name_cannot_break_the_format() -> None:
    odd = msgspec.structs.replace(rich_facts(), name='a"b\\c\nd')
    labels = families(metrics_text([odd]))["strandline_job_info"].samples[0].labels
    assert labels["job_name"] == 'a"b\\c\nd'


def test_many_subtasks_have_metrics_only_if_they_are_asked_for() -> None:
    facts = generated_facts(parallelism=1000, checkpoints=2, samples=1)
    small, whole = metrics_text([facts]), metrics_text([facts], subtasks=True)
    assert len(small) < 50_000
    assert small.count(b"strandline_taskmanager_job_task_busyTimeMsPerSecond{") == 0
    assert whole.count(b"strandline_taskmanager_job_task_busyTimeMsPerSecond{") == 2000
    assert len(whole) < 10_000_000


def test_metrics_are_served(client: Client) -> None:
    answer = client("GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert value(answer.body, "strandline_job_info", state="RUNNING") == 1
    assert value(answer.body, "strandline_job_info", state="FAILED") == 1


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    board = json.loads((DOCS / "grafana" / "strandline.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 15
    printed = families(metrics_text([rich_facts()])).keys()
    asked = {name for query in queries for name in re.findall(r"\bstrandline_\w+", query)}
    asked |= {
        name for variable in board["templating"]["list"] for name in re.findall(r"\bstrandline_\w+", str(variable))
    }
    assert asked <= printed


def test_the_page_of_metrics_lists_all_of_them_and_no_other() -> None:
    page = (DOCS / "metrics.md").read_text().partition("## Spark")[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    printed = {
        name.removeprefix(scope)
        for name in families(metrics_text([rich_facts()]))
        for scope in (
            "strandline_jobmanager_job_step_",
            "strandline_jobmanager_job_",
            "strandline_taskmanager_job_task_",
        )
        if name.startswith(scope)
    }
    printed = {name.removeprefix("step_") for name in printed}
    assert listed - {"lastCheckpointExternalPath", "strandline_job_info", "strandline_job_health"} == printed
