"""Reads a job's checkpoints from durable storage. Nothing is written, so the job may run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec

from strandline.admin.position import source_offsets, watermark_ms
from strandline.checkpoint.batch import numbered
from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import CheckpointMetadata, file_paths, full_bytes, state_bytes
from strandline.checkpoint.steps import StepDescription
from strandline.errors import CheckpointError, CheckpointNotFoundError, JobDefinitionError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.storage import JobPaths, Storage, open_storage


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """A completed checkpoint in a few figures. If its metadata cannot be read, `problem` says why."""

    job: str
    id: int
    path: str
    latest: bool
    owner: str = "job"
    """Who may delete it: the job; or the user, after a restore with `no_claim`."""
    kind: str | None = None
    batch: int | None = None
    generation: int | None = None
    time: float | None = None
    """When it was completed, in seconds since the epoch."""
    files: int | None = None
    """Uploaded files, as `checkpoints verify` counts them; small ones are inside `_metadata`."""
    full_bytes: int | None = None
    left_behind: bool = False
    """Whether the job went back to a checkpoint before this one, and computed its batches again."""
    epoch_files: int = 0
    """How many files have the durable epochs behind it, from which the next start goes on."""
    epoch_bytes: int = 0
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures as plain values."""
        return asdict(self)


class JobFolder:
    """The checkpoints of one job in a storage."""

    def __init__(self, storage: Storage, job: str) -> None:
        self.job = job
        self.storage = storage
        self.paths = JobPaths(job)

    @classmethod
    def find(cls, location: str, options: Mapping[str, str] | None = None) -> list[JobFolder]:
        """The job at `location`; or all jobs in it, if `location` is a checkpoint directory.

        Raises `CheckpointNotFoundError` if `location` is neither.
        """
        place = location.rstrip("/") or "/"
        parent, _, name = place.rpartition("/")
        if not parent.endswith(":/"):
            own = cls._at(parent or ("/" if place.startswith("/") else "."), name, options)
            if own is not None:
                return [own]
        found = cls._within(open_storage(place, options))
        if not found:
            raise CheckpointNotFoundError(
                f"{location} holds no checkpoints of a job. Give the folder of a job (checkpoint_dir/job name), or the "
                "checkpoint_dir itself."
            )
        return found

    @classmethod
    def find_checkpoint(cls, location: str, options: Mapping[str, str] | None = None) -> tuple[JobFolder, int] | None:
        """The job and the number of the checkpoint at `location`, which is its directory or its `_metadata` file.

        None if `location` is not named like a checkpoint. The job's log is not read, because `location` may be a copy
        of one checkpoint. Raises `CheckpointNotFoundError` if the checkpoint has no `_metadata`.
        """
        parts = JobPaths.split_checkpoint(location)
        if parts is None:
            return None
        root, paths, number = parts
        folder = cls(open_storage(root, options), paths.job)
        if folder.storage.exists(paths.metadata(number)):
            return folder, number
        if cls._at(f"{root}/{paths.job}", f"chk-{number}", options) is not None:
            return None  # a job with the name of a checkpoint
        raise CheckpointNotFoundError(
            f"{folder.storage.url}/{paths.metadata(number)} is missing, so this is no completed checkpoint. See which "
            f"ones there are with: strandline checkpoints ls {folder.path}"
        )

    @classmethod
    def _at(cls, parent: str, name: str, options: Mapping[str, str] | None) -> JobFolder | None:
        try:
            folder = cls(open_storage(parent, options), name)
        except JobDefinitionError:
            return None
        return folder if folder._has_log() else None

    @classmethod
    def _within(cls, storage: Storage) -> list[JobFolder]:
        """The jobs below the root."""
        found: list[JobFolder] = []
        for name in storage.folders():
            try:
                folder = cls(storage, name)
            except JobDefinitionError:
                continue
            if folder._has_log():
                found.append(folder)
        return found

    @property
    def path(self) -> str:
        """The job's folder in full."""
        return f"{self.storage.url}/{self.paths.root}"

    def _has_log(self) -> bool:
        return any(self.paths.parse_log_entry(f.path) is not None for f in self.storage.list(self.paths.log_dir))

    def checkpoints(self) -> list[CheckpointFacts]:
        """All completed checkpoints that are retained, oldest first."""
        store = JobLogStore(self.storage, self.paths)
        while True:
            job_log = store.load()
            latest = job_log.latest.checkpoint_id if job_log.latest and job_log.latest.ours else None
            owners = dict.fromkeys(job_log.retained, "job") | dict.fromkeys(store.released(), "user")
            facts = [self._facts(number, number == latest, owner, job_log) for number, owner in sorted(owners.items())]
            facts = [self._with_epochs(fact, job_log) if fact.latest else fact for fact in facts]
            # A running job may have dropped one of them meanwhile. In that case its log has grown, too.
            if not any(fact.problem for fact in facts) or store.load().position == job_log.position:
                return facts

    def _facts(self, number: int, latest: bool, owner: str, job_log: JobLog) -> CheckpointFacts:
        path = f"{self.storage.url}/{self.paths.checkpoint_dir(number)}"
        try:
            metadata = read_metadata(self.storage, self.paths, number, others=None)
        except CheckpointError as error:
            return CheckpointFacts(self.job, number, path, latest, owner, problem=str(error))
        return CheckpointFacts(
            job=self.job,
            id=number,
            path=path,
            latest=latest,
            owner=owner,
            kind=metadata.kind,
            batch=metadata.batch_id,
            generation=metadata.generation,
            time=metadata.completed_time,
            files=len(file_paths(metadata)),
            full_bytes=full_bytes(metadata),
            left_behind=any(back.voids(metadata.batch_id) for back in job_log.went_back),
        )

    def _with_epochs(self, facts: CheckpointFacts, job_log: JobLog) -> CheckpointFacts:
        """The facts of the newest checkpoint, with the durable epochs behind it."""
        if not job_log.epochs or job_log.latest is None:
            return facts
        generation, number = numbered(job_log.latest.batch_id)
        behind = self.paths.epochs(generation, max(number, 0))
        sizes = [
            file.size
            for file in self.storage.list(behind.rpartition("/")[0])
            if (name := self.paths.parse_epochs(file.path)) is not None and name[1] > number
        ]
        return replace(facts, epoch_files=len(sizes), epoch_bytes=sum(sizes))

    def metadata(self, number: int | None) -> CheckpointMetadata:
        """The metadata of a completed checkpoint; that of the newest one if `number` is None.

        Raises `CheckpointNotFoundError` if the job has no such checkpoint, `MetadataError` if it cannot be read.
        """
        job_log = JobLogStore(self.storage, self.paths).load()
        if number is None and job_log.latest is not None and job_log.latest.ours:
            number = job_log.latest.checkpoint_id
        if number is None or number not in {*job_log.retained, *job_log.released}:
            known = ", ".join(map(str, sorted({*job_log.retained, *job_log.released}))) or "none"
            wanted = "completed checkpoint" if number is None else f"checkpoint {number}"
            raise CheckpointNotFoundError(
                f"job {self.job!r} in {self.storage.url} has no {wanted}; the retained ones are: {known}"
            )
        return read_metadata(self.storage, self.paths, number, others=None)

    def details(self, metadata: CheckpointMetadata) -> dict[str, Any]:
        """A checkpoint with its steps, its position in the sources, its subtasks and files, as plain values."""
        return {
            "job": metadata.job,
            "id": metadata.checkpoint_id,
            "kind": metadata.kind,
            "path": f"{self.storage.url}/{self.paths.checkpoint_dir(metadata.checkpoint_id)}",
            "generation": metadata.generation,
            "batch": metadata.batch_id,
            "trigger_time": metadata.trigger_time,
            "time": metadata.completed_time,
            "parallelism": metadata.parallelism,
            "max_parallelism": metadata.max_parallelism,
            "operators": list(metadata.operators),
            "files": len(file_paths(metadata)),
            "full_bytes": full_bytes(metadata),
            **described(metadata),
            "source_batch": metadata.source.batch,
            "properties": dict(metadata.properties),
            "sink_files": len(metadata.sink_files),
            "sink_rows": sum(file.rows for file in metadata.sink_files),
            "subtasks": [
                {
                    "operator": state.operator,
                    "subtask": state.subtask,
                    "key_groups": [state.key_group_start, state.key_group_end],
                    "backend": state.backend,
                    "incremental": state.incremental,
                    "full_bytes": state_bytes(state),
                    "files": [
                        {
                            "name": file.name,
                            "shared": file.shared,
                            "path": file.handle.path if file.handle else None,
                            "size": file.handle.size if file.handle else len(file.inline or b""),
                            "checksum": file.handle.checksum if file.handle else None,
                            "offset": file.handle.offset if file.handle else 0,
                            "whole": file.handle.whole if file.handle else 0,
                        }
                        for file in state.files
                    ],
                }
                for state in metadata.subtasks
            ],
        }


