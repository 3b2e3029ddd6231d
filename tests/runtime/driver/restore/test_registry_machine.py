"""Job log, registry and gc together, with drivers that die or stall between any two changes of storage.

Whatever happens: every checkpoint that can be restored has all its files, and after gc exactly those files are left.
The driver's own code takes over, completes, deletes and collects garbage. The model knows what a user is promised.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from strandline.admin.garbage import delete_garbage, find_garbage
from strandline.checkpoint.metadata import file_paths
from strandline.errors import CheckpointError, FencedError, StrandlineError
from strandline.runtime.driver.restore.job_log import JobLogStore, read_metadata
from strandline.runtime.driver.restore.savepoints import open_savepoint
from strandline.runtime.driver.restore.takeover import ClaimMode
from tests.examples import examples
from tests.runtime.driver.restore.generations import (
    JOB,
    PATHS,
    Crash,
    Generation,
    Mortal,
    data_files,
    die,
    handles,
    location,
    words,
)

WORDS = st.text("abcd", max_size=3)
CHANGES = st.tuples(WORDS, WORDS)
"""The words that are added to the state, and those that are removed."""


class Stop(NamedTuple):
    """Where a driver stops."""

    at: int
    """After how many changes of storage."""
    after: bool
    """Whether the last change takes effect."""
    stalls: bool
    """Whether the driver goes on later. Otherwise it dies."""
    counts: str
    """Which changes count; see `Mortal`."""


STOPS = st.one_of(
    st.none(),
    st.builds(Stop, st.integers(0, 9), st.booleans(), st.booleans(), st.just("")),
    st.builds(Stop, st.just(0), st.booleans(), st.booleans(), st.sampled_from(["/log/", "/_metadata"])),
    st.builds(Stop, st.integers(0, 3), st.booleans(), st.booleans(), st.just("delete")),
)


@dataclass
class Promised:
    """What the user is promised: the words of every checkpoint that can be restored."""

    retained: dict[int, set[str]] = field(default_factory=dict)
    released: dict[int, set[str]] = field(default_factory=dict)

    def all(self) -> dict[int, set[str]]:
        return self.retained | self.released


class Stalled:
    """A driver's work in a thread of its own, which stops in the middle until somebody lets it go on."""

    def __init__(self, work: Callable[[], None], storage: Mortal) -> None:
        self._stopped = threading.Event()
        self._go_on = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        storage.stop = self._stall
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._stopped.wait(30)

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def go_on(self) -> None:
        self._go_on.set()
        self._thread.join(30)
        assert self.ended

    def _stall(self) -> None:
        self._stopped.set()
        assert self._go_on.wait(60)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the machine judges it
            self.error = error
        finally:
            self._stopped.set()


