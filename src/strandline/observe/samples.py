"""One sample of figures a second, for plots of the last minutes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from strandline.observe.facts import KEPT_SAMPLES, Sample, SubtaskFacts
from strandline.runtime.driver.figures import RunFigures, SourceFigures
from strandline.runtime.driver.recoveries import Began

SAMPLE_EVERY = 0.8
"""Seconds that a sample stands for at least. Facts are taken about once a second, and more often while much happens."""
RATE_SECONDS = 10.0
"""Over how many seconds rows are counted at least. Rows count when their batch is committed."""


class Samples:
    """The newest samples, oldest first."""

    def __init__(self) -> None:
        self._kept: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._began = 0.0
        """When the newest sample began, by the same clock as the next."""
        self._rows: deque[tuple[float, int, int]] = deque(maxlen=KEPT_SAMPLES)
        """At which time, by a clock that nobody sets, how many rows had been read and given in all."""

    def all(self) -> tuple[Sample, ...]:
        return tuple(self._kept)

    def take(self, at: Began, figures: RunFigures, subtasks: Sequence[SubtaskFacts]) -> None:
        """Take a sample. It takes the place of the newest one, and its time, if that has just begun."""
        time_ms = int(at.time * 1000)
        if self._kept and at.steady - self._began < SAMPLE_EVERY:
            time_ms = self._kept.pop().time_ms
            self._rows.pop()
        else:
            self._began = at.steady
        self._rows.append((at.steady, figures.rows, figures.rows_out))
        # Two batches at least: else a long batch would show as no rows at all, and then as too many.
        read, given = self._rates(max(RATE_SECONDS, 2 * figures.batch_duration_ms / 1000))
        hits = [one.cache_hit_ratio for one in subtasks if one.cache_hit_ratio is not None]
        self._kept.append(
            Sample(
                time_ms=time_ms,
                rows_per_second=read,
                rows_out_per_second=given,
                batch_ms=figures.batch_duration_ms,
                state_bytes=figures.state_bytes,
                watermark_lag_ms=figures.watermark_lag_ms,
                offsets_behind=offsets_behind(figures.sources),
                busy=max((one.busy for one in subtasks), default=0.0),
                back_pressured=max((one.back_pressured for one in subtasks), default=0.0),
                cache_hit_ratio=sum(hits) / len(hits) if hits else None,
                source_rows=tuple(source.rows for source in figures.sources),
            )
        )

    def _rates(self, seconds: float) -> tuple[float, float]:
        now, read, given = self._rows[-1]
        then, read_then, given_then = next(row for row in self._rows if now - row[0] <= seconds)
        if now <= then:
            return 0.0, 0.0
        # The counts become smaller when a run goes back to a checkpoint.
        return max(0.0, (read - read_then) / (now - then)), max(0.0, (given - given_then) / (now - then))


def offsets_behind(sources: Iterable[SourceFigures]) -> int | None:
    """How far the sources are behind in all; None if no source says so."""
    known = [source.offsets_behind for source in sources if source.offsets_behind is not None]
    return sum(known) if known else None
