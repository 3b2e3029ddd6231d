"""How long a job would need to catch up after a loss, from what was measured.

While a job is down, rows wait. Afterwards it processes them beside the new ones, with the capacity that it has left. A
job without spare capacity never catches up, so capacity must be planned with room for it.
"""

from __future__ import annotations

from typing import Final, Literal

from strandline.config import Config
from strandline.observe.facts import JobFacts
from strandline.observe.rules.measures import interval_s, minutes, setting, settled_samples
from strandline.observe.words import duration
from strandline.runtime.protocol.figures import Facts

LEAST_HEADROOM: Final = 1.05
"""A capacity less than 5 % above the input is none: rates differ by more from minute to minute."""
LEAST_BUSY: Final = 0.05
"""A job that is busy for less counts as busy for so much: the share of a few milliseconds says little."""
MOST_FACTOR: Final = 10.0
"""A capacity that is computed from busy time is at most this many times what was seen: something else limits it."""


class CatchingUp(Facts, frozen=True):
    """What it would take to catch up after a loss.

    Attributes:
        lost_s: For how many seconds the job is assumed to be down before its restore begins.
        rows_per_second: The rows that come in, per second: the average of the last minute.
        capacity: The rows per second that the job can process.
        measured: Where the capacity comes from. `seen`: it is the highest rate of a whole minute. `busy`: nothing
            higher than the input was seen, and the capacity is computed from the busy share of the busiest subtask.
        restore_s: How long the last recovery took, or the last start.
        repeated_s: For how many seconds rows are processed again, at most: a checkpoint interval and the duration of a
            checkpoint. With the changelog, lost slots are rebuilt to the last batch, and nothing is.
        waiting_rows: The rows that wait when the job goes on.
        seconds: How long the job would need until nothing waits, from when it goes on. None: it never would.
    """

    lost_s: float
    rows_per_second: float
    capacity: float
    measured: Literal["seen", "busy"]
    restore_s: float
    repeated_s: float
    waiting_rows: int
    seconds: float | None

    def in_words(self) -> str:
        """The result in one or two sentences."""
        rates = f"{self.rows_per_second:,.0f} rows/s come in, and "
        if self.measured == "seen":
            rates += f"the highest rate of a minute was {self.capacity:,.0f} rows/s"
        else:
            rates += f"by its busy time the job could process about {self.capacity:,.0f} rows/s"
        down = f"a loss of {duration(self.lost_s)} and a restore of {duration(self.restore_s)}"
        if self.seconds is None:
            return (
                f"After {down} the job would never catch up: {rates}. Give it more subtasks (strandline rescale JOB N) "
                "or find out what limits it."
            )
        return (
            f"After {down} the job would catch up in about {duration(self.seconds)}: {rates}. About "
            f"{self.waiting_rows:,} rows would wait."
        )


def catching_up(facts: JobFacts, lost_s: float) -> CatchingUp | None:
    """What it would take to catch up after a loss of `lost_s` seconds. None if no rows were measured yet."""
    samples = settled_samples(facts)
    rates = minutes(samples, lambda one: one.rows_per_second)
    if not rates or rates[-1] <= 0:
        return None
    now, seen = rates[-1], max(rates)
    busy = minutes(samples, lambda one: max(one.busy, one.back_pressured))[-1]
    was_seen = seen >= LEAST_HEADROOM * now
    capacity = seen if was_seen else min(now / max(busy, LEAST_BUSY), MOST_FACTOR * seen)
    restore_s = _restore_s(facts)
    repeated_s = _repeated_s(facts)
    waiting = now * (max(lost_s, 0.0) + restore_s + repeated_s)
    return CatchingUp(
        lost_s=max(lost_s, 0.0),
        rows_per_second=now,
        capacity=capacity,
        measured="seen" if was_seen else "busy",
        restore_s=restore_s,
        repeated_s=repeated_s,
        waiting_rows=round(waiting),
        seconds=waiting / (capacity - now) if capacity >= LEAST_HEADROOM * now else None,
    )


def _restore_s(facts: JobFacts) -> float:
    restarts = [one for one in facts.recoveries if one.kind == "restart"]
    if restarts:
        return restarts[-1].duration_ms / 1000
    return 0.0 if facts.figures is None else facts.figures.restore.duration_ms / 1000


def _repeated_s(facts: JobFacts) -> float:
    if setting(facts, Config.changelog):
        return 0.0
    last = facts.checkpoints.last_completed
    return interval_s(facts) + (0.0 if last is None else last.end_to_end_ms / 1000)
