"""Reads a state as Arrow batches: finds the table, fetches the files that hold it, and decodes its entries."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from strandline.errors import CheckpointNotFoundError, DamagedFileError, SchemaError
from strandline.operators.columns.binary import binary_content, binary_pieces
from strandline.operators.columns.key_decoder import KeyDecoder
from strandline.operators.columns.schemas import arrow_schema
from strandline.state.coding.keys import state_prefix
from strandline.state.handles.query import KEY_GROUP_BYTES, encode_key
from strandline.state_reader.layouts import Chunk, Layout
from strandline.state_reader.locations import Located, locate
from strandline.state_reader.parts import Entries, OpenPart, Part, parts_of
from strandline.state_reader.tables import Table, find_table

BATCH_ROWS: Final = 1 << 16
_TRIES: Final = 5
_UNFIT: Final = (SchemaError, pa.ArrowException, IndexError, ValueError, OverflowError, RecursionError)
"""Errors that say that stored bytes are not what their description says."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a table are wanted."""

    key_groups: range | None = None
    """None stands for all."""
    keys: tuple[tuple[Any, ...], ...] | None = None
    """Keys in the order of the key columns; None stands for all."""


@dataclass(frozen=True, slots=True)
class StateTable:
    """A state of a checkpoint that can be read, in parts of whole key groups."""

    located: Located
    table: Table

    @classmethod
    def open(
        cls,
        path: str,
        operator: str | None,
        state: str | None,
        options: Mapping[str, str] | None = None,
        changelog_dirs: Sequence[str] = (),
    ) -> StateTable:
        """The state at `path`; see `read_state`."""
        located = locate(path, options, changelog_dirs)
        return cls(located, find_table(located.metadata, operator, state, located.where))

    def parts(self, key_groups: range | None = None) -> list[Part]:
        """The parts that hold some of the key groups."""
        return parts_of(self.located, self.table.operator, key_groups)

    def batches(self, selection: Selection) -> Iterator[pa.RecordBatch]:
        """The selected rows. The files of a part are fetched when its turn comes, and deleted after it."""
        wanted = self._encoded(selection.keys)
        for part in self.parts(selection.key_groups):
            with _scratch() as folder:
                yield from self._rows(part.fetch(self.located, Path(folder)), wanted)

    def fetched(self, selection: Selection) -> Iterator[pa.RecordBatch]:
        """The selected rows. All files are fetched before the call returns, and deleted when the iterator ends.

        So a job that drops the checkpoint meanwhile cannot break the iterator.
        """
        wanted = self._encoded(selection.keys)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(_scratch()))
            parts = [
                part.fetch(self.located, folder / str(number))
                for number, part in enumerate(self.parts(selection.key_groups))
            ]
            return self._all_rows(stack.pop_all(), parts, wanted)

    def _all_rows(
        self, stack: ExitStack, parts: list[OpenPart], wanted: list[bytes] | None
    ) -> Iterator[pa.RecordBatch]:
        # The first step of a generator must have run, or its `finally` is not run when it is dropped.
        rows = self._held_rows(stack, parts, wanted)
        next(rows)
        return rows

    def _held_rows(self, stack: ExitStack, parts: list[OpenPart], wanted: list[bytes] | None) -> Iterator[Any]:
        with stack:
            yield None
            for part in parts:
                yield from self._rows(part, wanted)

    def _encoded(self, keys: tuple[tuple[Any, ...], ...] | None) -> list[bytes] | None:
        """The key bytes of the wanted keys, ascending."""
        if keys is None:
            return None
        return sorted({encode_key(self.table.keys, key, 0)[KEY_GROUP_BYTES:] for key in keys})

    def _rows(self, part: OpenPart, wanted: list[bytes] | None) -> Iterator[pa.RecordBatch]:
        layout = self.table.make_layout()
        decoder = KeyDecoder(part.whose, arrow_schema(self.table.keys), self.table.key_names, nested=True)
        direct = wanted is not None and layout.lead_bytes == 0
        starts = wanted if direct and wanted is not None else [b""]
        for entries in part.entries(self.table.stored, starts):
            if wanted is not None and not direct:
                entries = self._with_keys(entries, layout, set(wanted))
            if not entries[0]:
                continue
            try:
                rows = self._decoded(entries, layout, decoder)
            except _UNFIT as error:
                raise DamagedFileError(
                    f"{part.whose}: the entries of state {self.table.name!r} are not what the checkpoint says: {error}"
                ) from error
            for start in range(0, rows.num_rows, BATCH_ROWS):
                yield rows.slice(start, BATCH_ROWS)

    def _with_keys(self, entries: Entries, layout: Layout, wanted: set[bytes]) -> Entries:
        head = len(state_prefix(0, self.table.stored)) + layout.lead_bytes
        pairs = [(key, value) for key, value in zip(*entries, strict=True) if key[head:] in wanted]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def _decoded(self, entries: Entries, layout: Layout, decoder: KeyDecoder) -> pa.RecordBatch:
        keys, values = entries
        head = len(state_prefix(0, self.table.stored))
        body_at = head + layout.lead_bytes
        if min(map(len, keys)) < body_at:
            raise SchemaError("a stored key is too short")
        stored = pa.array(keys, pa.binary())
        offsets, data = binary_content(stored)
        body = binary_pieces(data, offsets[:-1] + body_at, offsets[1:])
        columns, lengths = decoder.decode_front(body)
        ends = (lengths + body_at).tolist()
        made = layout.decode(Chunk(keys, head, layout.lead_bytes, ends, values))
        content = np.frombuffer(data, np.uint8)
        groups = content[offsets[:-1]].astype(np.int32) << 8 | content[offsets[:-1] + 1]
        both = [*columns, pa.array(groups)]
        if made.entries is not None:
            places = pa.array(made.entries)
            both = [column.take(places) for column in both]
        every = [*both, *made.columns]
        schema = self.table.schema
        return pa.RecordBatch.from_arrays(
            [
                column if column.type == one.type else pc.cast(column, one.type)
                for column, one in zip(every, schema, strict=True)
            ],
            schema=schema,
        )


