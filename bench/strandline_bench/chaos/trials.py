"""Many trials, on several machines side by side: while one waits for a heartbeat, another one has the processor."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from strandline_bench.chaos.machine import Journals, Machine, Trial
from strandline_bench.chaos.plan import WEIGHTS, Variant


def run_trials(
    count: int,
    seed: int,
    chosen: Sequence[Variant],
    kinds: Sequence[str] | None = None,
    *,
    workers: int = 1,
    work_dir: Path | None = None,
    journals: Journals | None = None,
    until: Callable[[], bool] = lambda: False,
) -> Iterator[Trial]:
    """`count` trials, and one without a fault for each variant that they use. Begins no trial when `until` says so."""
    waiting: queue.SimpleQueue[tuple[int, Variant, str]] = queue.SimpleQueue()
    for one in _drawn(count, seed, chosen, list(kinds or WEIGHTS)):
        waiting.put(one)
    done: queue.SimpleQueue[Trial | Exception | None] = queue.SimpleQueue()
    journals = journals or Journals()
    ended = threading.Event()

    def work() -> None:
        try:
            with Machine(work_dir, journals=journals) as machine:
                while not ended.is_set() and not until():
                    for trial in machine.trial(*waiting.get_nowait()):
                        done.put(trial)
        except queue.Empty:
            pass
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            done.put(error)
        finally:
            done.put(None)

    threads = [threading.Thread(target=work, name=f"chaos-{number}") for number in range(workers)]
    for thread in threads:
        thread.start()
    running = workers
    try:
        while running:
            found = done.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _drawn(count: int, seed: int, chosen: Sequence[Variant], kinds: list[str]) -> Iterator[tuple[int, Variant, str]]:
    """What the seed says: the seed of every trial, its variant and its kind of fault."""
    chance = random.Random(seed)
    for _ in range(count):
        (kind,) = chance.choices(kinds, [WEIGHTS[name] for name in kinds])
        yield chance.randrange(1 << 40), chance.choice(chosen), kind
