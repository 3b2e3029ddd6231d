"""Generated facts of a job: as many subtasks and checkpoints as a test asks for."""

from __future__ import annotations

import random

from strandline.checkpoint.stats import CheckpointCounts, CheckpointStats, RestoredCheckpoint, SubtaskStats
from strandline.observe.facts import (
    CheckpointsFacts,
    DriverFacts,
    FailureFacts,
    JobFacts,
    Sample,
    StatusChange,
    SubtaskFacts,
    Vertex,
    job_id,
    vertex_id,
)
from strandline.runtime.driver.figures import RestoreFigures, RunFigures, SourceFigures, StateMemory, StepFigures
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.status import RunStatus

NOW = 1_760_000_000.0
"""The moment at which generated facts were taken, in seconds since the epoch."""


def generated_facts(
    *,
    name: str = "visits",
    status: RunStatus = RunStatus.RUNNING,
    parallelism: int = 2,
    checkpoints: int = 20,
    samples: int = 600,
    seed: int = 7,
) -> JobFacts:
    """The facts of a job with two sources, two steps and a sink, as if it had run for an hour.

    Every tenth checkpoint has failed and every seventeenth is a savepoint; one is in progress. There is a restart, a
    loss of slots, and a rescale.
    """
    chance = random.Random(seed)
    clicks, users = vertex_id("source", "source-0"), vertex_id("source", "source-1")
    join, counts = vertex_id("step", "enrich"), vertex_id("step", "counts")
    graph = (
        Vertex(clicks, "source-0", "source", "FileStreamSource[file:/in/clicks]"),
        Vertex(users, "source-1", "source", "FileStreamSource[file:/in/users]"),
        Vertex(join, "enrich", "step", "join by user", parallelism, (clicks, users)),
        Vertex(counts, "counts", "step", "tumbling window by country", parallelism, (join,)),
        Vertex(vertex_id("sink", "sink-0"), "sink-0", "sink", "ParquetSink(out)", 1, (counts,)),
    )
    subtasks = tuple(
        SubtaskFacts(
            vertex=vertex,
            index=index,
            task_manager=f"task-manager-{index // 8}",
            host="127.0.0.1",
            pid=10_000 + index,
            rows_in=1_000_000 + chance.randrange(50_000),
            rows_out=900_000,
            rows_in_per_second=5_000.0 * chance.random(),
            rows_out_per_second=4_000.0 * chance.random(),
            busy=0.3 + 0.4 * chance.random(),
            back_pressured=0.1 * chance.random(),
            state_bytes=50_000_000 + chance.randrange(10_000_000),
            memory_bytes=20_000_000,
            estimated_keys=500_000,
            cache_hit_ratio=0.9 + 0.1 * chance.random(),
            watermark_ms=int(NOW * 1000) - 20_000,
            bytes_in=48_000_000,
            bytes_out=30_000_000,
        )
        for vertex in (join, counts)
        for index in range(parallelism)
    )
    history = tuple(
        _checkpoint(chance, number, checkpoints, parallelism if checkpoints - number < 100 else 0)
        for number in range(1, checkpoints + 1)
    )
    completed = [one for one in history if one.status == "completed"]
    plain = [one for one in completed if one.kind != "savepoint"]
    saved = [one for one in completed if one.kind == "savepoint"]
    failed = [one for one in history if one.status == "failed"]
    start_ms = int((NOW - 3600) * 1000)
    return JobFacts(
        id=job_id("/data/checkpoints", name),
        name=name,
        run=f"{chance.getrandbits(128):032x}",
        status=status,
        error="OperatorError: step 'counts', subtask 1: ZeroDivisionError" if status is RunStatus.FAILED else "",
        taken_ms=int(NOW * 1000),
        start_ms=start_ms,
        end_ms=int(NOW * 1000) if status.ended else None,
        checkpoint_dir="/data/checkpoints",
        driver=DriverFacts("localhost", 4711, "ada", "0.1.0", "4.3.0", "3.11.7", "http://127.0.0.1:8081"),
        config={"checkpoint_dir": "/data/checkpoints", "checkpoint_interval": 10.0, "changelog": False},
        graph=graph,
        figures=RunFigures(
            status=status,
            restarts=1,
            rounds_repeated=2,
            replaced_slots=1,
            generation=3,
            parallelism=parallelism,
            batches=3600,
            rows=2_000_000 * parallelism,
            rows_out=1_800_000 * parallelism,
            rows_per_second=9_000.0,
            rows_out_per_second=8_000.0,
            batch_duration_ms=420.0,
            watermark_ms=int(NOW * 1000) - 20_000,
            watermark_lag_ms=20_000,
            late_rows=17,
            state_bytes=sum(one.state_bytes for one in subtasks),
            state_memory_bytes=sum(one.memory_bytes for one in subtasks),
            sources=(
                SourceFigures("FileStreamSource[file:/in/clicks]", 1_500_000 * parallelism, {"logOffset": 12}),
                SourceFigures("FileStreamSource[file:/in/users]", 500_000 * parallelism, {"logOffset": 3}),
            ),
            steps={
                uid: StepFigures(
                    rows_in=1_000_000 * parallelism,
                    rows_out=900_000 * parallelism,
                    late_rows=8,
                    watermark_ms=int(NOW * 1000) - 20_000,
                    state_bytes=55_000_000 * parallelism,
                    state_memory_bytes=20_000_000 * parallelism,
                    estimated_keys=500_000 * parallelism,
                    bytes_in=48_000_000 * parallelism,
                    bytes_out=30_000_000 * parallelism,
                )
                for uid in ("enrich", "counts")
            },
            restore=RestoreFigures(2100.0, 90_000_000, 20_000_000),
            state_memory=StateMemory(512_000_000, 256_000_000, 180_000_000, 100_000_000),
        ),
        subtasks=() if status.ended else subtasks,
        key_group_rows={vertex: tuple(chance.randrange(20_000) for _ in range(128)) for vertex in (join, counts)},
        checkpoints=CheckpointsFacts(
            counts=CheckpointCounts(
                checkpoints, sum(one.status == "in_progress" for one in history), len(completed), len(failed), 2
            ),
            history=history,
            last_completed=plain[-1] if plain else None,
            last_failed=failed[-1] if failed else None,
            last_savepoint=saved[-1] if saved else None,
            restored=RestoredCheckpoint(3, f"/data/checkpoints/{name}/chk-3", "checkpoint", NOW - 3000),
        ),
        recoveries=(
            Recovery(NOW - 3000, "restart", tuple(range(parallelism)), 600, 2100.0, 90_000_000, 20_000_000, "OSError"),
            Recovery(NOW - 1200, "slots", (0,), 2400, 800.0, 50_000_000, 0, "slot 0: its process was killed"),
        ),
        rescalings=(Rescaling(NOW - 2000, 1, parallelism, 1600, 3100.0, 1400.0, 300.0, 700.0, 64, 50_000_000, 0),),
        failures=(
            FailureFacts(
                int((NOW - 3000) * 1000), "restart", "OSError: disk full", "OSError: disk full\n  at …", tuple(range(2))
            ),
            FailureFacts(
                int((NOW - 1200) * 1000), "slots", "slot 0: its process 10000 was killed by SIGKILL", "", (0,)
            ),
            *(
                FailureFacts(
                    int(one.trigger_time * 1000), "checkpoint", one.failure or "", one.failure or "", (), one.id
                )
                for one in failed[-20:]
            ),
        ),
        statuses=(
            StatusChange(start_ms, RunStatus.STARTING),
            StatusChange(start_ms + 4000, RunStatus.RUNNING),
            *((StatusChange(int(NOW * 1000), status),) if status is not RunStatus.RUNNING else ()),
        ),
        samples=tuple(
            Sample(
                int((NOW - samples + second) * 1000),
                9_000.0 + 2_000 * chance.random(),
                8_000.0 + 2_000 * chance.random(),
                400 + 100 * chance.random(),
                100_000_000 + second * 10_000,
                20_000 + chance.randrange(5_000),
                None,
                0.5 + 0.2 * chance.random(),
                0.1 * chance.random(),
            )
            for second in range(samples)
        ),
    )


