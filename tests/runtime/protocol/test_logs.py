"""Log files on a host: names, bounds, and their ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from strandline.errors import StrandlineError
from strandline.runtime.protocol import logs
from strandline.runtime.protocol.logs import ReadLog, bound_file, log_file, log_names, open_log, read_end


def write(folder: Path, process: str, text: str) -> Path:
    path = log_file(folder, process)
    descriptor = open_log(path)
    os.write(descriptor, text.encode())
    os.close(descriptor)
    return path


@pytest.mark.parametrize(
    "name", ["", "driver", "../slot-0", "slot-0/../../x", "slot-", "slot-0.log", "slot-0\n", "/etc/passwd", "slot-٣"]
)
def test_a_name_that_no_process_has_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StrandlineError, match="there is no process"):
        read_end(tmp_path, ReadLog(name, 100))


def test_a_log_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    write(tmp_path, "slot-1", "x\n")
    with pytest.raises(StrandlineError, match="no log of slot-0; there are those of: slot-1"):
        read_end(tmp_path, ReadLog("slot-0", 100))


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    write(tmp_path, "slot-0", "first\nsecond\nthird\n")
    whole = read_end(tmp_path, ReadLog("slot-0", 1000))
    assert (whole.text, whole.cut) == ("first\nsecond\nthird\n", False)
    end = read_end(tmp_path, ReadLog("slot-0", 9))
    assert (end.text, end.cut) == ("third\n", True)


def test_what_a_terminal_would_obey_is_shown_instead(tmp_path: Path) -> None:
    write(tmp_path, "slot-0", "\x1b[2Jgone\n")
    assert read_end(tmp_path, ReadLog("slot-0", 1000)).text == "\\x1b[2Jgone\n"


def test_a_log_that_grows_too_large_is_moved_aside_and_its_writer_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MOST_FILE_BYTES", 100)
    path = log_file(tmp_path, "slot-0")
    descriptor = open_log(path)
    try:
        for number in range(100):
            os.write(descriptor, f"line {number}\n".encode())
            bound_file(path)
        assert sum(one.stat().st_size for one in tmp_path.iterdir()) <= 220
        os.write(descriptor, b"last\n")
    finally:
        os.close(descriptor)
    end = read_end(tmp_path, ReadLog("slot-0", 60))
    assert end.text.endswith("line 98\nline 99\nlast\n")
    assert log_names(tmp_path) == ["slot-0"]


def test_only_the_user_can_read_a_log(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = write(tmp_path, "task-manager-host-1-2", "x\n")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
