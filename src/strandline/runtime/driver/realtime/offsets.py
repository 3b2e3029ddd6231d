"""The position in Kafka between two epochs, in the form of Spark's offset log.

In real time Spark writes its own log only when one of its long batches ends. So the position of an epoch is put
together here: where the query began, and what relays have read since. A query of either mode can start from it.

Private Spark API: the format of Spark's offset log and commit log, as in `restore.position`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from strandline.checkpoint.metadata import SourcePosition, Times
from strandline.errors import CheckpointError, NotFoundError, StrandlineError
from strandline.runtime.driver.restore.tick_offset import is_tick
from strandline.runtime.protocol.cuts import ReadPart

Offsets = dict[str, dict[str, int]]
"""The next offset, by topic and partition, as Spark writes it."""

_REALTIME_COMMIT = b'v2\n{"nextBatchWatermarkMs":0}'
_BATCH_COMMIT = b'v1\n{"nextBatchWatermarkMs":0}'
"""Spark writes another version of its commit log in real time, and refuses the other one."""


class SparkEnd(NamedTuple):
    """Where a batch of Spark's has ended."""

    batch: int
    offsets: list[Offsets]


class EpochPosition:
    """The next offsets of all streams of a query. One thread moves it, between two commits; every thread may look."""

    def __init__(self, folder: Path, places: Sequence[int], restored: SourcePosition | None) -> None:
        """`folder` is Spark's checkpoint folder, and `restored` the position from which the query starts.

        `places` has the stream of each place at which the plan reads one; see `Graph.source_places`.
        """
        initial = {stream: folder / "sources" / str(number) / "0" for number, stream in enumerate(places)}
        self._initial = [initial[stream] for stream in range(len(places))]
        """For every stream, the file in which Spark writes down where it began to read."""
        self._first_read: dict[str, bytes] = {}
        """The files in which Spark has written down where it began to read."""
        self._log = folder
        self._places = tuple(places)
        self._followed = restored.batch if restored is not None else -1
        """The newest batch of Spark's that has ended and of which the position has every row."""
        self._offsets = None if restored is None else all_offsets(restored)

    def first_offsets(self) -> dict[int, Offsets]:
        """Where an earlier query began to read, for the streams of which that is known."""
        return {stream: _first_offsets(path) for stream, path in enumerate(self._initial) if path.exists()}

    def begin_at(self, offsets: Mapping[int, Offsets]) -> None:
        """Have Spark begin to read these streams there. The query has not started yet."""
        for stream, one in offsets.items():
            _write_first_offsets(self._initial[stream], one)

    @property
    def followed(self) -> int:
        """The newest batch of Spark's that has ended and of which the position has every row."""
        return self._followed

    def running(self) -> int:
        """The batch of Spark's that runs."""
        number = self._followed + 1
        while self._ended(number):
            number += 1
        return number

    def skips(self) -> bool:
        """Whether a batch of Spark's has ended beyond the position: its last rows were dropped before any relay.

        Batches that have ended at the position are followed.
        """
        while self._ended(self._followed + 1):
            position = self.offsets()
            if [*map(_later, position, self._read_end(self._followed + 1))] != position:
                return True
            self._followed += 1
        return False

    def spark_end(self) -> SparkEnd | None:
        """Where the oldest batch of Spark's ended that the position has not followed yet; None if it still runs.

        All its relays have delivered their last rows before Spark notes the end. So before the cut of an epoch begins,
        earlier epochs have all its rows, and the position after that epoch may follow it.
        """
        batch = self._followed + 1
        return SparkEnd(batch, self._read_end(batch)) if self._ended(batch) else None

    def _ended(self, batch: int) -> bool:
        return (self._log / "commits" / str(batch)).exists()

    def _read_end(self, batch: int) -> list[Offsets]:
        lines = (self._log / "offsets" / str(batch)).read_text().split("\n")[2:]
        return [offsets_of(lines[self._places.index(stream)]) for stream in range(len(self._places))]

    def advanced(self, read: Iterable[ReadPart], end: SparkEnd | None = None) -> list[Offsets]:
        """The next offsets of all streams once relays have read so far.

        `end` is what `spark_end` gave before the relays were told to cut. Raises `StrandlineError` if a
        relay brought rows that an earlier epoch has: Spark repeated its task, for instance.
        """
        found = self.offsets()
        if end is not None:
            found = [_later(before, reached) for before, reached in zip(found, end.offsets, strict=True)]
        for part in read:
            partitions = found[part.stream].setdefault(part.topic, {})
            reached = partitions.get(str(part.partition), 0)
            if part.first_offset < reached:
                raise StrandlineError(
                    f"Spark read offset {part.first_offset} of partition {part.partition} of topic {part.topic!r} "
                    f"again, though the job has rows up to {reached}; the job goes back to its last checkpoint"
                )
            partitions[str(part.partition)] = part.next_offset
        return found

    def become(self, offsets: list[Offsets], end: SparkEnd | None = None) -> None:
        """The next offsets after an epoch that is committed. They follow the batch of Spark's that ended with `end`."""
        self._offsets = offsets
        if end is not None:
            self._followed = end.batch  # after the offsets: who sees the batch as followed sees where it ended

    def offsets(self) -> list[Offsets]:
        """The next offsets of every stream. A partition that nobody has read is where the query began.

        Raises `NotFoundError` if the query has not begun to read.
        """
        offsets = self._offsets
        if offsets is None:
            offsets = [_first_offsets(path) for path in self._initial]
        return [{topic: dict(partitions) for topic, partitions in stream.items()} for stream in offsets]

    def short_of(self, ends: Sequence[Offsets]) -> set[tuple[int, str, str, int]]:
        """The partitions that have not been read up to their ends: stream, topic, number, and the next offset.

        Raises `NotFoundError` if the query has not begun to read.
        """
        position = self.offsets()
        return {
            (stream, topic, number, position[stream].get(topic, {}).get(number, 0))
            for stream, end in enumerate(ends)
            for topic, partitions in end.items()
            for number, offset in partitions.items()
            if position[stream].get(topic, {}).get(number, 0) < offset
        }

    def captured(self, number: int, times: Times) -> Callable[[], SourcePosition]:
        """What gives the position as it is now, which is the one after an epoch."""
        offsets = self.offsets()
        return lambda: self._position_at(offsets, number, times)

    def capture(self, number: int, times: Times) -> SourcePosition:
        """The position after an epoch, as a batch with this number."""
        return self._position_at(self.offsets(), number, times)

    def _position_at(self, at: Sequence[Offsets], number: int, times: Times) -> SourcePosition:
        header = ["v1", json.dumps({"batchWatermarkMs": 0, "batchTimestampMs": times.processing_ms, "conf": {}})]
        lines = [json.dumps(offsets, separators=(",", ":")) for offsets in at]
        entry = "\n".join([*header, *lines]).encode()
        files = {f"offsets/{number}": entry, f"commits/{number}": _BATCH_COMMIT}
        if number:  # Spark also wants the entry of the batch before, of which it uses nothing
            files[f"offsets/{number - 1}"] = entry
        if len(self._first_read) < len(self._initial):  # Spark writes them once, before the first row
            self._first_read |= {
                f"sources/{stream}/0": path.read_bytes() for stream, path in enumerate(self._initial) if path.exists()
            }
        files |= self._first_read
        return SourcePosition(batch=number, files=files, times=times)


