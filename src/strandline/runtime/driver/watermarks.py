"""The watermark of every step, from the event times that the sources have shown.

A source has a watermark: the latest event time among its rows, less its delay. The watermark of a stream is the least
one of the sources from which its rows come. A step that reads a column with a lag works with the watermark of its
stream less that lag. All of this is added up once for the whole job: the watermark of a step is the least of its
sources' watermarks, each less the lags on the way from the source to the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from strandline.checkpoint.metadata import Times

Lags = Mapping[int, int]
"""The sources from which the rows of a stream come, by number, and how many milliseconds the stream is behind each."""


@dataclass(frozen=True, slots=True)
class SourceTime:
    """What a source tells of its event time."""

    delays_ms: tuple[int, ...] = ()
    """The delay of each of its watermarks. A source without event time has none; a DataFrame with several
    `withWatermark` has several, and the least counts."""
    idle_after_ms: int | None = None
    """After how long without rows the others do not wait for the source; None for never."""
    columns: tuple[str, ...] = ()
    """The event time column of each of its watermarks."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rows of a source have shown in one batch."""

    latest_ms: tuple[int | None, ...]
    """The latest event time for each watermark of the source; None without a row that has one."""
    rows: int


def behind(lags: Lags, more_ms: int) -> Lags:
    """A stream that is behind another one by `more_ms`."""
    return {source: lag + more_ms for source, lag in lags.items()}


def merged(streams: Iterable[Lags]) -> Lags:
    """The stream with the rows of several streams: it waits for the last of them."""
    result: dict[int, int] = {}
    for lags in streams:
        for source, lag in lags.items():
            result[source] = max(lag, result.get(source, lag))
    return result


@dataclass(frozen=True, slots=True)
class WatermarkPlan:
    """The sources of a job, and the steps that depend on their watermarks."""

    sources: tuple[SourceTime, ...]
    steps: Mapping[str, Lags]
    """By the uid of the step. Sources without event time are left out."""

    def restored(self, times: Times | None) -> Times:
        """Where the job starts: with the times of a checkpoint as far as they fit the job, or with none.

        The times of another column would make the rows of a source late, or hold its watermark back. So would the
        watermark of a step that the job has not, if a later job has a step of that uid again.
        """
        latest: list[tuple[int | None, ...]] = [(None,) * len(source.delays_ms) for source in self.sources]
        columns = tuple(source.columns for source in self.sources)
        if times is None:
            return Times(0, tuple(latest), {}, columns)
        for number, known in enumerate(times.latest[: len(latest)]):
            same_columns = number >= len(times.columns) or times.columns[number] == columns[number]
            if same_columns and len(known) == len(latest[number]):
                latest[number] = known
        steps = {uid: watermark for uid, watermark in times.steps.items() if uid in self.steps}
        return Times(times.processing_ms, tuple(latest), steps, columns)

    def watermarks(self, times: Times, idle: Collection[int] = ()) -> dict[str, int]:
        """The watermarks of the batch after `times`, for the steps that have one.

        `idle` are the sources for which nobody waits. A watermark never goes back. It stays where it is if all sources
        of the step are idle, or if a source has shown no event time yet.
        """
        sources = [self._of_source(number, times) for number in range(len(self.sources))]
        result = {uid: times.steps[uid] for uid in self.steps if uid in times.steps}
        for uid, lags in self.steps.items():
            found = [_less(sources[source], lag) for source, lag in lags.items() if source not in idle]
            reached = [one for one in found if one is not None]
            if reached and len(reached) == len(found):
                result[uid] = max(min(reached), result.get(uid, min(reached)))
        return result

    def _of_source(self, number: int, times: Times) -> int | None:
        least = [
            _less(latest, delay)
            for latest, delay in zip(times.latest[number], self.sources[number].delays_ms, strict=True)
        ]
        return None if None in least else min((one for one in least if one is not None), default=None)


def advanced(latest: Sequence[int | None], seen: Sequence[int | None]) -> tuple[int | None, ...]:
    """The latest event times of a source after a batch that has shown the times `seen`."""
    return tuple(max((one for one in pair if one is not None), default=None) for pair in zip(latest, seen, strict=True))


def _less(time_ms: int | None, by_ms: int) -> int | None:
    return None if time_ms is None else time_ms - by_ms
