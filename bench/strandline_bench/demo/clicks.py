"""The click stream: Parquet files that arrive one after the other, and hold every user at least once."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCHEMA = "user string, page string, cents long, ts timestamp"
PAGES = ("home", "search", "product", "reviews", "basket", "checkout", "help", "account")
PURCHASES = 0.06
"""The share of clicks that buy something; only those have an amount."""
_FIRST_CLICK_US = 1_767_225_600_000_000
_FEWEST_FILES, _MOST_ROWS = 8, 100_000


@dataclass(frozen=True, slots=True)
class ClickPlan:
    """How rows and users are spread over files. The same plan always gives the same rows."""

    rows: int
    users: int
    seed: int = 7

    @property
    def file_rows(self) -> int:
        """Rows of each file but the last, which may have less."""
        return max(1, min(_MOST_ROWS, math.ceil(self.rows / _FEWEST_FILES)))

    @property
    def files(self) -> int:
        """How many files there are."""
        return math.ceil(self.rows / self.file_rows)

    def rows_in(self, files: int) -> int:
        """How many rows the first `files` files hold."""
        return min(self.rows, files * self.file_rows)

    def table(self, number: int) -> pa.Table:
        """The clicks of one file."""
        rng = np.random.default_rng((self.seed, number))
        first, last = self.rows_in(number), self.rows_in(number + 1)
        rows = last - first
        # Users whose turn it is: over all files everybody has one, however the others are drawn.
        due = np.arange(first * self.users // self.rows, last * self.users // self.rows)
        # The square makes some users far busier than others.
        others = (rng.random(rows - len(due)) ** 2 * self.users).astype(np.int64)
        users = rng.permutation(np.concatenate([due, others]))
        buys = rng.random(rows) < PURCHASES
        pages = np.where(buys, PAGES.index("checkout"), rng.integers(0, len(PAGES), rows))
        cents = np.where(buys, rng.integers(100, 20_000, rows), 0)
        times = _FIRST_CLICK_US + first * 1000 + np.sort(rng.integers(0, rows * 1000, rows))
        names = pa.array([f"user-{user:07d}" for user in users.tolist()])
        return pa.table(
            {
                "user": names,
                "page": pa.array(PAGES).take(pa.array(pages)),
                "cents": pa.array(cents),
                "ts": pa.array(times, pa.timestamp("us", tz="UTC")),
            }
        )


class ClickStream(threading.Thread):
    """Writes the files of a plan into a folder, a few ahead of what has been processed."""

    def __init__(self, plan: ClickPlan, folder: Path, processed: Callable[[], int], ahead: int = 3) -> None:
        super().__init__(daemon=True, name="clicks")
        self.plan = plan
        self.written = 0
        """Files that have arrived."""
        self.error: Exception | None = None
        self._folder = folder
        self._processed = processed
        self._ahead = ahead
        self._stopped = threading.Event()

    @property
    def done(self) -> bool:
        """Whether every file has arrived."""
        return self.written == self.plan.files

    def run(self) -> None:
        try:
            for number in range(self.plan.files):
                while number - self._processed() >= self._ahead:
                    if self._stopped.wait(0.05):
                        return
                if self._stopped.is_set():
                    return
                self._arrive(number)
                self.written = number + 1
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits for the stream)
            self.error = error

    def _arrive(self, number: int) -> None:
        """Write a file under a hidden name, and rename it when it is complete."""
        unfinished = self._folder / f"_clicks-{number:05d}.parquet"
        pq.write_table(self.plan.table(number), unfinished)
        unfinished.rename(self._folder / f"clicks-{number:05d}.parquet")

    def stop(self) -> None:
        """Write no more files; returns when the thread has ended."""
        self._stopped.set()
        if self.is_alive():
            self.join()
