"""The metrics of all jobs in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from strandline.observe.facts import JobFacts
from strandline.rest.flink_metrics import Value, job_metrics, last_checkpoint, step_metrics, subtask_metrics
from strandline.rest.flink_states import job_state

JOB = "strandline_jobmanager_job"
STEP = "strandline_jobmanager_job_step"
TASK = "strandline_taskmanager_job_task"
HEALTH = "strandline_job_health"
INFO = "strandline_job_info"

MOST_SUBTASKS = 200
"""A job with more subtasks gives the metrics of its steps only, unless the scrape asks for `?subtasks=true`."""

_JOB_LABELS = ("job_id", "job_name")
_STEP_LABELS = (*_JOB_LABELS, "task_id", "task_name")
_TASK_LABELS = (*_STEP_LABELS, "subtask_index", "tm_id")
_SEVERITIES = ("critical", "warning", "info")


def metrics_text(jobs: Sequence[JobFacts], *, subtasks: bool = False) -> bytes:
    """The metrics of these jobs. With `subtasks`, all subtasks have theirs, however many there are."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Facts(jobs, subtasks))
    return generate_latest(registry)


class _Facts(Collector):
    """Gives the metrics of facts that were taken already."""

    def __init__(self, jobs: Sequence[JobFacts], subtasks: bool) -> None:
        self._jobs = jobs
        self._subtasks = subtasks

    def describe(self) -> Iterable[Metric]:
        # Without it, the registry would collect all metrics once just to learn their names.
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for facts in self._jobs:
            job = (facts.id, facts.name)
            _add(families, JOB, _JOB_LABELS, job, job_metrics(facts))
            _add_steps(families, facts, job)
            if self._subtasks or len(facts.subtasks) <= MOST_SUBTASKS:
                _add_subtasks(families, facts, job)
        yield from families.values()
        yield _info(self._jobs)
        yield _health(self._jobs)


def _add_steps(families: dict[str, GaugeMetricFamily], facts: JobFacts, job: tuple[str, str]) -> None:
    for vertex in facts.steps:
        _add(families, STEP, _STEP_LABELS, (*job, vertex.id, vertex.name), step_metrics(facts, vertex))


def _add_subtasks(families: dict[str, GaugeMetricFamily], facts: JobFacts, job: tuple[str, str]) -> None:
    for vertex in facts.steps:
        last = last_checkpoint(facts, vertex)
        for one in facts.subtasks:
            if one.vertex == vertex.id:
                labels = (*job, vertex.id, vertex.name, str(one.index), one.task_manager)
                _add(families, TASK, _TASK_LABELS, labels, subtask_metrics(facts, one, last.get(one.index)))


def _add(
    families: dict[str, GaugeMetricFamily],
    scope: str,
    names: Sequence[str],
    labels: Sequence[str],
    metrics: Mapping[str, Value],
) -> None:
    for name, value in metrics.items():
        if isinstance(value, str):
            continue  # Prometheus knows numbers only; the path of the last checkpoint is at `/jobs/:jobid/metrics`.
        full = f"{scope}_{name}"
        if full not in families:
            families[full] = GaugeMetricFamily(full, f"Flink's {name}: see docs/metrics.md", labels=names)
        families[full].add_metric(labels, value)


def _info(jobs: Iterable[JobFacts]) -> Metric:
    family = GaugeMetricFamily(INFO, "1 for each job, with its state", labels=(*_JOB_LABELS, "state"))
    for facts in jobs:
        family.add_metric((facts.id, facts.name, job_state(facts)), 1)
    return family


def _health(jobs: Iterable[JobFacts]) -> Metric:
    """How many findings there are of each rule. Every job has a series of each severity, so that 0 is told, too."""
    family = GaugeMetricFamily(HEALTH, "Broken rules of health", labels=(*_JOB_LABELS, "rule", "severity"))
    for facts in jobs:
        counts: dict[tuple[str, str], int] = {("", severity): 0 for severity in _SEVERITIES}
        for finding in facts.health:
            counts[finding.rule, finding.severity] = counts.get((finding.rule, finding.severity), 0) + 1
        for (rule, severity), number in counts.items():
            family.add_metric((facts.id, facts.name, rule, severity), number)
    return family
