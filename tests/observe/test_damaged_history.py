"""A history that is damaged, crafted, or of a later release: the rest is read, and words say what is wrong."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.errors import HistoryError
from strandline.observe import history, history_reader, history_record
from strandline.observe.facts import Sample
from strandline.observe.history import RunHistory
from strandline.observe.history_format import decode_head, decode_part, encode_part
from strandline.observe.history_jobs import HistoryJobs
from strandline.observe.history_reader import read_history
from strandline.observe.history_record import Events
from strandline.storage.local import LocalStorage
from tests.observe.happenings import (
    JOB,
    START,
    first_facts,
    many,
)

# --- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStorage, list[Path]]:
    """A whole part with checkpoints 1 to 3, and three parts with one more each."""
    monkeypatch.setattr(history, "PARTS_PER_WHOLE", 3)
    monkeypatch.setattr(history, "PART_SECONDS", 0.0)
    storage = LocalStorage(str(tmp_path))
    facts = first_facts()
    run = RunHistory(storage, facts)
    for _ in range(5):
        facts = many("c", facts)
        run.offer(facts)
        run.write()
    return storage, sorted(tmp_path.rglob("*.whole")) + sorted(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -float("inf")])
def test_a_figure_that_is_no_finite_number_is_damage(figure: float) -> None:
    facts = many("cccS")
    one, odd = facts.checkpoints.history[0], Sample(1, rows_per_second=figure)
    for head, events in (
        (facts, Events(checkpoints=(replace(one, subtasks=(replace(one.subtasks[0], sync_ms=figure),)),))),
        (facts, Events(samples=(odd,))),
        (facts, Events(rescalings=(replace(facts.rescalings[0], time=figure),))),
        (msgspec.structs.replace(facts, samples=(odd,)), Events()),
    ):
        with pytest.raises(HistoryError, match="no finite number"):
            decode_head(decode_part(encode_part(0, True, head, events), "here"), "here")
    large = Events(samples=(Sample(1, rows_per_second=1e308),))
    assert decode_part(encode_part(0, True, facts, large), "here").events == large


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
    assert [finding.rule for finding in facts.health] == ["driver-lost"] + ["history-unreadable"] * 4


@given(data=st.binary(max_size=200), cut=st.integers(0, 300))
def test_any_bytes_are_read_or_refused_with_words(data: bytes, cut: int) -> None:
    good = encode_part(0, False, first_facts(), history_record.Events())
    for crafted in (data, good[: cut % len(good)], good[: cut % len(good)] + data):
        with pytest.raises(HistoryError, match=r"^here: "):
            decode_part(crafted, "here")


def test_a_part_that_announces_too_much_is_not_unpacked() -> None:
    packed = b"x"
    size = 1 << 40
    checksum = zlib.crc32(packed, zlib.crc32(struct.pack("<QQ", 1, size)))
    with pytest.raises(HistoryError, match="it announces"):
        decode_part(b"SLHY" + struct.pack("<HQQI", 1, 1, size, checksum) + packed, "here")


@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("MAX_READ_BYTES", "there is room for"),
        ("MAX_FILES_BYTES", "the files of this run are too large"),
        ("MAX_FILE_BYTES", "too many for a part of the history"),
    ],
)
def test_files_that_would_take_too_much_memory_are_not_read(
    parts: tuple[LocalStorage, list[Path]], monkeypatch: pytest.MonkeyPatch, limit: str, words: str
) -> None:
    monkeypatch.setattr(history_reader, limit, 5)
    found = read_history(parts[0], JOB)
    assert found is not None
    assert found.facts.checkpoints.history == ()
    assert [words in note for note in found.notes if "entry" not in note] == [True] * 3
