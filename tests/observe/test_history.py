"""The history of a run: what is read is what was offered up to some moment, whatever happens between two calls."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.stats import CheckpointCounts, CheckpointStats, SubtaskStats
from strandline.errors import HistoryError, JobFailedError, NotFoundError, StorageError
from strandline.observe import history, run_record
from strandline.observe.facts import CheckpointsFacts, FailureFacts, JobFacts, Sample, StatusChange
from strandline.observe.history import HistoryWriter, RunHistory, too_many
from strandline.observe.history_format import decode_part, encode_part
from strandline.observe.history_jobs import HistoryJobs
from strandline.observe.history_reader import HistoryReader, read_history
from strandline.observe.run_entries import RunEntry, encode_entry, own_entry
from strandline.runtime.driver.recoveries import Recovery, Rescaling
from strandline.runtime.driver.status import RunStatus
from strandline.storage import JobPaths, Storage, StoredFile, open_storage
from strandline.storage.local import LocalStorage
from strandline.testing.faults import FaultyStorage
from tests.observe.generated import generated_facts
from tests.observe.seen import Seen
from tests.s3 import BUCKET, KEYS
from tests.waiting import wait_until

JOB = "visits"
PATHS = JobPaths(JOB)
START = 1_760_000_000_000


def checkpoint(number: int, status: str = "completed", subtasks: int = 2) -> CheckpointStats:
    figures = tuple(
        SubtaskStats("count", n, START + number, 5.0, 1.0, 1.0, 3.0, 0.5, 100, 1000, 2) for n in range(subtasks)
    )
    return CheckpointStats(
        id=number,
        status="failed" if status == "failed" else "in_progress" if status == "in_progress" else "completed",
        kind="checkpoint",
        batch_id=number * 3,
        trigger_time=START / 1000 + number,
        end_to_end_ms=12.5,
        sync_ms=1.0,
        async_ms=3.0,
        start_delay_ms=1.0,
        alignment_ms=0.5,
        barrier_to_completed_ms=9.0,
        checkpointed_bytes=100 * subtasks,
        full_bytes=1000 * subtasks,
        path=f"/checkpoints/visits/chk-{number}",
        subtasks=figures,
        failure="disk full" if status == "failed" else None,
        acknowledged=subtasks,
        expected=subtasks,
    )


def first_facts(run: str = "run1", start: int = START) -> JobFacts:
    return JobFacts(
        id="x", name=JOB, run=run, status=RunStatus.RUNNING, taken_ms=start, start_ms=start, checkpoint_dir="/elsewhere"
    )


def after(facts: JobFacts, event: str, kept: int = 50) -> JobFacts:
    """The facts after one more event. They hold the newest `kept` checkpoints, as those of a running job do."""
    seen = facts.checkpoints
    now = facts.taken_ms + 1000
    number = max((one.id for one in seen.history), default=0) + 1
    facts = msgspec.structs.replace(
        facts, taken_ms=now, samples=(*facts.samples, Sample(now, rows_per_second=float(now % 1000)))[-600:]
    )
    if event in ("completed", "failed", "in_progress"):
        counts = replace(seen.counts, total=seen.counts.total + 1, **{event: getattr(seen.counts, event) + 1})
        one = checkpoint(number, event)
        last = {"last_completed": one} if event == "completed" else {"last_failed": one} if event == "failed" else {}
        changed = msgspec.structs.replace(seen, counts=counts, history=(*seen.history, one)[-kept:], **last)
        return msgspec.structs.replace(facts, checkpoints=changed)
    if event == "failure":
        return msgspec.structs.replace(
            facts, failures=(*facts.failures, FailureFacts(now, "slots", f"at {now}", "x"))[-200:]
        )
    if event == "recovery":
        one_more = Recovery(now / 1000, "slots", (0,), 5, 10.0, 1, 2, "slot 0 was killed")
        return msgspec.structs.replace(facts, recoveries=(*facts.recoveries, one_more))
    if event == "rescale":
        rescaling = Rescaling(now / 1000, 1, 2, 5, 10.0, 5.0, 1.0, 2.0, 64, 0, 0)
        return msgspec.structs.replace(facts, rescalings=(*facts.rescalings, rescaling))
    if event == "status":
        return msgspec.structs.replace(facts, statuses=(*facts.statuses, StatusChange(now, RunStatus.RESTARTING)))
    return facts


def ended_of(facts: JobFacts) -> list[tuple[int, str]]:
    return [(one.id, one.status) for one in facts.checkpoints.history if one.status != "in_progress"]


class Crashed(Exception):
    """The process died here."""


class Remembered(Storage):
    """A storage in memory, whose caller dies at a chosen call: before the call is carried out, or after."""

    def __init__(self) -> None:
        self.url = "/memory"
        self.files: dict[str, bytes] = {}
        self.calls: list[str] = []
        self.dies_at: int | None = None
        self.fails_at: set[int] = set()
        self.done_first = False

    def _call(self, name: str, act: object = None) -> None:
        number = len(self.calls)
        self.calls.append(name)
        due = number == self.dies_at or number in self.fails_at
        if callable(act) and (not due or self.done_first):
            act()
        if number == self.dies_at:
            raise Crashed
        if number in self.fails_at:
            raise StorageError("on purpose")

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise NotFoundError(path)
        return self.files[path]

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self.read(path)[offset : offset + length]

    def write(self, path: str, data: bytes) -> None:
        self._call("write", lambda: self.files.__setitem__(path, data))

    def create(self, path: str, data: bytes) -> None:
        raise NotImplementedError

    def upload(self, source: Path, path: str) -> None:
        raise NotImplementedError

    def download(self, path: str, target: Path) -> None:
        raise NotImplementedError

    def rename(self, source: str, target: str) -> None:
        raise NotImplementedError

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # each on its own, so that a crash can come in between
            self._call("delete", lambda path=path: self.files.pop(path, None))

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        found = sorted(path for path in self.files if path.startswith(f"{prefix}/"))
        return iter([StoredFile(path, len(self.files[path]), float(zlib.crc32(self.files[path]))) for path in found])

    def exists(self, path: str) -> bool:
        return path in self.files


EVENTS = st.sampled_from(
    ["completed", "completed", "failed", "in_progress", "failure", "recovery", "rescale", "status"]
)
STEPS = st.lists(st.one_of(EVENTS, st.sampled_from(["write", "write", "close"])), max_size=60)


@settings(max_examples=300)
@given(
    steps=STEPS,
    dies_at=st.one_of(st.none(), st.integers(0, 60)),
    fails_at=st.sets(st.integers(0, 60), max_size=5),
    done_first=st.booleans(),
    whole_after=st.integers(2, 5),
)
def test_what_is_read_is_the_history_up_to_some_moment_wherever_the_driver_dies(
    steps: list[str], dies_at: int | None, fails_at: set[int], done_first: bool, whole_after: int
) -> None:
    storage = Remembered()
    storage.dies_at, storage.fails_at, storage.done_first = dies_at, fails_at, done_first
    facts = first_facts()
    offered, saved, written = [facts], 0, -1
    """Every state that was offered; how many of them are certainly durable; the newest that may be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "PARTS_PER_WHOLE", whole_after)
        run = RunHistory(storage, facts)
        run.offer(facts)
        try:
            for step in steps:
                if step not in ("write", "close"):
                    facts = after(facts, step)
                    offered.append(facts)
                    run.offer(facts)
                    continue
                written = len(offered) - 1
                try:
                    run.write(whole=step == "close")
                except StorageError:
                    continue
                saved = written + 1
        except Crashed:
            pass
    found = read_history(storage, JOB)
    if found is None:
        assert saved == 0
        return
    assert [note for note in found.notes if "the entry is missing" not in note] == []
    (place,) = [n for n, one in enumerate(offered) if one.taken_ms == found.facts.taken_ms]
    assert saved - 1 <= place <= written
    then = offered[place]
    assert ended_of(found.facts) == ended_of(then)
    assert found.facts.failures == then.failures
    assert found.facts.recoveries == then.recoveries
    assert found.facts.rescalings == then.rescalings
    assert found.facts.statuses == then.statuses
    assert found.facts.samples == then.samples
    assert len([path for path in storage.files if "/runs/" in path]) <= 2 * whole_after + len(fails_at) + 1