def _checkpoint(chance: random.Random, number: int, last: int, parallelism: int) -> CheckpointStats:
    due = NOW - (last - number + 1) * 10
    failed, saved, pending = number % 10 == 0, number % 17 == 0, number == last
    sync, upload = 2 + 3 * chance.random(), 80 + 100 * chance.random()
    subtasks = tuple(
        SubtaskStats(
            operator=uid,
            subtask=index,
            ack_time=due + (sync + upload + 30) / 1000,
            end_to_end_ms=sync + upload + 30,
            start_delay_ms=30.0,
            sync_ms=sync,
            async_ms=upload,
            alignment_ms=chance.random(),
            checkpointed_bytes=chance.randrange(1_000_000),
            full_bytes=50_000_000,
            files=3,
        )
        for uid in ("counts", "enrich")
        for index in range(parallelism - 1 if pending else parallelism)
    )
    return CheckpointStats(
        id=number,
        status="in_progress" if pending else "failed" if failed else "completed",
        kind="savepoint" if saved else "checkpoint",
        batch_id=number * 25,
        trigger_time=due,
        end_to_end_ms=sync + upload + 60,
        sync_ms=sync,
        async_ms=upload,
        start_delay_ms=30.0,
        alignment_ms=1.0,
        barrier_to_completed_ms=sync + upload + 30,
        checkpointed_bytes=sum(one.checkpointed_bytes for one in subtasks),
        full_bytes=sum(one.full_bytes for one in subtasks),
        path=None if failed or pending else f"/data/checkpoints/visits/chk-{number}",
        subtasks=subtasks,
        failure="subtask 1 of counts: storage says 503 Slow Down" if failed and not pending else None,
        acknowledged=len(subtasks),
        expected=2 * parallelism,
        latest_ack_time=due + (sync + upload + 30) / 1000,
        savepoint_format="native" if saved else None,
        discarded=not (failed or saved or pending) and last - number > 3,
    )