def described(metadata: CheckpointMetadata) -> dict[str, Any]:
    """The steps of a checkpoint or savepoint with their states, and its position in the sources, as plain values."""
    return {
        "steps": [_step(metadata, uid) for uid in metadata.operators],
        "watermark_ms": watermark_ms(metadata.source),
        "sources": [
            {"source": number, "offset": offset} for number, offset in enumerate(source_offsets(metadata.source))
        ],
    }


def _step(metadata: CheckpointMetadata, uid: str) -> dict[str, Any]:
    """A step with its states: all its subtasks have the same ones."""
    subtasks = [state for state in metadata.subtasks if state.operator == uid]
    described = next((step for step in metadata.steps if step.operator == uid), None)
    return {
        "uid": uid,
        "description": described.line() if described is not None else None,
        "specification": _by_name(described) if described is not None else None,
        "watermark_ms": metadata.source.times.steps.get(uid) if metadata.source.times is not None else None,
        "parallelism": len(subtasks),
        "full_bytes": sum(map(state_bytes, subtasks)),
        "states": [dict(state) for state in subtasks[0].states] if subtasks else [],
    }


def _by_name(step: StepDescription) -> dict[str, Any]:
    """The fields of a description with their names; in `_metadata` they are a list."""
    return {name: msgspec.to_builtins(getattr(step, name)) for name in step.__struct_fields__}
