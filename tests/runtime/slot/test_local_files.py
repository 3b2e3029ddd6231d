"""Which local files can bring a lost slot back to its last committed batch."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from strandline.runtime.slot.local_files import OperatorFolder
from strandline.state.backends.base import SnapshotFile
from tests.examples import examples


def mark(folder: OperatorFolder, checkpoint_id: int, batch: int) -> None:
    folder.mark(checkpoint_id, batch, [SnapshotFile("f", Path("f"), 1, f"id-{checkpoint_id}", True)])


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_every_base_has_a_gapless_chain_and_every_usable_base_is_found(data: st.DataObject) -> None:
    """A history of batches of which some segments and snapshots are gone; whatever is left, only true chains count."""
    steps = data.draw(st.lists(st.integers(1, 3), max_size=8), label="steps")
    batches = [data.draw(st.sampled_from([-1, 0, 4_000_000_010]), label="restored")]
    for step in steps:
        batches.append(batches[-1] + step)
    restored, decided = batches[0], batches[-1]
    held = {
        batch for batch in batches[1:] if data.draw(st.booleans() | st.just(True), label=f"segment of batch {batch}")
    }
    marked = {number: batch for number, batch in enumerate(batches) if data.draw(st.booleans(), label=f"snap {batch}")}
    with tempfile.TemporaryDirectory() as root:
        folder = OperatorFolder(Path(root) / "op")
        previous = dict(zip(batches[1:], batches, strict=False))
        for batch in held:
            folder.segment(previous[batch], batch).touch()
        for number, batch in marked.items():
            mark(folder, number, batch)
        if data.draw(st.booleans(), label="a prepared batch that was never decided"):
            folder.segment(decided, decided + 1).touch()
        bases = folder.rebuild_starts(restored, decided)

    def chain(base: int) -> tuple[str, ...] | None:
        missing = [batch for batch in batches if batch > base and batch not in held]
        return None if missing else tuple(f"seg-{previous[b]}-{b}.segment" for b in batches if b > base)

    found = [
        (base.batch, base.snapshot and base.snapshot.checkpoint_id, tuple(path.name for path in base.segments))
        for base in bases
    ]
    expected: list[tuple[int, int | None, tuple[str, ...] | None]]
    expected = [(batch, number, chain(batch)) for number, batch in marked.items() if chain(batch) is not None]
    if chain(restored) is not None:
        expected.append((restored, None, chain(restored)))
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert [base.batch for base in bases] == sorted((base.batch for base in bases), reverse=True)
    for one, other in pairwise(bases):
        assert one.batch > other.batch or one.snapshot is not None  # at the same batch, local files before a download


def test_a_half_written_marker_is_no_snapshot(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    mark(folder, 1, 5)
    mark(folder, 2, 5)
    (tmp_path / "snap-2.json").write_bytes(b'{"checkpoint_id": 2, "ba')
    (tmp_path / "snap-3.tmp").write_bytes(b"")
    assert [base.snapshot and base.snapshot.checkpoint_id for base in folder.rebuild_starts(-1, 5)] == [1]
    assert folder.snapshots() == [1, 2, 3]


def test_a_marker_with_one_changed_byte_is_no_snapshot_or_says_the_same(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    mark(folder, 1, 1_000_000_004)
    before = folder.rebuild_starts(-1, 1_000_000_004)
    path = tmp_path / "snap-1.json"
    content = path.read_bytes()
    for at in range(len(content)):
        for change in (0x01, 0x20, 0x80):
            path.write_bytes(content[:at] + bytes([content[at] ^ change]) + content[at + 1 :])
            assert folder.rebuild_starts(-1, 1_000_000_004) in ([], before)
            assert folder.rebuild_starts(-1, 1_000_000_005) == []


def test_a_marker_says_what_the_snapshot_holds(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    mark(folder, 7, 12)
    (base,) = folder.rebuild_starts(-1, 12)
    assert base.snapshot is not None
    assert msgspec.to_builtins(base.snapshot) == {"checkpoint_id": 7, "batch": 12, "files": [("f", "id-7", 1, True)]}


def test_dropping_segments_leaves_those_after_the_snapshot(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    for previous, batch in ((-1, 0), (0, 1), (1, 2)):
        folder.segment(previous, batch).touch()
    folder.drop_segments(1)
    assert [path.name for path in tmp_path.iterdir()] == ["seg-1-2.segment"]


def test_a_new_incarnation_clears_what_the_old_one_had_open_and_nothing_else(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    for kept in (folder.database(2), folder.download(2), folder.snapshot(1)):
        kept.mkdir()
    for old in (folder.database(1), folder.download(1), folder.spill()):
        old.mkdir()
    folder.segment(-1, 0).touch()
    mark(folder, 1, 0)
    folder.clear_databases(2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "db-2",
        "restore-2",
        "snap-1",
        "snap-1.json",
        "seg--1-0.segment",
    }


def test_dropping_a_snapshot_leaves_nothing_of_it(tmp_path: Path) -> None:
    folder = OperatorFolder(tmp_path)
    folder.snapshot(4).mkdir()
    (folder.snapshot(4) / "f").touch()
    mark(folder, 4, 0)
    folder.drop_snapshot(4)
    folder.drop_snapshot(4)
    assert not any(tmp_path.iterdir())


def test_a_snapshot_that_a_kill_left_half_made_is_dropped_whole(tmp_path: Path) -> None:
    """RocksDB makes its folder under a temporary name."""
    folder = OperatorFolder(tmp_path)
    half = folder.snapshot(3).with_suffix(".tmp")
    half.mkdir()
    (half / "000001.sst").write_bytes(b"x")
    assert folder.snapshots() == [3]
    folder.drop_snapshot(3)
    assert list(tmp_path.iterdir()) == []