def for_realtime(position: SourcePosition) -> SourcePosition:
    """A position of either mode, as a query in real time starts from it."""
    number = position.batch
    entry = position.files[f"offsets/{number}"].decode().split("\n")
    settings = json.loads(entry[1])
    header = json.dumps({**settings, "batchWatermarkMs": 0, "conf": {}})
    files = {name: data for name, data in position.files.items() if name.startswith("sources/")}
    files[f"offsets/{number}"] = "\n".join([entry[0], header, *entry[2:]]).encode()
    files[f"commits/{number}"] = _REALTIME_COMMIT
    return msgspec.structs.replace(position, files=files)


def with_offsets(position: SourcePosition, offsets: Mapping[int, Offsets]) -> SourcePosition:
    """The same position with other next offsets of some streams."""
    name = f"offsets/{position.batch}"
    lines = position.files[name].decode().split("\n")
    for stream, one in offsets.items():
        lines[2 + stream] = json.dumps(one, separators=(",", ":"))
    return msgspec.structs.replace(position, files={**position.files, name: "\n".join(lines).encode()})


def _write_first_offsets(path: Path, offsets: Offsets) -> None:
    """Have Spark begin to read a stream there, whose file `sources/N/0` is at `path`."""
    path.write_bytes(b"\0v1\n" + json.dumps(offsets, separators=(",", ":")).encode())


def all_offsets(position: SourcePosition) -> list[Offsets]:
    lines = position.files[f"offsets/{position.batch}"].decode().split("\n")[2:]
    return [offsets_of(line) for line in lines if not is_tick(line)]


def _first_offsets(path: Path) -> Offsets:
    """Where Spark began to read a stream for which there was no position. Spark has written it down by then."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"Spark has not written where it began to read: {error}") from error
    return first_offsets_in(data)


def first_offsets_in(data: bytes) -> Offsets:
    """Where Spark began to read a stream, from its file `sources/N/0`."""
    return offsets_of(data.lstrip(b"\0").decode().partition("\n")[2])


def offsets_of(text: str) -> Offsets:
    try:
        found: Any = json.loads(text)
        return {
            str(topic): {str(int(number)): int(offset) for number, offset in partitions.items()}
            for topic, partitions in found.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{text[:200]!r} is no position in Kafka, which latency_mode='realtime' needs; go on with "
            "latency_mode='batch'"
        ) from error


def _later(before: Offsets, end: Offsets) -> Offsets:
    """The later offset of each partition: relays of the next batch may have read further already."""
    return {
        topic: {
            number: max(offset, before.get(topic, {}).get(number, 0)) for number, offset in end.get(topic, {}).items()
        }
        | {number: offset for number, offset in before.get(topic, {}).items() if number not in end.get(topic, {})}
        for topic in sorted({*before, *end})
    }
