"""Which files a changelog names, keeps and gives up: by example, and beside a coordinator that deletes files."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strandline.checkpoint.coordinator import CheckpointCoordinator, JobShape
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SourcePosition,
    StateFile,
    SubtaskState,
    keyed_files,
    last_batch,
    segment_name,
)
from strandline.checkpoint.pending import Subtask, SubtaskAck
from strandline.errors import CheckpointError
from strandline.runtime.driver.durable_segments import DurableSegments
from strandline.runtime.protocol.messages import SegmentUpload
from strandline.runtime.taskmanager.changelog.files import ChangelogFiles, Entry, SubtaskFiles
from tests.examples import examples

S0: Subtask = ("op", 0)
S1: Subtask = ("op", 1)
BOTH = (S0, S1)


def segment(batch: int, path: str, offset: int = 0, size: int = 10) -> StateFile:
    return StateFile(segment_name(batch), f"{path}#{offset}", True, FileHandle(path, size, "", offset, 100))


def sst(path: str, size: int = 100) -> StateFile:
    return StateFile(f"{path}.sst", path, True, FileHandle(path, size, ""))


def state(subtask: Subtask, *files: StateFile) -> SubtaskState:
    start = 64 * subtask[1]
    return SubtaskState(subtask[0], subtask[1], start, start + 64, "rocksdb", True, files)


def grown(known: ChangelogFiles, *files: StateFile, subtask: Subtask = S0) -> None:
    for file in files:
        known.hold(file)
        known.append(subtask, file)


def names(files: Any) -> list[str]:
    return [file.handle.path for file in files]


def full_bytes(entry: Entry) -> int:
    return sum(file.size for file in entry.files)


def asked(known: ChangelogFiles, checkpoint_id: int) -> Any:
    known.barrier(checkpoint_id)
    return known.acknowledge(checkpoint_id)


def fresh(*subtasks: Subtask) -> tuple[ChangelogFiles, list[SubtaskFiles]]:
    known = ChangelogFiles()
    return known, [known.open(subtask, (), ()) for subtask in subtasks]


def test_segment_names_are_in_the_order_of_batches() -> None:
    numbers = [0, 9, 10, 999_999_999, 2_000_000_000]
    assert sorted(map(segment_name, reversed(numbers))) == list(map(segment_name, numbers))
    assert [last_batch(segment(number, "p")) for number in numbers] == numbers


def test_a_checkpoint_names_the_base_and_then_the_segments_in_their_order() -> None:
    known = ChangelogFiles()
    known.open(S0, [sst("b"), sst("a")], [segment(2, "two"), segment(1, "one")])
    grown(known, segment(5, "five"), segment(4, "four"))
    (entry,) = asked(known, 1).entries
    assert names(entry.files) == ["b", "a", "one", "two", "four", "five"]
    assert full_bytes(entry) == 240
    assert (known[S0].base_bytes, known[S0].segment_bytes) == (200, 40)


def test_only_what_no_completed_checkpoint_has_counts_as_new_and_as_durable_beforehand() -> None:
    known, _ = fresh(S0)
    grown(known, segment(1, "one"))
    first = asked(known, 1)
    assert (first.entries[0].new_bytes, first.beforehand) == (10, ("one",))
    grown(known, segment(2, "two"))
    second = asked(known, 2)
    assert (second.entries[0].new_bytes, set(second.beforehand)) == (10, {"one", "two"})
    known.completed(2)
    grown(known, segment(3, "three"))
    third = asked(known, 3)
    assert (third.entries[0].new_bytes, full_bytes(third.entries[0]), third.beforehand) == (10, 30, ("three",))


def test_files_inside_metadata_count_by_their_content() -> None:
    known = ChangelogFiles()
    known.open(S0, [StateFile("MANIFEST", "m", False, None, b"12345")], ())
    named = asked(known, 1)
    assert (full_bytes(named.entries[0]), named.beforehand, known.leftovers()) == (5, (), [])


def test_of_what_was_restored_only_the_checkpoints_own_files_need_not_be_vouched_for() -> None:
    """Segments after the checkpoint are durable, but no completed checkpoint names them."""
    known = ChangelogFiles()
    base, before, after = sst("base"), segment(1, "before"), segment(2, "after")
    known.open(S0, [base], [before, after], restored=[base, before])
    assert asked(known, 1).beforehand == ("after",)


def test_a_file_of_several_subtasks_is_obsolete_with_the_last_of_them() -> None:
    known, logs = fresh(S0, S1)
    for index, subtask in enumerate(BOTH):
        grown(known, segment(1, "group", 10 * index), subtask=subtask)
    assert known.materialized([(logs[0], state(S0, sst("zero")), 1)])
    assert asked(known, 1).obsolete == ()
    assert known.materialized([(logs[1], state(S1, sst("one")), 1)])
    assert names_of(asked(known, 2).obsolete) == ["group"]


def names_of(handles: Any) -> list[str]:
    return [handle.path for handle in handles]


def test_a_void_segment_is_given_up_unless_another_subtask_shares_its_file() -> None:
    known, _ = fresh(S0, S1)
    parts = [segment(1, "group", 10 * index) for index in range(2)]
    for part in parts:
        known.hold(part)
    known.void(parts[0])
    assert asked(known, 1).obsolete == ()
    known.append(S1, parts[1])
    alone = segment(2, "alone")
    known.hold(alone)
    known.void(alone)
    named = asked(known, 2)
    assert names_of(named.obsolete) == ["alone"]
    assert [names(entry.files) for entry in named.entries] == [[], ["group"]]


def test_a_segment_of_a_subtask_that_is_gone_is_given_up() -> None:
    known, _ = fresh(S0, S1)
    known.close(S1)
    assert S1 not in known
    assert known.subtasks() == [S0]
    grown(known, segment(1, "late"), subtask=S1)
    assert names_of(asked(known, 1).obsolete) == ["late"]


def test_a_materialization_replaces_what_came_before_it() -> None:
    known, (log,) = fresh(S0)
    grown(known, *(segment(batch, f"s{batch}") for batch in range(1, 5)))
    assert known.materialized([(log, state(S0, sst("base")), 3)])
    assert names(log.files) == ["base", "s4"]
    assert known.materialized([(log, state(S0, sst("base"), sst("more")), 4)])
    named = asked(known, 1)
    assert names(named.entries[0].files) == ["base", "more"]
    assert set(names_of(named.obsolete)) == {"s1", "s2", "s3", "s4"}


def test_a_segment_that_becomes_durable_after_a_newer_base_is_not_applied_to_it() -> None:
    known, (log,) = fresh(S0)
    assert known.materialized([(log, state(S0, sst("base")), 3)])
    grown(known, segment(3, "older"), segment(4, "newer"))
    named = asked(known, 1)
    assert names(named.entries[0].files) == ["base", "newer"]
    assert names_of(named.obsolete) == ["older"]


def test_an_older_materialization_does_not_replace_a_newer_one() -> None:
    known, (log,) = fresh(S0)
    grown(known, segment(1, "s1"), segment(2, "s2"))
    assert known.materialized([(log, state(S0, sst("newer")), 2)])
    assert not known.materialized([(log, state(S0, sst("older")), 1)])
    assert names(log.files) == ["newer"]


def test_a_materialization_of_a_log_that_was_begun_anew_is_refused_for_the_whole_slot() -> None:
    known, logs = fresh(S0, ("other", 0))
    known.open(S0, None, ())
    states = [(logs[0], state(S0, sst("a")), 1), (logs[1], state(("other", 0), sst("b")), 1)]
    assert not known.materialized(states)
    assert known.without_base() == [S0]
    assert known["other", 0].base == ()
    assert known.leftovers() == []


def test_one_segment_stands_for_those_it_was_merged_from() -> None:
    known, (log,) = fresh(S0)
    parts = [segment(batch, f"s{batch}") for batch in range(1, 5)]
    grown(known, *parts)
    assert known.merged(S0, log, parts[1:3], segment(3, "merged"))
    assert names(log.segments) == ["s1", "merged", "s4"]
    assert not known.merged(S0, log, parts[2:], segment(4, "too late"))
    assert set(names_of(asked(known, 1).obsolete)) == {"s2", "s3", "too late"}


def test_a_late_acknowledgement_is_of_the_barrier() -> None:
    """Batches were committed and a state materialized since: the checkpoint has nothing of it."""
    known, (log,) = fresh(S0)
    grown(known, segment(1, "s1"), segment(3, "s3"))
    known.barrier(1)
    grown(known, segment(2, "s2"), segment(4, "s4"))
    assert known.materialized([(log, state(S0, sst("base")), 4)])
    named = known.acknowledge(1, {S0: [segment(2, "s2")]})
    assert names(named.entries[0].files) == ["s1", "s2", "s3"]
    assert named.obsolete == ()
    assert set(named.beforehand) == {"s1", "s2", "s3"}


def test_a_state_without_a_base_is_named_by_the_materialization_of_the_barrier() -> None:
    known = ChangelogFiles()
    log = known.open(S0, None, ())
    known.barrier(1)
    grown(known, segment(4, "s4"))
    frozen = state(S0, sst("base"))
    assert known.materialized([(log, frozen, 3)])
    assert names(known.acknowledge(1, {S0: frozen.files}).entries[0].files) == ["base"]
    assert names(asked(known, 2).entries[0].files) == ["base", "s4"]


def test_a_checkpoint_that_was_given_up_cannot_be_acknowledged() -> None:
    known, _ = fresh(S0)
    known.barrier(1)
    known.barrier(2)
    known.barrier(3)
    known.aborted(1)
    known.completed(3)
    for gone in (1, 2):
        with pytest.raises(CheckpointError, match="given up"):
            known.acknowledge(gone)


def test_what_a_completed_checkpoint_reported_is_not_reported_again() -> None:
    known, (log,) = fresh(S0)
    grown(known, segment(1, "s1"))
    assert known.materialized([(log, state(S0, sst("a")), 1)])
    assert names_of(asked(known, 1).obsolete) == ["s1"]
    assert names_of(asked(known, 2).obsolete) == ["s1"]
    known.aborted(1)
    known.completed(2)
    assert asked(known, 3).obsolete == ()


def test_word_of_a_completion_may_be_lost_repeated_or_out_of_order() -> None:
    known, (log,) = fresh(S0)
    grown(known, segment(1, "s1"))
    asked(known, 1)
    assert known.materialized([(log, state(S0, sst("a")), 1)])
    asked(known, 2)
    assert known.completed(2) == []  # of 1 nobody heard
    for again in (2, 1, 2):
        assert known.completed(again) == []
    assert names(log.files) == ["a"]
    assert asked(known, 3).beforehand == ()
    assert known.leftovers() == []


def test_a_subtask_that_another_task_manager_acknowledged_is_materialized_anew() -> None:
    known, _ = fresh(S0)
    asked(known, 1)
    taken_over = [sst("base"), segment(1, "s1")]
    known.open(S1, taken_over[:1], taken_over[1:], restored=taken_over)
    assert known.completed(1) == [S1]
    assert known.without_base() == [S1]
    assert known.leftovers() == []  # they are not its own: perhaps the checkpoint names them


def test_a_log_that_was_begun_anew_since_the_barrier_is_materialized_anew() -> None:
    known, _ = fresh(S0)
    asked(known, 1)
    known.open(S0, (), [segment(1, "s1")])
    assert known.completed(1) == [S0]


def test_left_over_is_what_was_uploaded_here_and_no_checkpoint_may_refer_to() -> None:
    known = ChangelogFiles()
    restored = [sst("restored"), segment(1, "restored-log")]
    log = known.open(S0, restored[:1], [*restored[1:], segment(2, "durable")], restored=restored)
    grown(known, segment(3, "confirmed"))
    asked(known, 1)
    known.completed(1)
    grown(known, segment(4, "acknowledged"))
    asked(known, 2)
    grown(known, segment(5, "log"))
    known.hold(segment(6, "held"))
    assert known.materialized([(log, state(S0, sst("base")), 4)])
    assert known.leftovers() == ["base", "held", "log"]
    known.aborted(2)
    assert known.leftovers() == ["acknowledged", "base", "held", "log"]


def test_what_the_checkpoint_before_a_full_one_named_is_not_left_over() -> None:
    known = ChangelogFiles()
    log = known.open(S0, [sst("base")], ())
    grown(known, segment(1, "log"))
    asked(known, 1)
    known.completed(1)
    known.barrier(2, full=True)
    assert known.materialized([(log, state(S0, sst("anew")), 1)])
    assert names(known.acknowledge(2, {S0: [sst("anew")]}).entries[0].files) == ["anew"]
    known.completed(2)
    known.close(S0)
    assert known.leftovers() == []  # the first checkpoint may be retained
    assert sorted(handle.path for handle in asked(known, 3).obsolete) == ["anew", "base", "log"]


# --- any sequence ------------------------------------------------------------------------------------

CHANGED = st.sets(st.sampled_from("abc"))
BATCH = st.tuples(CHANGED, CHANGED, st.sampled_from([*[()] * 8, (S0,), (S1,), BOTH]), st.booleans())
"""What changes in either subtask, whose part is not durable at the commit, and whether there is a second round."""
BATCHES = st.lists(BATCH, min_size=1, max_size=3)
ENDS = st.sampled_from(["completed", "completed", "completed", "unheard", "interrupted", "failed", "later", "later"])
GROUPS = {S0: range(0, 64), S1: range(64, 128)}
SHAPE = JobShape("job", 1, 2, 128, ("op",))
Contents = dict[str, int]


class Changelogs(RuleBasedStateMachine):
    heard: bool

    """A task manager with two subtasks. Files are names here, and every name has the changes that it stands for.

    State is a dict: a batch sets some keys to its number. So a segment that is missing, or out of order, shows.
    """

    @initialize(retained=st.integers(1, 2))
    def begin(self, retained: int) -> None:
        self.numbers = count(1)
        self.coordinator = CheckpointCoordinator(
            interval=1.0, subtasks=BOTH, max_concurrent=2, num_retained=retained, tolerable_failures=1 << 30
        )
        self.stored: set[str] = set()
        self.orphans: set[str] = set()
        """Left behind by a task manager that died."""
        self.contents: dict[str, Contents] = {}
        self.truth: dict[Subtask, Contents] = {subtask: {} for subtask in BOTH}
        self.frozen_truth: dict[int, dict[Subtask, Contents]] = {}
        self.retained: dict[int, CheckpointMetadata] = {}
        self.news = 0
        self.decided = -1
        self.begin_generation()

    # --- files ---------------------------------------------------------------------------------------

    def upload(self, *, batch: int | None, parts: list[Contents]) -> list[StateFile]:
        """One file in storage, with a part for each of `parts`: segments, or else files of a materialization."""
        path = f"file-{next(self.numbers)}"
        self.stored.add(path)
        made = []
        for offset, part in enumerate(parts):
            self.contents[f"{path}#{offset}"] = dict(part)
            name = f"{path}.sst" if batch is None else segment_name(batch)
            made.append(StateFile(name, f"{path}#{offset}", True, FileHandle(path, 1, "", offset, len(parts))))
        return made

    def made_of(self, files: tuple[StateFile, ...]) -> Contents:
        found: Contents = {}
        for file in files:
            assert file.handle is not None
            assert file.handle.path in self.stored
            found.update(self.contents[file.identity])
        return found

    def delete(self, handles: tuple[FileHandle, ...]) -> None:
        self.stored -= {handle.path for handle in handles}

    # --- batches -------------------------------------------------------------------------------------

    @rule(batches=BATCHES)
    def work(self, batches: list[Any]) -> None:
        for batch in batches:
            self.batch(*batch)

    def batch(self, first: set[str], second: set[str], behind: tuple[Subtask, ...], again: bool) -> None:
        """One file for all subtasks; some parts are not durable when the batch is decided."""
        batch = self.next_batch
        self.next_batch += 1
        content = {S0: dict.fromkeys(first, batch), S1: dict.fromkeys(second, batch)}
        changed = [subtask for subtask in BOTH if content[subtask] and subtask not in behind]
        if again and changed:
            for file in self.upload(batch=batch, parts=[content[subtask] for subtask in changed]):
                self.known.hold(file)
                self.known.void(file)
        files: dict[Subtask, StateFile] = {}
        if changed:
            made = self.upload(batch=batch, parts=[content[subtask] for subtask in changed])
            files.update(zip(changed, made, strict=True))
        for file in files.values():
            self.known.hold(file)
        for subtask in BOTH:
            durable = subtask not in behind or not content[subtask]
            self.durable.prepared(batch, subtask[1], {"op": SegmentUpload(durable, files.get(subtask))})
            if not durable:
                self.behind[subtask, batch] = content[subtask]
        self.durable.decided(batch, has_changelog=True)
        self.decided = batch
        for subtask, file in files.items():
            self.known.append(subtask, file)
        for subtask in BOTH:
            self.truth[subtask] = {**self.truth[subtask], **content[subtask]}

    @precondition(lambda self: self.behind)
    @rule(data=st.data())
    def behind_becomes_durable(self, data: st.DataObject) -> None:
        self.make_durable(data.draw(st.sampled_from(sorted(self.behind))))

    def make_durable(self, which: tuple[Subtask, int]) -> None:
        subtask, batch = which
        (file,) = self.upload(batch=batch, parts=[self.behind.pop(which)])
        self.known.hold(file)
        self.known.append(subtask, file)
        self.late[which] = file

    # --- materializations ----------------------------------------------------------------------------

    @rule(subtask=st.sampled_from(BOTH), before=BATCHES, during=BATCHES, reuse=st.booleans(), later=st.booleans())
    def materialize(self, subtask: Subtask, before: list[Any], during: list[Any], reuse: bool, later: bool) -> None:
        self.work(before)
        self.frozen.append((subtask, self.known[subtask], self.decided, self.truth[subtask]))
        self.work(during)
        if not later:
            self.materialize_one(*self.frozen.pop(), reuse)

    @precondition(lambda self: self.frozen)
    @rule(data=st.data(), reuse=st.booleans())
    def materialize_later(self, data: st.DataObject, reuse: bool) -> None:
        at = data.draw(st.integers(0, len(self.frozen) - 1))
        self.materialize_one(*self.frozen.pop(at), reuse)

    def materialize_one(
        self, subtask: Subtask, log: SubtaskFiles, batch: int, content: Contents, reuse: bool = False
    ) -> SubtaskState | None:
        """Part of it may be a file that the last materialization had, too."""
        files = self.upload(batch=None, parts=[content])
        if reuse and log.base and self.known[subtask] is log:
            files.insert(0, log.base[0])
        made = state(subtask, *files)
        if self.known.materialized([(log, made, batch)]):
            return made
        self.stored -= {file.handle.path for file in files[-1:] if file.handle}
        return None

    @rule(subtask=st.sampled_from(BOTH), before=BATCHES, start=st.integers(0, 3), length=st.integers(2, 4))
    def merge(self, subtask: Subtask, before: list[Any], start: int, length: int) -> None:
        self.work(before)
        log = self.known[subtask]
        run = log.segments[start : start + length]
        if len(run) == length and not any(known == subtask for known, _batch in self.behind):
            whole: Contents = {}
            for file in run:
                whole.update(self.contents[file.identity])
            (merged,) = self.upload(batch=last_batch(run[-1]), parts=[whole])
            assert self.known.merged(subtask, log, run, merged)

    # --- checkpoints ---------------------------------------------------------------------------------

    @precondition(lambda self: self.coordinator.should_trigger(0.0, 1, forced=True))
    @rule(before=BATCHES, during=BATCHES, end=ENDS, full=st.booleans())
    def checkpoint(self, before: list[Any], during: list[Any], end: str, full: bool) -> None:
        self.work(before)
        number = self.barrier(full)
        self.work(during)
        if end == "later":
            return
        self.acknowledge_one(number)
        if end == "failed":
            self.fail_one(number, heard=True)
        elif number in self.coordinator.ready():
            self.complete_one(number, heard=end != "unheard", host_dies=end == "interrupted")

    def barrier(self, full: bool = False) -> int:
        number = self.coordinator.trigger(0.0, 0.0, self.decided).id
        self.frozen_truth[number] = dict(self.truth)
        self.known.barrier(number, full)
        missing = [
            (subtask, self.known[subtask], self.decided, self.truth[subtask])
            for subtask in (self.known.subtasks() if full else self.known.without_base())
        ]
        behind = [(subtask, at) for subtask, at in self.behind if at > self.known[subtask].base_batch]
        self.barriers[number] = (behind, missing)
        return number

    @precondition(lambda self: self.barriers)
    @rule(data=st.data(), during=BATCHES)
    def acknowledge_later(self, data: st.DataObject, during: list[Any]) -> None:
        self.work(during)
        self.acknowledge_one(data.draw(st.sampled_from(sorted(self.barriers))))

    def acknowledge_one(self, number: int) -> None:
        behind, missing = self.barriers.pop(number)
        late: dict[Subtask, list[StateFile]] = {}
        for subtask, log, batch, content in missing:
            made = self.materialize_one(subtask, log, batch, content)
            if made is None:
                self.fail_one(number, heard=True)
                return
            late[subtask] = list(made.files)
        for which in behind:
            if which in self.behind:
                self.make_durable(which)
            if which[0] not in {subtask for subtask, *_ in missing}:
                late.setdefault(which[0], []).append(self.late[which])
        try:
            named = self.known.acknowledge(number, late)
        except CheckpointError:
            assert number not in {pending.id for pending in self.coordinator.pending()}
            return
        for at, entry in enumerate(named.entries):
            if self.heard:
                assert self.made_of(entry.files) == self.frozen_truth[number][entry.subtask]
            ack = SubtaskAck(
                state=state(entry.subtask, *entry.files),
                uploaded=(),
                barrier_time=0.0,
                ack_time=0.0,
                sync_ms=0.0,
                async_ms=0.0,
                checkpointed_bytes=entry.new_bytes,
                full_bytes=full_bytes(entry),
                beforehand=named.beforehand if at == 0 else (),
                obsolete=named.obsolete if at == 0 else (),
            )
            self.coordinator.acknowledge(number, *entry.subtask, ack)

    @precondition(lambda self: self.coordinator.ready())
    @rule(data=st.data(), heard=st.booleans(), host_dies=st.booleans())
    def complete_later(self, data: st.DataObject, heard: bool, host_dies: bool) -> None:
        """Not always the oldest; the task manager may be replaced in the middle of it, or not hear of it."""
        self.complete_one(data.draw(st.sampled_from(self.coordinator.ready())), heard, host_dies)

    def complete_one(self, number: int, heard: bool = True, host_dies: bool = False) -> None:
        try:
            plan = self.coordinator.prepare_completion(number, 0.0, shape=SHAPE, source=SourcePosition(0, {}))
        except CheckpointError:
            assert not self.heard  # else it would not name what is gone
            self.fail_one(number, heard=True)
            self.tell()
            return
        if host_dies and self.durable.complete:
            self.replace()
        decision = self.coordinator.confirm_completion(number, 0.0)
        self.retained[number] = plan.metadata
        for gone in decision.dropped:
            del self.retained[gone]
        self.durable.truncate(plan.metadata.batch_id)
        self.news = number
        self.heard = False
        for gone in decision.aborted:
            self.barriers.pop(gone, None)
        if heard:
            self.tell()
        self.delete(decision.delete)

    @precondition(lambda self: self.news)
    @rule()
    def tell(self) -> None:
        """Word of the last completion, for the first time or again."""
        self.known.completed(self.news)
        self.heard = True

    @precondition(lambda self: self.coordinator.pending())
    @rule(data=st.data(), heard=st.booleans())
    def fail(self, data: st.DataObject, heard: bool) -> None:
        self.fail_one(data.draw(st.sampled_from([one.id for one in self.coordinator.pending()])), heard)

    def fail_one(self, number: int, heard: bool) -> None:
        self.delete(self.coordinator.fail(number, "declined", 0.0).delete)
        self.barriers.pop(number, None)
        if heard:
            self.known.aborted(number)

    # --- losses --------------------------------------------------------------------------------------

    def opened(self, subtask: Subtask, with_log: bool) -> None:
        newest = self.retained[max(self.retained)] if self.retained else None
        files = next((one.files for one in newest.subtasks if one.subtask == subtask[1]), ()) if newest else ()
        base = [file for file in files if not file.is_segment] if with_log else None
        segments = [*(file for file in files if file.is_segment), *(file for _uid, file in self.durable.of(subtask[1]))]
        self.known.open(subtask, base, segments if with_log else (), restored=files)

    def forget(self) -> None:
        self.known = ChangelogFiles()
        self.behind: dict[tuple[Subtask, int], Contents] = {}
        self.late: dict[tuple[Subtask, int], StateFile] = {}
        self.frozen: list[tuple[Subtask, SubtaskFiles, int, Contents]] = []
        self.barriers: dict[int, tuple[list[Any], list[Any]]] = {}
        self.heard = not self.news

    def replace(self) -> None:
        """A new task manager, from what the driver knows: the log, or else only what local files still hold."""
        self.orphans |= self.stored
        self.forget()
        for subtask in BOTH:
            self.opened(subtask, with_log=self.durable.complete)

    @rule(before=BATCHES)
    def host_dies(self, before: list[Any]) -> None:
        self.work(before)
        self.delete(self.coordinator.fail_all("lost", 0.0).delete)
        self.replace()

    @rule(before=BATCHES)
    def restart(self, before: list[Any]) -> None:
        """The run goes back to its last checkpoint, on the same task manager."""
        self.work(before)
        self.delete(self.coordinator.fail_all("restart", 0.0).delete)
        for subtask in BOTH:
            self.known.close(subtask)
        self.stored -= set(self.known.leftovers())
        self.orphans |= self.stored
        newest = max(self.retained, default=None)
        self.decided = self.retained[newest].batch_id if newest is not None else -1
        self.truth = dict(self.frozen_truth[newest]) if newest is not None else {subtask: {} for subtask in BOTH}
        self.begin_generation()

    def begin_generation(self) -> None:
        self.next_batch = getattr(self, "next_batch", 0) + 100
        self.durable = DurableSegments(self.decided)
        self.forget()
        for subtask in BOTH:
            self.opened(subtask, with_log=True)

    # --- what must hold ------------------------------------------------------------------------------

    @invariant()
    def retained_checkpoints_are_whole(self) -> None:
        for number, metadata in getattr(self, "retained", {}).items():
            for one in metadata.subtasks:
                assert self.made_of(one.files) == self.frozen_truth[number][one.operator, one.subtask]

    @invariant()
    def the_log_is_the_state(self) -> None:
        """Unless word of a completion is missing, for then files may be gone; it says so when it is told."""
        for subtask in BOTH if getattr(self, "heard", False) else ():
            log = self.known[subtask]
            if log.base is not None and not any(known == subtask for known, _batch in self.behind):
                assert self.made_of(log.files) == self.truth[subtask]

    @invariant()
    def a_lost_host_can_be_replaced(self) -> None:
        if hasattr(self, "durable") and self.durable.complete:
            newest = self.retained[max(self.retained)] if self.retained else None
            for operator, index in BOTH:
                base = next((one.files for one in newest.subtasks if one.subtask == index), ()) if newest else ()
                log = [file for _uid, file in self.durable.of(index)]
                assert self.made_of((*base, *log)) == self.truth[operator, index]

    @invariant()
    def what_is_left_over_is_nobodys(self) -> None:
        if hasattr(self, "known"):
            assert not set(self.known.leftovers()) & self.named()

    def named(self) -> set[str]:
        return {h.path for metadata in self.retained.values() for _key, h in keyed_files(metadata.subtasks)}

    def teardown(self) -> None:
        """Two completed checkpoints later only what is needed is there, and what a dead task manager left."""
        if not hasattr(self, "coordinator") or self.decided < 0:
            return
        self.delete(self.coordinator.fail_all("the end", 0.0).delete)
        self.barriers.clear()
        if self.news:
            self.tell()
        for _ in range(2):
            number = self.barrier()
            self.acknowledge_one(number)
            self.complete_one(number)
        in_logs = {path for subtask in BOTH for path in names(self.known[subtask].files)}
        assert self.stored - self.named() - in_logs <= self.orphans
        for subtask in BOTH:
            self.known.close(subtask)
        self.stored -= set(self.known.leftovers())
        assert self.stored - self.named() <= self.orphans
        self.retained_checkpoints_are_whole()


TestChangelogs = Changelogs.TestCase
TestChangelogs.settings = settings(max_examples=examples(100), stateful_step_count=25, deadline=None)

CHANGE: Any = ({"a"}, {"a"}, (), False)
BEHIND: Any = ({"a"}, {"a"}, BOTH, False)


def begun(retained: int) -> Changelogs:
    machine = Changelogs()
    machine.begin(retained)
    return machine


def checked(machine: Changelogs) -> None:
    machine.retained_checkpoints_are_whole()
    machine.the_log_is_the_state()
    machine.a_lost_host_can_be_replaced()
    machine.what_is_left_over_is_nobodys()
    machine.teardown()


def test_what_a_late_checkpoint_reports_is_not_what_a_newer_one_names() -> None:
    machine = begun(retained=1)
    machine.work([CHANGE, BEHIND])
    first = machine.barrier()
    machine.work([CHANGE])
    second = machine.barrier()
    machine.acknowledge_one(second)
    for subtask in BOTH:
        machine.materialize_one(subtask, machine.known[subtask], machine.decided, machine.truth[subtask])
    machine.acknowledge_one(first)
    machine.complete_one(first)
    machine.complete_one(second)
    checked(machine)


def test_files_that_went_with_a_checkpoint_that_nobody_heard_of_are_not_named_again() -> None:
    """The task manager is replaced while a checkpoint completes, and starts from segments that it does not name."""
    machine = begun(retained=2)
    machine.work([CHANGE, CHANGE])
    for subtask in BOTH:
        machine.materialize_one(subtask, machine.known[subtask], machine.decided, machine.truth[subtask])
    first = machine.barrier()
    machine.acknowledge_one(first)
    machine.complete_one(first, heard=False, host_dies=True)
    second = machine.barrier()
    machine.acknowledge_one(second)
    machine.complete_one(second)
    assert list(machine.retained) == [first]
    assert machine.known.without_base() == list(BOTH)
    checked(machine)


def test_what_a_checkpoint_named_that_completed_unheard_is_not_left_over() -> None:
    machine = begun(retained=2)
    machine.work([BEHIND])
    machine.host_dies([CHANGE])  # without a base: both checkpoints wait for a materialization
    first, second = machine.barrier(), machine.barrier()
    machine.acknowledge_one(first)
    machine.acknowledge_one(second)
    machine.complete_one(first, heard=False)
    machine.complete_one(second)
    checked(machine)


def test_what_is_decided_but_not_durable_makes_a_gap_until_a_checkpoint_covers_it() -> None:
    durable = DurableSegments(4)

    def complete() -> bool:
        return durable.complete

    assert complete()
    durable.prepared(5, 0, {"op": SegmentUpload(True, segment(5, "s5")), "empty": SegmentUpload(True, None)})
    durable.decided(5, has_changelog=True)
    durable.prepared(6, 0, {"op": SegmentUpload(False, None)})
    durable.decided(6, has_changelog=True)
    assert not complete()
    durable.prepared(7, 0, {"op": SegmentUpload(True, segment(7, "s7"))})
    durable.decided(7, has_changelog=True)
    durable.truncate(5)
    assert not complete()
    durable.truncate(6)
    assert complete()
    assert durable.of(0) == [("op", segment(7, "s7"))]
    assert durable.of(1) == []


def test_only_the_last_round_of_a_batch_counts() -> None:
    durable = DurableSegments()
    durable.prepared(1, 0, {"op": SegmentUpload(True, segment(1, "void"))})
    durable.prepared(1, 0, {"op": SegmentUpload(True, segment(1, "kept"))})
    durable.prepared(1, 1, {})
    durable.decided(1, has_changelog=True)
    durable.decided(1, has_changelog=True)  # the commit is said again after a slot was lost
    assert durable.of(0) == [("op", segment(1, "kept"))]
    durable.prepared(2, 0, {"op": SegmentUpload(True, segment(2, "never decided"))})
    durable.decided(3, has_changelog=True)
    assert durable.of(0) == [("op", segment(1, "kept"))]


def test_without_a_changelog_nothing_is_complete() -> None:
    durable = DurableSegments()
    durable.decided(1, has_changelog=False)
    assert not durable.complete