def read_state(
    path: str,
    operator: str | None = None,
    state: str | None = None,
    *,
    key: Any = None,
    key_groups: range | None = None,
    storage_options: Mapping[str, str] | None = None,
    changelog_dirs: Sequence[str] = (),
) -> pa.RecordBatchReader:
    """Read a state of a checkpoint or savepoint as Arrow batches, without Spark and without the job.

    `path` is the folder of a checkpoint, of a savepoint, or of a job, which stands for its newest checkpoint. The job
    may be running. `operator` is the uid of a step. It may be left out if there is a single one, and so may `state`.
    `key` reads one key: its value, or a tuple if there are several key columns. `key_groups` reads a range of key
    groups. `storage_options` and `changelog_dirs` are those of the job's `Config`.

    All files that are needed are fetched to a private temporary folder and verified before the call returns. The folder
    is deleted after the last batch, after an error, and when the reader is closed. Rows are decoded batch by batch.

    Raises `CheckpointNotFoundError` if there is nothing to read at `path`, `StrandlineError` if there is no such
    operator or state, `SchemaError` if the key does not fit, and `DamagedFileError` if a file is missing or damaged.
    """
    keys = None if key is None else (key if isinstance(key, tuple) else (key,),)
    selection = Selection(key_groups, keys)
    wanted = Wanted(path, operator, state, storage_options, tuple(changelog_dirs))
    table, rows = wanted.rows(lambda table: table.fetched(selection))
    # A reader of Python batches does not end its iterator when it is closed. A reader of a stream does.
    return pa.RecordBatchReader.from_stream(pa.RecordBatchReader.from_batches(table.table.schema, rows))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a user asks for: the arguments of `StateTable.open`."""

    path: str
    operator: str | None
    state: str | None
    options: Mapping[str, str] | None = None
    changelog_dirs: Sequence[str] = ()

    def open(self) -> StateTable:
        """The table as it is now."""
        return StateTable.open(self.path, self.operator, self.state, self.options, self.changelog_dirs)

    def rows(
        self, read: Callable[[StateTable], Iterator[pa.RecordBatch]]
    ) -> tuple[StateTable, Iterator[pa.RecordBatch]]:
        """The table, and what `read` gives of it.

        If the path is that of a job, and the job drops the checkpoint during the call of `read`, the call is repeated
        with the newest one. Raises `CheckpointNotFoundError` if that happens again and again.
        """
        for last in range(_TRIES):
            table = self.open()
            try:
                return table, read(table)
            except DamagedFileError as error:
                if not table.located.newest or self._newest() == table.located.metadata.checkpoint_id:
                    raise
                if last == _TRIES - 1:
                    raise CheckpointNotFoundError(
                        f"the job at {self.path} dropped {_TRIES} checkpoints in a row while they were read: {error}. "
                        "Let it retain more of them (num_retained), or read a savepoint."
                    ) from error
        raise AssertionError("the loop returns or raises")

    def _newest(self) -> int:
        return locate(self.path, self.options, self.changelog_dirs).metadata.checkpoint_id


def begun(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same batches. The first one is read in this call, so that the call raises what reading it raises."""
    first = next(batches, None)
    return batches if first is None else chain([first], batches)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A private temporary folder, which is deleted in any case."""
    return tempfile.TemporaryDirectory(prefix="strandline-state-", ignore_cleanup_errors=True)
