"""Flink's paths about jobs and their vertices."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from strandline.rest import flink_jobs
from strandline.rest.service import JobId, Shown, all_facts, json, schemas

router = APIRouter()


@router.get("/jobs", **schemas.answers(flink_jobs.JobIds))
def jobs(shown: Shown) -> Response:
    """The ids and states of all jobs."""
    return json(flink_jobs.job_ids(all_facts(shown.jobs)))


@router.get("/jobs/overview", **schemas.answers(flink_jobs.JobsOverview))
def overview(shown: Shown) -> Response:
    """All jobs with their names and times."""
    return json(flink_jobs.jobs_overview(all_facts(shown.jobs)))


@router.get("/jobs/{jobid}", **schemas.answers(flink_jobs.JobDetailsInfo, 404))
def job(jobid: JobId, request: Request, shown: Shown) -> Response:
    """A job with its vertices."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.job_info(facts))


@router.get("/jobs/{jobid}/plan", **schemas.answers(flink_jobs.JobPlan, 404))
def plan(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The graph of a job."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.plan(facts))


@router.get("/jobs/{jobid}/config", **schemas.answers(flink_jobs.JobConfigInfo, 404))
def config(jobid: JobId, request: Request, shown: Shown) -> Response:
    """The options of a job, without its secrets."""
    facts = shown.facts(jobid)
    return shown.answer(facts, request, lambda: flink_jobs.job_config(facts))
