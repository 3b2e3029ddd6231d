"""The job's log: one winner for every place, and everyone can tell who it was."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.checkpoint.batch import batch_id
from strandline.checkpoint.job_log import (
    CheckpointRef,
    Completed,
    Entry,
    JobLog,
    Takeover,
    Verdict,
    decode_entry,
    encode_entry,
    fenced_error,
    judge_conflict,
)
from strandline.errors import AlreadyExistsError, CheckpointError, FencedError, UnknownOutcomeError


def history() -> list[Entry]:
    """Two generations and three completions, with two checkpoints retained."""
    log, entries = JobLog(), list[Entry]()

    def won(entry: Entry) -> None:
        nonlocal log
        entries.append(entry)
        log = log.apply(entry)

    won(log.takeover_entry("a", 1.0, "n1"))
    won(log.completion_entry(1, "chk-1/_metadata", 10, 2.0, "n2", (1,), ()))
    won(log.completion_entry(2, "chk-2/_metadata", 20, 3.0, "n3", (1, 2), ()))
    won(log.takeover_entry("b", 4.0, "n4"))
    won(log.completion_entry(5, "chk-5/_metadata", 30, 5.0, "n5", (2, 5), (1,)))
    return entries


def test_replay_says_where_the_job_stands() -> None:
    log = JobLog.replay(history())
    assert (log.position, log.generation, log.owner) == (4, 2, "b")
    assert (log.retained, log.dropped, log.next_checkpoint_id) == ((2, 5), (1,), 6)
    assert log.latest == CheckpointRef(5, "chk-5/_metadata", 30)


def test_epochs_belong_to_the_checkpoint_of_their_generation_until_one_includes_them_or_the_job_goes_elsewhere() -> (
    None
):
    log = JobLog()
    log = log.apply(log.takeover_entry("a", 1.0, "n1"))
    assert not log.epochs
    log = log.apply(log.completion_entry(1, "visits/chk-1/_metadata", batch_id(1, 5), 2.0, "n2", (1,), ()))
    assert log.epochs
    assert log.latest is not None
    resumed = log.apply(log.takeover_entry("b", 3.0, "n3"))
    assert resumed.epochs, "a driver may die before it has made a checkpoint of them"
    again = resumed.apply(resumed.takeover_entry("c", 4.0, "n4"))
    assert again.epochs
    merged = again.completion_entry(2, "visits/chk-2/_metadata", batch_id(1, 9), 5.0, "n5", (2,), (1,))
    assert not again.apply(merged).epochs
    own = again.completion_entry(2, "visits/chk-2/_metadata", batch_id(3, -1), 5.0, "n5", (2,), (1,))
    assert again.apply(own).epochs
    for start in (
        log.go_back(log.latest),
        log.restore_own(log.latest, claim=True),
        log.restore_own(log.latest, claim=False),
        log.restore_other(log.latest, 0),
    ):
        assert not log.apply(log.takeover_entry("b", 3.0, "n3", start)).epochs


def test_an_empty_log_begins_with_the_first_generation() -> None:
    log = JobLog.replay([])
    assert (log.next_sequence, log.next_checkpoint_id, log.latest) == (0, 1, None)
    entry = log.takeover_entry("a", 1.0, "n")
    assert (entry.sequence, entry.generation, entry.retained) == (0, 1, ())
    with pytest.raises(CheckpointError, match="must take the job over"):
        log.completion_entry(1, "p", 0, 0.0, "n", (1,), ())


def test_any_tail_of_the_log_is_enough() -> None:
    entries = history()
    whole = JobLog.replay(entries)
    for start in range(len(entries)):
        assert replace(JobLog.replay(entries[start:]), owner="") == replace(whole, owner="")


def test_a_takeover_repeats_what_is_known() -> None:
    log = JobLog.replay(history())
    after = JobLog.replay([log.takeover_entry("c", 6.0, "n6")])
    assert (after.retained, after.dropped, after.latest) == (log.retained, log.dropped, log.latest)
    assert (after.generation, after.next_checkpoint_id) == (3, 6)


def test_a_gap_is_an_error() -> None:
    entries = history()
    with pytest.raises(CheckpointError, match="entry 3 follows entry 1, entry 2 is missing"):
        JobLog.replay(entries[:2] + entries[3:])


def test_an_entry_that_contradicts_the_log_is_an_error() -> None:
    log = JobLog.replay(history())
    good = log.completion_entry(6, "p", 40, 6.0, "n", (5, 6), (2,))
    for wrong in (
        msgspec.structs.replace(good, generation=1),
        msgspec.structs.replace(good, checkpoint_id=5),
        msgspec.structs.replace(good, retained=(5,)),
        msgspec.structs.replace(good, dropped=(5,)),
        msgspec.structs.replace(log.takeover_entry("c", 0.0, "n"), generation=2),
    ):
        with pytest.raises(CheckpointError, match="contradicts"):
            log.apply(wrong)


def test_entries_are_readable_json_and_come_back() -> None:
    for entry in history():
        data = encode_entry(entry)
        assert decode_entry(data, "log/0") == entry
        assert data.startswith(b'{"crc32":"')
        assert data.endswith(b"}}\n")
    assert b'"type":"takeover"' in encode_entry(history()[0])


def test_damage_to_an_entry_is_noticed() -> None:
    data = encode_entry(history()[-1])
    where = "log/00000004"
    for length in range(len(data) - 1):
        with pytest.raises(CheckpointError, match=where):
            decode_entry(data[:length], where)
    for position in range(len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 0x01
        with pytest.raises(CheckpointError, match=where):
            decode_entry(bytes(damaged), where)
    with pytest.raises(CheckpointError, match=where):
        decode_entry(b"\xff\xfe", where)


def test_a_nonce_tells_our_entry_from_another() -> None:
    takeover = history()[3]
    assert judge_conflict("n4", takeover) is Verdict.OURS
    assert judge_conflict("n9", takeover) is Verdict.FENCED
    error = fenced_error("visits", 1, takeover)
    assert isinstance(error, FencedError)
    for text in ("'visits'", "driver 'b'", "generation 2", "generation 1, stops"):
        assert text in str(error)


# --- two drivers over one store ------------------------------------------------------------------


class Store:
    """Create-if-absent, which may take effect and then not say so, or fail without effect."""

    def __init__(self) -> None:
        self.files: dict[int, bytes] = {}

    def create(self, sequence: int, data: bytes, outcome: str) -> None:
        if outcome == "lost before":
            raise UnknownOutcomeError("no answer")
        if sequence in self.files:
            raise AlreadyExistsError(str(sequence))
        self.files[sequence] = data
        if outcome == "lost after":
            raise UnknownOutcomeError("no answer")

    def replay(self) -> JobLog:
        return JobLog.replay(decode_entry(self.files[key], str(key)) for key in sorted(self.files))


@dataclass
class Driver:
    """Carries out what the log's functions say, as the runtime does."""

    name: str
    store: Store
    log: JobLog = field(default_factory=JobLog)
    nonces: int = 0
    fenced: bool = False
    completed: list[int] = field(default_factory=list)

    def nonce(self) -> str:
        self.nonces += 1
        return f"{self.name}-{self.nonces}"

    def write(self, entry: Entry, outcomes: list[str]) -> Verdict:
        while True:
            try:
                self.store.create(entry.sequence, encode_entry(entry), outcomes.pop() if outcomes else "ok")
                return Verdict.OURS
            except (AlreadyExistsError, UnknownOutcomeError):
                found = self.store.files.get(entry.sequence)
                if found is not None:
                    return judge_conflict(entry.nonce, decode_entry(found, "log"))

    def take_over(self, outcomes: list[str]) -> None:
        while True:
            self.log = self.store.replay()
            entry = self.log.takeover_entry(self.name, 0.0, self.nonce())
            if self.write(entry, outcomes) is Verdict.OURS:
                self.log = self.log.apply(entry)
                self.fenced = False
                return

    def complete(self, outcomes: list[str]) -> None:
        if self.log.generation == 0 or self.fenced:
            return
        id = self.log.next_checkpoint_id
        entry = self.log.completion_entry(id, f"chk-{id}/_metadata", id, 0.0, self.nonce(), (id,), self.log.retained)
        if self.write(entry, outcomes) is Verdict.OURS:
            self.log = self.log.apply(entry)
            self.completed.append(entry.sequence)
        else:
            self.fenced = True