class RegistryMachine(RuleBasedStateMachine):
    """One job with at most one driver that works. Others may be stalled, and some do not know that they are fenced."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="strandline-machine-", dir=_memory()))
        self.url = str(self.folder / "checkpoints")
        self.clock = itertools.count(1)
        self.promised = Promised()
        self.savepoints: dict[str, set[str]] = {}
        self.run: Generation | None = None
        self.fenced: list[Generation] = []
        self.stalled: list[Stalled] = []
        self.num_retained = 1
        self.others = 0
        self.deleted: set[int] = set()
        """Released checkpoints that the user deleted. A fenced driver may use such a number, and write its metadata. It
        names files that nobody promised to keep."""

    def storage(self) -> Mortal:
        return Mortal(self.url, self.clock)

    @property
    def look(self) -> Mortal:
        """For the test itself: it never dies."""
        return self.storage()

    def position(self) -> int:
        return JobLogStore(self.look, PATHS).load().position

    # --- work that may stop -----------------------------------------------------------------------

    def attempt(self, storage: Mortal, stop: Stop | None, work: Callable[[], None]) -> bool:
        """Do some work of a driver. Returns whether the driver is still at its work when it ends."""
        if stop is None:
            work()
            return True
        storage.stops_at, storage.after, storage.counts = stop.at, stop.after, stop.counts
        if stop.stalls:
            stalled = Stalled(work, storage)
            if stalled.ended:
                if stalled.error is not None:
                    raise stalled.error
                storage.stops_at = None
                return True
            event("stalled")
            self.stalled.append(stalled)
            self.run = None
            return False
        storage.stop = die
        try:
            work()
        except Crash:
            event("died")
            self.run = None
            return False
        storage.stops_at = None
        return True

    # --- starts -----------------------------------------------------------------------------------

    def start(
        self,
        stop: Stop | None,
        promise: Callable[[], Promised],
        restore: str | None = None,
        claim_mode: ClaimMode = "no_claim",
        expected: set[str] | None = None,
    ) -> None:
        before, storage = self.position(), self.storage()
        opened: list[Generation] = []
        if self.run is not None:
            self.fenced = [*self.fenced[-2:], self.run]
            self.run = None
        after = promise()
        alive = self.attempt(
            storage,
            stop,
            lambda: opened.append(Generation(storage, restore, claim_mode, num_retained=self.num_retained)),
        )
        if self.position() != before:
            self.promised = after
        if alive:
            self.run = opened[0]
            if expected is not None:
                assert self.run.state == expected
            log = self.run.claim.store.job_log
            assert set(log.retained) == set(self.promised.retained)
            assert set(self.run.claim.store.released()) - self.deleted == set(self.promised.released)

    @rule(stop=STOPS, num_retained=st.integers(1, 3))
    def start_again(self, stop: Stop | None, num_retained: int) -> None:
        self.num_retained = num_retained
        self.start(stop, lambda: self.promised)

    def restorable(self) -> list[int]:
        return sorted(self.promised.all())

    @precondition(lambda self: self.promised.all())
    @rule(data=st.data(), stop=STOPS, claim=st.booleans())
    def start_from_a_checkpoint(self, data: st.DataObject, stop: Stop | None, claim: bool) -> None:
        number = data.draw(st.sampled_from(self.restorable()))
        known, old = self.promised.all(), self.promised

        def promise() -> Promised:
            older = {n: content for n, content in known.items() if n <= number}
            if claim:
                retained = {n: c for n, c in older.items() if n in old.retained or n == number}
                return Promised(retained, {n: c for n, c in old.released.items() if n != number})
            return Promised({}, old.released | older)

        event("claim" if claim else "no_claim")
        mode: ClaimMode = "claim" if claim else "no_claim"
        self.start(stop, promise, location(self.look, number), mode, known[number])

    @precondition(lambda self: self.savepoints)
    @rule(data=st.data(), stop=STOPS)
    def start_from_a_savepoint(self, data: st.DataObject, stop: Stop | None) -> None:
        path = list(self.savepoints)[data.draw(st.integers(0, len(self.savepoints) - 1))]
        self.start(stop, lambda: Promised({}, self.promised.all()), path, expected=self.savepoints[path])

    @precondition(lambda self: len(self.promised.retained) > 1)
    @rule(stop=STOPS)
    def the_newest_is_damaged_and_the_job_goes_back(self, stop: Stop | None) -> None:
        newest = max(self.promised.retained)
        latest = JobLogStore(self.look, PATHS).load().latest
        if latest is None or latest.checkpoint_id != newest or not latest.ours:
            return
        data = self.look.read(PATHS.metadata(newest))
        self.look.write(PATHS.metadata(newest), data[:-1])
        older = {n: content for n, content in self.promised.retained.items() if n != newest}
        self.promised = Promised(older, self.promised.released)
        event("went back")
        self.start(None, lambda: self.promised, expected=older[max(older)])
        assert self.run is not None

    # --- what a run does --------------------------------------------------------------------------

    def running(self) -> Generation:
        """The run that works; it is started if there is none."""
        if self.run is None:
            self.start(None, lambda: self.promised)
        assert self.run is not None
        return self.run

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=3), stop=STOPS, abandoned=st.booleans())
    def take_checkpoints(self, changes: list[tuple[str, str]], stop: Stop | None, abandoned: bool) -> None:
        """Whole ones, and one that may not be completed. See `take_a_checkpoint`."""
        for add, remove in changes[1:]:
            self.take_a_checkpoint(add, remove, None, False)
        self.take_a_checkpoint(*changes[0], stop, abandoned)

    def take_a_checkpoint(self, add: str, remove: str, stop: Stop | None, abandoned: bool) -> None:
        """`abandoned`: an older checkpoint has uploaded the same files, and ends when this one completes."""
        run, number = self.running(), 0
        before = self.position()
        run.change(add, remove)
        state = set(run.state)

        def work() -> None:
            nonlocal number
            if abandoned:
                run.upload()
            number = run.upload()
            with suppress(CheckpointError):  # a fenced driver was first to write the metadata of this number
                run.complete(number)

        self.attempt(run.storage, stop, work)
        if self.position() != before:
            event("completed")
            kept = self.promised.retained | {number: state}
            retained = {n: kept[n] for n in sorted(kept)[-self.num_retained :]}
            self.promised = Promised(retained, self.promised.released)

    @rule()
    def uploads_without_a_checkpoint(self) -> None:
        """A checkpoint begins and never ends."""
        run = self.running()
        if len(run.coordinator.pending()) < 2:
            run.upload()

    @precondition(lambda self: len(self.savepoints) < 3)
    @rule()
    def take_a_savepoint(self) -> None:
        run = self.running()
        self.savepoints[run.savepoint(self.folder / "savepoints")] = set(run.state)

    @rule(stop=STOPS, really=st.sampled_from([False, False, False, True]))
    def cancel(self, stop: Stop | None, really: bool) -> None:
        if not really:
            return
        run = self.running()
        before = self.position()
        self.attempt(run.storage, stop, run.cancel)
        self.run = None
        if self.position() != before:
            event("cancelled")
            self.promised = Promised({}, self.promised.released)

    # --- others -----------------------------------------------------------------------------------

    @precondition(lambda self: self.promised.released)
    @rule(data=st.data())
    def the_user_deletes_a_released_checkpoint(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.promised.released)))
        latest = JobLogStore(self.look, PATHS).load().latest
        if latest is not None and latest.checkpoint_id == number and latest.origin is None:
            return  # the job would have nothing to start from
        shutil.rmtree(Path(self.url) / PATHS.checkpoint_dir(number))
        del self.promised.released[number]
        self.deleted.add(number)

    @precondition(lambda self: self.promised.all())
    @rule(data=st.data())
    def another_job_starts_from_a_checkpoint_and_is_cancelled(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.restorable()))
        self.others += 1
        job = f"other{self.others}"
        other = Generation(self.storage(), location(self.look, number), job=job)
        first = other.checkpoint()
        assert words(self.look, first, job) == self.promised.all()[number]
        other.checkpoint("d", "a")
        other.cancel()
        assert not data_files(self.look, job)

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def a_fenced_driver_goes_on(self, data: st.DataObject) -> None:
        old = self.fenced.pop(data.draw(st.integers(0, len(self.fenced) - 1)))
        taken_over = JobLogStore(self.look, PATHS).load().generation > old.claim.generation
        before = self.position()
        try:
            old.checkpoint("a", "b")
        except (CheckpointError, FencedError):
            assert self.position() == before
            return
        assert not taken_over, "a driver that was taken over completed a checkpoint"
        self.adopt()

    @precondition(lambda self: self.stalled)
    @rule(data=st.data())
    def a_stalled_driver_goes_on(self, data: st.DataObject) -> None:
        """Beside another driver, or with nobody else: what it completes then counts only if it was not taken over."""
        old = self.stalled.pop(data.draw(st.integers(0, len(self.stalled) - 1)))
        before = self.position()
        old.go_on()
        assert old.error is None or isinstance(old.error, StrandlineError)
        if self.position() != before:
            event("a stalled driver won an entry")
            self.adopt()

    def adopt(self) -> None:
        """A driver that stalled before its entry went on and won: the log says what is promised now."""
        store = JobLogStore(self.look, PATHS)
        log = store.load()
        assert self.run is None or log.generation > self.run.claim.generation
        if self.run is not None:
            self.fenced = [*self.fenced[-2:], self.run]
            self.run = None
        known = self.promised.all()
        released = [number for number in store.released() if number not in self.deleted]
        content = {n: known[n] if n in known else words(self.look, n) for n in (*log.retained, *released)}
        self.promised = Promised({n: content[n] for n in log.retained}, {n: content[n] for n in released})

    # --- gc ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.position() >= 0)
    @rule()
    def collect_garbage_beside_the_run(self) -> None:
        """The run goes on with everything that it has uploaded."""
        delete_garbage(self.look, find_garbage(self.look, JOB, now=time.time() + 1e6, min_age=0.0))
        if self.run is not None:
            for pending in self.run.coordinator.pending():
                for path in pending.uploaded_paths:
                    assert self.look.exists(path) or pending.kind == "savepoint"

    @precondition(lambda self: self.position() >= 0 and not self.stalled)
    @rule(stop=STOPS)
    def collect_all_garbage(self, stop: Stop | None) -> None:
        storage = self.storage()
        if self.run is not None:
            self.fenced = [*self.fenced[-2:], self.run]
            self.run = None

        def work() -> None:
            delete_garbage(storage, find_garbage(storage, JOB, now=time.time() + 1e6, min_age=0.0, take_over=True))

        if self.attempt(storage, stop, work):
            assert data_files(self.look) == self.needed()

    def needed(self) -> set[str]:
        found: set[str] = set()
        for number in self.promised.all():
            found |= self.named(number)
        for number in self.deleted:
            if self.look.exists(PATHS.metadata(number)):
                found |= self.named(number) & data_files(self.look)
        return found

    def named(self, number: int) -> set[str]:
        return {PATHS.metadata(number), *file_paths(read_metadata(self.look, PATHS, number, ()))}

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def every_checkpoint_that_can_be_restored_is_whole(self) -> None:
        for number, content in self.promised.all().items():
            assert words(self.look, number) == content
        for path, content in self.savepoints.items():
            storage, metadata = open_savepoint(path, {})
            assert {storage.read(handle.path).decode() for handle in handles(metadata)} == content

    def teardown(self) -> None:
        try:
            while self.stalled:
                self.stalled.pop().go_on()
            self.run = None
            if self.position() >= 0:
                self.adopt()
                self.every_checkpoint_that_can_be_restored_is_whole()
                self.collect_all_garbage(None)
                self.every_checkpoint_that_can_be_restored_is_whole()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


RegistryMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
TestRegistryMachine = RegistryMachine.TestCase
