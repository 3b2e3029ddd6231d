"""The latest event time of each source in real time, from what relays have read of its partitions.

In a micro-batch Spark reads all partitions up to the same moment. Here each is read on its own, and while a job catches
up, one may be hours ahead of another. So the partition that is furthest behind counts: of those that had rows in this
epoch, and of those that have not been read up to where they ended when somebody looked. Once all are, the latest event
time of all partitions counts, as in a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from strandline.runtime.driver.realtime.offsets import Offsets
from strandline.runtime.driver.watermarks import Seen
from strandline.runtime.protocol.cuts import ReadPart

Partition = tuple[int, str, str]
"""The number of a stream, a topic, and the number of a partition."""

QUIET_BATCHES = 2
"""A partition counts as read if nothing came of it until so many more batches of Spark's have ended: the last one of
them found nothing. A partition may end with what is no row, such as the marks of transactions."""


class EventTimes:
    """Follows the partitions of one query. One thread uses it; `may_go_on` may be read by any."""

    def __init__(self, source_of_stream: Mapping[int, int], watermarks_of_source: Sequence[int]) -> None:
        """`source_of_stream` has the `job.source(...)` of every stream; -1 if none tells its event times.

        `watermarks_of_source` is how many watermarks each of those has.
        """
        self._source_of_stream = source_of_stream
        self._watermarks_of_source = watermarks_of_source
        self._latest: dict[Partition, int] = {}
        self._behind: dict[Partition, int] = {}
        """The partitions that are not read up to where they ended, and where that was."""
        self._heard: dict[Partition, int] = {}
        """For the partitions in `_behind`: the last batch of Spark's that had ended when they were heard of."""
        self._told: dict[int, int] = {}
        """The latest event time that was told of each source."""
        self._all_read: set[int] = set()
        """The sources that were read to their ends when somebody looked, and of which no row has come since."""
        self.may_go_on = False
        """Whether the watermark could go on without rows, if all sources are read to their ends."""

    @property
    def wanted(self) -> bool:
        """Whether any step needs event times."""
        return any(self._watermarks_of_source[source] for source in self._source_of_stream.values() if source >= 0)

    @property
    def goes_on(self) -> bool:
        """Whether an epoch without rows moves the watermark."""
        return self.may_go_on and bool(self._all_read)

    def look(self, ends: Sequence[Offsets], position: Sequence[Offsets], followed: int) -> None:
        """Have partitions that are not read up to `ends` hold the others back until they are.

        `followed` is the last batch of Spark's that has ended.
        """
        behind = {
            (stream, topic, number): offset
            for stream, topics in enumerate(ends)
            if self._source_of_stream[stream] >= 0
            for topic, partitions in topics.items()
            for number, offset in partitions.items()
            if position[stream].get(topic, {}).get(number, 0) < offset
        }
        self._heard = {partition: self._heard.get(partition, followed) for partition in behind}
        self._behind = behind
        self._drop_quiet(followed)
        self._all_read = {source for source in self._source_of_stream.values() if source >= 0 and not self._of(source)}
        self._note()

    def seen(self, read: Sequence[ReadPart], position: Sequence[Offsets], followed: int) -> dict[int, Seen]:
        """What the rows of an epoch have shown, by `job.source(...)`. `position` is the one after the epoch."""
        rows: Counter[int] = Counter()
        active: set[Partition] = set()
        for part in read:
            source = self._source_of_stream[part.stream]
            if source < 0:
                continue
            partition = (part.stream, part.topic, str(part.partition))
            rows[source] += part.rows
            if partition in self._behind:
                self._heard[partition] = followed
            if part.latest_ms is not None:
                self._latest[partition] = max(part.latest_ms, self._latest.get(partition, part.latest_ms))
                active.add(partition)
        for stream, topic, number in list(self._behind):
            if position[stream].get(topic, {}).get(number, 0) >= self._behind[stream, topic, number]:
                del self._behind[stream, topic, number]
        self._drop_quiet(followed)
        told = {source: self._earliest({*self._of(source), *self._of(source, active)}) for source in rows}
        if not rows:
            told = {source: max(self._times(source), default=None) for source in self._all_read}
        self._all_read -= set(rows)
        for source, time in told.items():
            if time is not None:
                self._told[source] = max(time, self._told.get(source, time))
        self._note()
        return {
            source: Seen((time,) * self._watermarks_of_source[source], rows[source]) for source, time in told.items()
        }

    def _drop_quiet(self, followed: int) -> None:
        for partition in list(self._behind):
            if followed >= self._heard[partition] + QUIET_BATCHES:
                del self._behind[partition]

    def _note(self) -> None:
        sources = {self._source_of_stream[stream] for stream, _topic, _number in self._latest}
        self.may_go_on = any(
            max(self._times(source)) > self._told[source] if source in self._told else True
            for source in sources
            if not self._of(source)
        )

    def _of(self, source: int, partitions: set[Partition] | None = None) -> list[Partition]:
        """Those of the partitions, by default of those that are behind, that belong to a source."""
        among = self._behind if partitions is None else partitions
        return [one for one in among if self._source_of_stream[one[0]] == source]

    def _times(self, source: int) -> list[int]:
        """The latest event time of every partition of a source."""
        return [time for partition, time in self._latest.items() if self._source_of_stream[partition[0]] == source]

    def _earliest(self, partitions: set[Partition]) -> int | None:
        """The event time of the partition that is furthest behind; None if one has shown none yet."""
        times = [self._latest.get(partition) for partition in partitions]
        return None if None in times else min((time for time in times if time is not None), default=None)