steps = st.tuples(
    st.sampled_from([0, 1]),
    st.sampled_from(["take over", "complete", "complete"]),
    st.lists(st.sampled_from(["ok", "lost before", "lost after"]), max_size=3),
)


@given(st.lists(steps, max_size=25))
@settings(deadline=None)
def test_a_driver_that_was_taken_over_completes_nothing_and_learns_it(script: list[tuple[int, str, list[str]]]) -> None:
    store = Store()
    drivers = [Driver("a", store), Driver("b", store)]
    newest: Driver | None = None
    for index, action, outcomes in script:
        driver = drivers[index]
        if action == "take over":
            driver.take_over(list(outcomes))
            newest = driver
        else:
            running = driver.log.generation > 0 and not driver.fenced
            before = len(driver.completed)
            driver.complete(list(outcomes))
            if running:
                assert (len(driver.completed) > before) == (driver is newest)
                assert driver.fenced == (driver is not newest)
        assert newest is None or store.replay() == newest.log
    entries = [decode_entry(store.files[key], "log") for key in sorted(store.files)]
    assert [entry.sequence for entry in entries] == list(range(len(entries)))
    generation = 0
    for entry in entries:
        if isinstance(entry, Takeover):
            generation = entry.generation
        assert entry.generation == generation, "after a takeover no older generation completes"
    known = sorted(sequence for driver in drivers for sequence in driver.completed)
    assert known == [entry.sequence for entry in entries if isinstance(entry, Completed)], "every outcome is known"


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata_path": "../../etc/passwd"},
        {"metadata_path": "/etc/_metadata"},
        {"metadata_path": "visits/chk-1/../../_metadata"},
        {"checkpoint_id": -1},
        {"retained": (1, 2**63)},
        {"dropped": (-1,)},
        {"generation": 2**64},
        {"generation": 2**32},
        {"sequence": -1},
        {"time": 1e300},
    ],
)
def test_a_crafted_entry_with_a_right_checksum_is_an_error_of_ours(changes: dict[str, Any]) -> None:
    entry = Completed(
        sequence=1,
        generation=1,
        checkpoint_id=1,
        metadata_path="visits/chk-1/_metadata",
        batch_id=1,
        time=1.0,
        nonce="n",
        retained=(1,),
        dropped=(),
    )
    assert decode_entry(encode_entry(entry), "here") == entry
    with pytest.raises(CheckpointError, match="here, an entry of the job's log, is damaged"):
        decode_entry(encode_entry(msgspec.structs.replace(entry, **changes)), "here")


def test_an_entry_nested_without_end_is_an_error_of_ours() -> None:
    for data in (b"[" * 100_000, b'{"crc32":"00000000","entry":' + b"[" * 100_000, b'{"crc32":"\xff"'):
        with pytest.raises(CheckpointError, match="damaged"):
            decode_entry(data, "here")


def test_a_checkpoint_in_another_folder_is_never_the_jobs_own() -> None:
    entry = JobLog().takeover_entry("me", 1.0, "n")
    ref = CheckpointRef(1, "visits/chk-1/_metadata", 1, origin="s3://elsewhere")
    with pytest.raises(CheckpointError, match="another folder"):
        decode_entry(encode_entry(msgspec.structs.replace(entry, latest=ref)), "here")
    other = msgspec.structs.replace(entry, latest=msgspec.structs.replace(ref, ours=False))
    assert decode_entry(encode_entry(other), "here") == other