def test_the_facts_of_a_run_come_back_as_they_were(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = generated_facts(name=JOB, status=RunStatus.STOPPED, parallelism=4, checkpoints=30)
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    found = read_history(storage, JOB)
    assert found is not None
    back = found.facts
    for name in facts.__struct_fields__:
        if name not in ("id", "checkpoint_dir", "checkpoints", "health"):
            assert getattr(back, name) == getattr(facts, name), name
    assert back.checkpoint_dir == storage.url
    assert list(back.checkpoints.history) == [one for one in facts.checkpoints.history if one.status != "in_progress"]
    assert back.checkpoints.last_completed == facts.checkpoints.last_completed
    assert back.checkpoints.restored == facts.checkpoints.restored


def entry_of(facts: JobFacts, **changes: object) -> RunEntry:
    return msgspec.structs.replace(own_entry(facts), **changes)


def stored(storage: Storage, facts: JobFacts, entry: RunEntry | None = None) -> None:
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    if entry is not None:
        storage.write(PATHS.run_entry(entry.started_ms, entry.run), encode_entry(entry))


def facts_in(storage: Storage) -> JobFacts:
    found = read_history(storage, JOB)
    assert found is not None
    return found.facts


def many(events: str, facts: JobFacts | None = None) -> JobFacts:
    words = {"c": "completed", "f": "failed", "p": "in_progress", "F": "failure", "R": "recovery", "S": "rescale"}
    facts = facts or first_facts()
    for event in events:
        facts = after(facts, words[event])
    return facts


def test_a_run_that_did_not_end_and_whose_process_is_gone_has_lost_its_driver(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("ccp")
    stored(storage, facts, entry_of(facts, pid_started=1))
    found = facts_in(storage)
    assert found.driver_lost
    assert not found.runs
    assert found.status is RunStatus.RUNNING
    assert [one.id for one in found.checkpoints.history] == [1, 2]
    assert found.checkpoints.counts == CheckpointCounts(total=2, completed=2)


def test_a_run_that_is_alive_shows_its_checkpoint_in_progress_and_its_subtasks(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = generated_facts(name=JOB, checkpoints=3)
    stored(storage, facts, own_entry(facts))
    found = facts_in(storage)
    assert not found.driver_lost
    assert found.subtasks == facts.subtasks
    assert [one.status for one in found.checkpoints.history][-1] == "in_progress"


def test_the_entry_of_a_run_tells_its_end_if_the_last_part_was_lost(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    facts = many("c")
    stored(storage, facts, entry_of(facts, status=RunStatus.FAILED, beat_ms=START + 99))
    found = facts_in(storage)
    assert (found.status, found.end_ms, found.driver_lost) == (RunStatus.FAILED, START + 99, False)


def test_what_happened_to_earlier_runs_comes_first(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    first = many("ccFRS")
    second = first_facts("run2", START + 100_000)
    second = msgspec.structs.replace(
        many("fcF", msgspec.structs.replace(second, checkpoints=CheckpointsFacts(history=(checkpoint(2),)))),
    )
    stored(storage, first)
    stored(storage, second)
    found = facts_in(storage)
    assert found.run == "run2"
    assert [(one.id, one.status) for one in found.checkpoints.history] == [
        (1, "completed"),
        (2, "completed"),
        (3, "failed"),
        (4, "completed"),
    ]
    assert found.failures == first.failures + second.failures
    assert found.recoveries == first.recoveries
    assert found.rescalings == first.rescalings
    assert found.checkpoints.counts.completed == 3
    assert found.samples == second.samples


def test_two_drivers_at_once_do_not_touch_each_others_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "PARTS_PER_WHOLE", 3)
    storage = LocalStorage(str(tmp_path))
    seen = {"old": many("c", first_facts("old")), "new": many("c", first_facts("new", START + 1))}
    runs = {name: RunHistory(storage, facts) for name, facts in seen.items()}
    for _ in range(10):
        for name, run in runs.items():
            seen[name] = many("c", seen[name])
            run.offer(seen[name])
            run.write()
    old = [part for file in storage.list(PATHS.history_runs_dir) if (part := PATHS.parse_history(file.path))]
    assert {part.run for part in old} == {"old", "new"}
    found = facts_in(storage)
    assert found.run == "new"
    assert ended_of(found) == ended_of(seen["new"])


# --- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStorage, list[Path]]:
    """A whole part with checkpoints 1 to 3, and three parts with one more each."""
    monkeypatch.setattr(history, "PARTS_PER_WHOLE", 3)
    storage = LocalStorage(str(tmp_path))
    facts = first_facts()
    run = RunHistory(storage, facts)
    for _ in range(5):
        facts = many("c", facts)
        run.offer(facts)
        run.write()
    return storage, sorted(tmp_path.rglob("*.whole")) + sorted(tmp_path.rglob("*.part"))


def test_a_damaged_part_is_reported_and_the_rest_is_read(parts: tuple[LocalStorage, list[Path]]) -> None:
    storage, files = parts
    assert [path.name for path in files] == ["00000002.whole", "00000003.part", "00000004.part"]
    whole = files[0].read_bytes()
    for number, left in ((0, [4, 5]), (1, [1, 2, 3, 5]), (2, [1, 2, 3, 4])):
        data = files[number].read_bytes()
        for damaged in (
            b"",
            data[:3],
            data[:20],
            data[:-1],
            data[:40] + b"\x00" + data[41:],
            b"other" + data,
            data + b"x",
        ):
            files[number].write_bytes(damaged)
            found = read_history(storage, JOB)
            assert found is not None
            assert [one.id for one in found.facts.checkpoints.history] == left
            (note,) = [note for note in found.notes if "entry" not in note]
            assert str(files[number]) in note
            assert "damaged" in note
            assert "history-unreadable" in {finding.rule for finding in found.facts.health}
        files[number].write_bytes(data)
    files[1].write_bytes(whole)
    found = read_history(storage, JOB)
    assert found is not None
    assert "belongs to another place of the history" in " ".join(found.notes)


def test_a_part_of_a_later_release_is_reported_and_the_rest_is_read(parts: tuple[LocalStorage, list[Path]]) -> None:
    storage, files = parts
    data = files[2].read_bytes()
    files[2].write_bytes(data[:4] + b"\x02\x00" + data[6:])
    found = read_history(storage, JOB)
    assert found is not None
    assert [one.id for one in found.facts.checkpoints.history] == [1, 2, 3, 4]
    assert "a later release wrote this part of the history, in format version 2" in " ".join(found.notes)


def test_a_history_of_which_nothing_can_be_read_still_shows_the_job(parts: tuple[LocalStorage, list[Path]]) -> None:
    storage, files = parts
    for path in files:
        path.write_bytes(b"?")
    (job,) = HistoryJobs([storage.url]).all()
    facts = job.facts()
    assert (facts.name, facts.run, facts.start_ms, facts.driver_lost) == (JOB, "run1", START, True)
    assert len(facts.health) == 4


@given(data=st.binary(max_size=200), cut=st.integers(0, 300))
def test_any_bytes_are_read_or_refused_with_words(data: bytes, cut: int) -> None:
    good = encode_part(0, False, first_facts(), run_record.Events())
    for crafted in (data, good[: cut % len(good)], good[: cut % len(good)] + data):
        with pytest.raises(HistoryError, match=r"^here: "):
            decode_part(crafted, "here")


def test_a_part_that_announces_too_much_is_not_unpacked() -> None:
    import struct

    packed = b"x"
    size = 1 << 40
    checksum = zlib.crc32(packed, zlib.crc32(struct.pack("<QQ", 1, size)))
    with pytest.raises(HistoryError, match="it announces"):
        decode_part(b"SLHY" + struct.pack("<HQQI", 1, 1, size, checksum) + packed, "here")


# --- bounds ----------------------------------------------------------------------------------------


def test_the_history_of_a_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("KEPT_CHECKPOINTS", 20), ("KEPT_DETAILED", 5), ("KEPT_FAILURES", 7)):
        monkeypatch.setattr(run_record, name, value)
    monkeypatch.setattr("strandline.observe.history_merge.KEPT_CHECKPOINTS", 20)
    storage = Remembered()
    facts = first_facts()
    run = RunHistory(storage, facts)
    for number in range(200):
        facts = many("cF", facts)
        run.offer(facts)
        if number % 3 == 0:
            run.write()
    run.write(whole=True)
    found = facts_in(storage)
    assert [one.id for one in found.checkpoints.history] == list(range(181, 201))
    assert [bool(one.subtasks) for one in found.checkpoints.history] == [False] * 15 + [True] * 5
    assert found.failures == facts.failures[-7:]
    assert found.checkpoints.counts.completed == 200
    assert len(storage.files) == 1


def test_ten_thousand_checkpoints_and_a_thousand_subtasks_stay_small() -> None:
    storage = Remembered()
    facts = generated_facts(name=JOB, parallelism=1000, checkpoints=10_000, samples=600)
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write(whole=True)
    (size,) = [len(data) for data in storage.files.values()]
    found = facts_in(storage)
    assert len(found.checkpoints.history) == 9_999
    assert sum(len(one.subtasks) for one in found.checkpoints.history) <= run_record.KEPT_SUBTASKS
    print(f"{size:,} bytes")
    assert size < 10 << 20


def test_a_checkpoint_that_is_offered_again_after_it_left_the_history_is_not_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_record, "KEPT_CHECKPOINTS", 3)
    record = run_record.RunRecord()
    facts = many("ccccc")
    record.offer(facts)
    record.saved()
    record.offer(many("c", facts))
    assert [one.id for one in record.fresh().checkpoints] == [6]


def test_an_id_that_is_used_again_replaces_the_checkpoint_that_failed() -> None:
    storage = Remembered()
    facts = many("cf")
    run = RunHistory(storage, facts)
    run.offer(facts)
    run.write()
    again = replace(checkpoint(2), trigger_time=START / 1000 + 500)
    seen = msgspec.structs.replace(facts.checkpoints, history=(checkpoint(1), again))
    run.offer(msgspec.structs.replace(facts, checkpoints=seen))
    run.write()
    assert ended_of(facts_in(storage)) == [(1, "completed"), (2, "completed")]


def stored_file(run: int, size: int, modified: float) -> StoredFile:
    return StoredFile(PATHS.history_part(run, f"r{run}", 0, whole=True), size, modified)


def test_the_oldest_runs_go_when_there_are_too_many_but_not_one_that_may_be_alive() -> None:
    day = 86_400.0
    files = [stored_file(run, 10, run * day) for run in range(1, 31)]
    log = StoredFile(PATHS.history_log("r3", "driver"), 5, 3 * day)
    kept_log = StoredFile(PATHS.history_log("r30", "driver"), 5, 3 * day)
    doomed = too_many([*files, log, kept_log], PATHS, (30, "r30"))
    assert doomed == [*files[:10][::-1], log]
    files[4] = stored_file(5, 10, 30 * day - 60)
    assert files[4] not in too_many(files, PATHS, (30, "r30"))


def test_the_oldest_runs_go_when_they_are_too_large() -> None:
    files = [stored_file(run, 30 << 20, run * 86_400.0) for run in range(1, 5)]
    assert too_many(files, PATHS, (4, "r4")) == [files[0]]


def test_a_job_with_a_checkpoint_every_second_writes_less_than_once_in_ten_seconds() -> None:
    storage = Remembered()
    clock = [0.0]
    facts = first_facts()
    run = RunHistory(storage, facts, lambda: clock[0])
    for second in range(600):
        clock[0] += 1.0
        facts = many("cF" if second % 20 == 0 else "c", facts)
        run.offer(facts)
        if run.is_due():
            run.write()
    writes = storage.calls.count("write")
    assert writes <= 600 / 12 + 3
    assert len(storage.calls) <= 2 * writes
    clock[0] += 0.5
    run.offer(many("F", facts))
    assert not run.is_due()  # failures that come again and again are not written more often


def test_a_failure_is_written_at_once() -> None:
    clock = [0.0]
    facts = first_facts()
    run = RunHistory(Remembered(), facts, lambda: clock[0])
    run.offer(facts)
    run.write()
    clock[0] += 1.0
    run.offer(many("c", facts))
    assert not run.is_due()
    run.offer(many("cF", facts))
    assert run.is_due()


# --- in the background -----------------------------------------------------------------------------


def test_the_writer_saves_the_end_of_a_run(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    job = Seen(many("c"))
    writer = HistoryWriter(job, storage)
    wait_until(lambda: read_history(storage, JOB))
    job.current = msgspec.structs.replace(many("cc", job.current), status=RunStatus.FINISHED, end_ms=START + 5)
    writer.close()
    found = facts_in(storage)
    assert (found.status, found.end_ms, found.driver_lost) == (RunStatus.FINISHED, START + 5, False)
    assert len(found.checkpoints.history) == 3


def test_a_storage_that_fails_is_logged_once_and_nothing_is_lost_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(history, "WRITE_SECONDS", 0.0)
    switch = tmp_path / "on"
    switch.touch()
    storage = FaultyStorage(f"faulty+file://{tmp_path}/c", {"fail_pattern": "^write ", "switch": str(switch)})
    job = Seen(many("c"))
    writer = HistoryWriter(job, storage)
    wait_until(lambda: "writing its history failed" in caplog.text)
    job.current = many("ccF", job.current)
    switch.unlink()
    writer.close()
    found = facts_in(storage)
    assert [one.id for one in found.checkpoints.history] == [1, 2, 3]
    assert caplog.text.count("writing its history failed") == 1


# --- through HistoryJobs ---------------------------------------------------------------------------


def test_jobs_of_several_directories_are_shown_newest_first(tmp_path: Path) -> None:
    places = [LocalStorage(str(tmp_path / name)) for name in ("a", "b")]
    stored(places[0], many("c"))
    stored(places[1], many("cc", first_facts("run2", START + 1)))
    (tmp_path / "a" / "no-history" / "log").mkdir(parents=True)
    jobs = HistoryJobs([place.url for place in places])
    assert [job.facts().run for job in jobs.all()] == ["run2", "run1"]
    second = jobs.all()[1]
    assert jobs.get(second.id) is second
    assert second.control is None
    found = jobs.get(JOB)
    assert found is not None
    assert found.facts().run == "run2"
    assert jobs.get("nobody") is None


def test_a_directory_that_does_not_exist_has_no_jobs(tmp_path: Path) -> None:
    assert HistoryJobs([str(tmp_path / "nowhere")]).all() == []


def test_storage_is_looked_at_again_only_after_some_seconds(tmp_path: Path) -> None:
    clock = [0.0]
    storage = LocalStorage(str(tmp_path))
    stored(storage, many("c"))
    jobs = HistoryJobs([storage.url], clock=lambda: clock[0])
    (job,) = jobs.all()
    assert job.facts().run == "run1"
    stored(storage, many("c", first_facts("run2", START + 1)))
    assert job.facts().run == "run1"
    clock[0] += 5
    assert job.facts().run == "run2"
    assert jobs.all() == [job]


def test_logs_that_were_kept_can_be_read(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    stored(storage, many("c"))
    storage.write(PATHS.history_log("run1", "slot-0"), b"first line\nsecond line\nthird line\n")
    storage.write(PATHS.history_log("run0", "slot-1"), b"another run's\n")
    (job,) = HistoryJobs([storage.url]).all()
    assert list(job.processes()) == ["slot-0"]
    assert job.log("slot-0").text == "first line\nsecond line\nthird line\n"
    short = job.log("slot-0", 15)
    assert (short.text, short.cut) == ("third line\n", True)
    for process in ("slot-1", "../../log/x", "driver"):
        with pytest.raises(JobFailedError, match=r"no log of .* was kept; logs that were kept: slot-0"):
            job.log(process)


def test_a_heart_that_beats_between_two_looks_is_alive_and_one_that_stops_is_dead_whatever_the_clocks_say(
    tmp_path: Path,
) -> None:
    clock = [0.0]
    storage = LocalStorage(str(tmp_path))
    facts = many("c")
    reader = HistoryReader(storage, JOB, lambda: clock[0])

    def look(beat_ms: int, modified: float) -> bool:
        stored(storage, facts, entry_of(facts, host_id="elsewhere", beat_ms=beat_ms))
        path = tmp_path / PATHS.run_entry(START, "run1")
        import os

        os.utime(path, (modified, modified))
        clock[0] += 30
        found = reader.read()
        assert found is not None
        return found.facts.runs

    assert not look(1_000, 1)  # decades behind
    assert look(2_000, 2)
    assert look(3_000, 3)
    future = 4_000_000_000
    assert look(future * 1000, future)
    assert look(future * 1000, future)
    assert not look(future * 1000, future)


def test_a_history_in_an_object_store_is_read(s3_endpoint: str) -> None:
    options = {**KEYS, "endpoint": s3_endpoint}
    storage = open_storage(f"s3://{BUCKET}/history", options)
    facts = many("ccFp")
    stored(storage, facts, entry_of(facts, pid_started=1))
    (job,) = HistoryJobs([storage.url], options).all()
    found = job.facts()
    assert found.driver_lost
    assert [one.id for one in found.checkpoints.history] == [1, 2]
    assert found.failures == facts.failures
    later = RunHistory(storage, first_facts("run2", START + 1))
    later.offer(first_facts("run2", START + 1))
    later.write()
    assert facts_in(storage).run == "run2"
