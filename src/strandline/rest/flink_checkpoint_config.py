"""Flink's JSON about how a job takes checkpoints, from the job's options."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from strandline.observe.facts import JobFacts


class ExternalizedCheckpointInfo(Struct, frozen=True):
    """Whether checkpoints stay in durable storage, and whether a cancelled job deletes them."""

    enabled: bool
    delete_on_cancellation: bool


class CheckpointConfigInfo(Struct, frozen=True):
    """How a job takes checkpoints. Durations are milliseconds; -1 means never."""

    mode: Literal["exactly_once"]
    interval: int
    timeout: int
    min_pause: int
    max_concurrent: int
    externalization: ExternalizedCheckpointInfo
    state_backend: str
    checkpoint_storage: str
    unaligned_checkpoints: bool
    aligned_checkpoint_timeout: int
    tolerable_failed_checkpoints: int
    checkpoints_after_tasks_finish: bool
    state_changelog_enabled: bool
    changelog_storage: str | None
    changelog_periodic_materialization_interval: int | None


def checkpoint_config(facts: JobFacts) -> CheckpointConfigInfo:
    """`GET /jobs/:jobid/checkpoints/config`."""
    changelog = facts.config.get("changelog") is True
    directory = facts.config.get("changelog_dir") or facts.checkpoint_dir
    return CheckpointConfigInfo(
        mode="exactly_once",
        interval=_ms(facts, "checkpoint_interval", -1),
        timeout=_ms(facts, "checkpoint_timeout", -1),
        min_pause=_ms(facts, "min_pause", 0),
        max_concurrent=_number(facts, "max_concurrent_checkpoints", 1),
        externalization=ExternalizedCheckpointInfo(True, facts.config.get("on_cancel") == "delete"),
        state_backend=_text(facts, "state_backend", "rocksdb"),
        checkpoint_storage=facts.checkpoint_dir,
        unaligned_checkpoints=False,
        aligned_checkpoint_timeout=0,
        tolerable_failed_checkpoints=_number(facts, "tolerable_failed_checkpoints", 0),
        checkpoints_after_tasks_finish=True,
        state_changelog_enabled=changelog,
        changelog_storage=str(directory) if changelog else None,
        changelog_periodic_materialization_interval=_ms(facts, "materialization_interval", -1) if changelog else None,
    )


def _ms(facts: JobFacts, option: str, otherwise: int) -> int:
    value = facts.config.get(option)
    return round(value * 1000) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


def _number(facts: JobFacts, option: str, otherwise: int) -> int:
    value = facts.config.get(option)
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _text(facts: JobFacts, option: str, otherwise: str) -> str:
    value = facts.config.get(option)
    return value if isinstance(value, str) else otherwise
