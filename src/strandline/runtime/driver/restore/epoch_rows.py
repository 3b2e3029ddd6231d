"""Rows of epochs that no sink has yet: staged by the driver when a checkpoint covers them, or when it takes over."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import pyarrow as pa

from strandline.checkpoint.epochs import Rows
from strandline.checkpoint.metadata import SinkFile
from strandline.errors import DamagedFileError, IncompatibleCheckpointError, SchemaError, UserCodeError
from strandline.sinks.base import Stager
from strandline.storage.retries import Retries

log = logging.getLogger(__name__)

ROWS_TOGETHER = 100_000
"""So many rows of epochs are made one batch."""

_WAY_OUT = (
    "If the sink cannot take such rows, correct the job and start it with restore=<its newest checkpoint>, behind "
    "which the rows come from the sources again; `strandline checkpoints ls` shows it."
)

Stagers = Mapping[str, Sequence[tuple[str | None, Stager]]]
"""For every step, the stagers of the sinks of its outputs. None names the main output."""


def check_rows_have_sinks(job: str, rows: Iterable[Rows], stagers: Stagers, *, allow_non_restored: bool) -> None:
    """Raise `IncompatibleCheckpointError` if there are rows of an output that no sink of the job takes.

    If the user allows that restored things are dropped, these rows are, and a warning says so.
    """
    known = {(uid, output) for uid, some in stagers.items() for output, _stager in some}
    lost: dict[tuple[str, str | None], int] = {}
    for uid, output, _subtask, _batch, data in rows:
        if (uid, output) not in known and (count := sum(batch.num_rows for batch in _batches([data], job))):
            lost[uid, output] = lost.get((uid, output), 0) + count
    if not lost:
        return
    what = ", ".join(f"{count} rows of {_name(uid, output)}" for (uid, output), count in lost.items())
    if not allow_non_restored:
        raise IncompatibleCheckpointError(
            f"job {job!r}: {what} are durable since the newest checkpoint, and no sink of the job takes them straight "
            "from the step. Start the job once as it was; or, to drop these rows, start it with "
            "allow_non_restored_state=True."
        )
    log.warning("job %s: %s are dropped: no sink of the job takes them", job, what)


def stage_rows(job: str, rows: Iterable[Rows], stagers: Stagers, batch: int, retries: Retries) -> list[SinkFile]:
    """Stage the rows of epochs, which come in their order, as rows of `batch`. What is named is durable.

    The rows of all subtasks go together. Those of a key belong to one subtask, so they keep their order. Raises
    `IncompatibleCheckpointError` if a sink cannot take them any more.
    """
    gathered: dict[tuple[str, str | None], list[bytes]] = {}
    for uid, output, _subtask, _batch, data in rows:
        gathered.setdefault((uid, output), []).append(data)
    files: list[SinkFile] = []
    for (uid, output), streams in gathered.items():
        for name, stager in stagers.get(uid, ()):
            if name == output:
                stage = partial(_stage, job, uid, output, streams, stager, batch)
                files += retries.call(f"job {job}: staging rows of {_name(uid, output)}", stage)
    return files


def _stage(
    job: str, uid: str, output: str | None, streams: Sequence[bytes], stager: Stager, batch: int
) -> list[SinkFile]:
    try:
        return list(stager.stage(_together(_batches(streams, job)), batch, 0))
    except (UserCodeError, SchemaError) as error:
        raise type(error)(
            f"{error} -- These rows of {_name(uid, output)} are durable since the newest checkpoint of job {job!r}, so "
            f"they come again with every start. {_WAY_OUT}"
        ) from error
    except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
        raise IncompatibleCheckpointError(
            f"job {job!r}: rows of {_name(uid, output)} are durable since the newest checkpoint, and the sink cannot "
            f"take them: {type(error).__name__}: {error}. If the job was changed, start it once as it was. {_WAY_OUT}"
        ) from error


def _batches(streams: Sequence[bytes], job: str) -> Iterator[pa.RecordBatch]:
    for data in streams:
        try:
            with pa.ipc.open_stream(data) as reader:
                batches = list(reader)
            for batch in batches:
                batch.validate(full=True)  # the folder may be crafted
        except (pa.ArrowException, OSError) as error:
            raise DamagedFileError(f"job {job!r}: rows of an epoch cannot be read: {error}") from error
        yield from batches


def _together(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in larger batches: an epoch may have only a few."""
    gathered: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        gathered.append(batch)
        rows += batch.num_rows
        if rows >= ROWS_TOGETHER:
            yield from pa.Table.from_batches(gathered).combine_chunks().to_batches()
            gathered, rows = [], 0
    if rows:
        yield from pa.Table.from_batches(gathered).combine_chunks().to_batches()


def _name(uid: str, output: str | None) -> str:
    return f"step {uid!r}" if output is None else f"output {output!r} of step {uid!r}"
