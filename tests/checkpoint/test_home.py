"""Crafted names and paths: none of them leads out of the place that the checkpoint was read from."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strandline.checkpoint.home import Home, Refused
from strandline.checkpoint.metadata import (
    CheckpointMetadata,
    FileHandle,
    SinkFile,
    SourcePosition,
    StateFile,
    SubtaskState,
    decode,
    encode,
)
from strandline.errors import CheckpointNotFoundError, IncompatibleCheckpointError, MetadataError
from tests.factories import checkpoint_metadata

HOME = Home("visits", 7, ("s3://bucket/log", "/mnt/log"))

BAD_COMPONENTS = [
    "",
    ".",
    "..",
    "../x",
    "a/../b",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\nb",
    "a\0b",
    ".hidden",
    ".tmp-1",
    "x" * 300,
]
"""No file of a checkpoint has such a name."""

hostile = st.one_of(
    st.sampled_from(BAD_COMPONENTS),
    st.lists(st.sampled_from(["..", ".", "", "a", "visits", "shared", "chk-7", "s3:", "~"]), max_size=6).map("/".join),
    st.text(max_size=20),
)


def with_file(name: str = "CURRENT", handle: FileHandle | None = None) -> CheckpointMetadata:
    state = SubtaskState("count", 0, 0, 128, "rocksdb", True, (StateFile(name, "i", True, handle),))
    return checkpoint_metadata(7, subtasks=(state,))


def with_path(path: str) -> CheckpointMetadata:
    return with_file(handle=FileHandle(path, 1, "crc32:0"))


@pytest.mark.parametrize(
    "name",
    [*BAD_COMPONENTS, "_metadata", "7.segment", "../00000000000000000007.segment", "-0000000000000000001.segment"],
)
def test_a_state_file_has_a_single_plain_name(name: str) -> None:
    with pytest.raises(Refused, match="name of a state file"):
        HOME.check(with_file(name))


@pytest.mark.parametrize("name", ["000015.sst", "MANIFEST-000004", "state.full", "00000000001000000007.segment"])
def test_the_names_that_backends_use_are_accepted(name: str) -> None:
    HOME.check(with_file(name))


@pytest.mark.parametrize(
    "path",
    [
        "visits/shared/ab12",
        "visits/chk-6/ab12-MANIFEST",
        "visits/epochs/3/00000000000000000042",
        "s3://bucket/log//visits/shared/ab12-log",
        "/mnt/log//visits/shared/ab12-log",
    ],
)
def test_files_lie_in_the_folder_of_the_job_or_in_the_storages_that_the_job_names(path: str) -> None:
    HOME.check(with_path(path))


@pytest.mark.parametrize(
    "path",
    [
        "visits/log/00000000000000000001.json",
        "visits/chk-7/_metadata",
        "visits/chk-07/x",
        "visits/ab12",
        "visits/shared/a/b",
        "visits/epochs/a",
        "visits/epochs/03/a",
        "visits/epochs/../a",
        "visits/shared/../../x",
        "other/shared/ab12",
        "/etc/passwd",
        "//etc/passwd",
        "/home//visits/shared/ab12",
        "/mnt/log/visits/shared/ab12",
        "/mnt/log//other/shared/ab12",
        "/mnt/log//visits/../../x",
        "/mnt/log//visits/shared/ab12//visits/shared/x",
        "s3://bucket//visits/shared/ab12",
        "ab12",
        "visits/shared/ab12\nvisits/shared/ab13",
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(Refused, match=r"leads elsewhere.*changelog_dir"):
        HOME.check(with_path(path))


@pytest.mark.parametrize("path", ["visits/shared/ab12", "../x", "/mnt/log//ab12", "_metadata", ".."])
def test_a_savepoint_names_only_files_beside_its_metadata(path: str) -> None:
    Home(None).check(with_path("ab12-0-CURRENT"))
    with pytest.raises(Refused, match="beside its _metadata"):
        Home(None).check(with_path(path))


def test_who_opens_no_file_may_read_paths_of_any_storage() -> None:
    anywhere = Home("visits", 7, others=None)
    anywhere.check(with_path("/elsewhere//visits/shared/ab12"))
    with pytest.raises(Refused):
        anywhere.check(with_path("/elsewhere//visits/shared/../ab12"))


@given(hostile)
def test_whatever_the_text_a_name_stays_in_its_folder(text: str) -> None:
    """An independent rule: a name that is accepted has neither a separator nor a meaning of its own."""
    try:
        HOME.check(with_file(text))
    except Refused:
        return
    assert re.fullmatch(r"[A-Za-z0-9._+-]+", text)
    assert not text.startswith(".")


@given(hostile)
def test_whatever_the_text_a_path_stays_in_the_folder_of_the_job(text: str) -> None:
    try:
        HOME.check(with_path(text))
    except Refused:
        return
    root, _, inside = text.rpartition("//")
    assert root in ("", "s3://bucket/log", "/mnt/log")
    assert inside.startswith(("visits/shared/", "visits/chk-"))
    assert not {"", ".", ".."} & set(inside.split("/"))


@given(st.dictionaries(hostile | hostile.map("sources/0/{}".format), st.binary(max_size=1), max_size=4))
def test_whatever_the_names_the_files_of_a_source_stay_in_its_folder(files: dict[str, bytes]) -> None:
    try:
        HOME.check(checkpoint_metadata(7, source=SourcePosition(7, files)))
    except Refused:
        return
    for name in files:
        parts = name.split("/")
        assert parts[0] in ("metadata", "offsets", "commits", "sources")
        assert not {"", ".", ".."} & set(parts)


@pytest.mark.parametrize(
    "names",
    [["../x"], ["/etc/x"], ["offsets/../../x"], ["offsets/x"], ["sources/0/../../x"], ["sources/0/a", "sources/0/a/b"]],
)
def test_a_source_position_with_a_file_elsewhere_is_refused(names: list[str]) -> None:
    with pytest.raises(Refused, match="position"):
        HOME.check(checkpoint_metadata(7, source=SourcePosition(7, dict.fromkeys(names, b""))))


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a//b", "a/\x1b[2J"])
def test_a_sink_file_elsewhere_is_refused(path: str) -> None:
    for file in (SinkFile("out", path, "part-0.parquet", 1, 1), SinkFile("out", "_strandline/x", path, 1, 1)):
        with pytest.raises(Refused, match="folder of a sink"):
            HOME.check(checkpoint_metadata(7, sink_files=(file,)))


def test_two_files_of_a_subtask_with_one_name_are_refused() -> None:
    file = StateFile("CURRENT", "i", False, inline=b"x")
    state = SubtaskState("count", 0, 0, 128, "rocksdb", True, (file, file))
    with pytest.raises(Refused, match="the same name"):
        HOME.check(checkpoint_metadata(7, subtasks=(state,)))


def test_a_part_ends_before_the_end_of_its_file() -> None:
    with pytest.raises(Refused, match="behind the end"):
        HOME.check(with_file(handle=FileHandle("visits/shared/ab12", 100, "crc32:0", 50, 149)))


def test_key_groups_beyond_those_of_the_job_are_refused() -> None:
    for start, end in ((0, 129), (5, 4)):
        state = SubtaskState("count", 0, start, end, "rocksdb", True, ())
        with pytest.raises(Refused, match="key groups"):
            HOME.check(checkpoint_metadata(7, subtasks=(state,)))


def test_decoding_refuses_what_leads_elsewhere() -> None:
    with pytest.raises(MetadataError, match=r"chk-7/_metadata is refused: '/etc/passwd' is a path"):
        decode(encode(with_path("/etc/passwd")), "chk-7/_metadata", HOME)


def test_metadata_is_read_only_where_it_belongs() -> None:
    mine = checkpoint_metadata(7)
    for home in (Home("visits", 8), Home("other", 7)):
        with pytest.raises(IncompatibleCheckpointError, match="is checkpoint 7 of job 'visits'"):
            decode(encode(mine), "here", home)
    with pytest.raises(CheckpointNotFoundError, match="not of a savepoint"):
        decode(encode(mine), "here", Home(None))
    with pytest.raises(IncompatibleCheckpointError, match="is savepoint 7"):
        decode(encode(msgspec.structs.replace(mine, kind="savepoint")), "here", HOME)
