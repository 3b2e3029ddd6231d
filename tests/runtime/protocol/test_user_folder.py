"""The folder of one user: nobody else can enter it, and a folder that somebody else prepared is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from strandline.errors import StorageRefusedError, UnsafeFolderError
from strandline.runtime.protocol.user_folder import make_private, user_folder

NOBODY = 65534


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A place like /tmp: everybody may make folders there."""
    place = tmp_path / "shared"
    place.mkdir()
    place.chmod(0o1777)
    return place


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def test_others_cannot_enter_the_folder_of_a_user(shared: Path) -> None:
    before = os.umask(0)
    try:
        made = make_private(user_folder(shared) / "visits" / "run")
    finally:
        os.umask(before)
    assert made.is_dir()
    assert mode_of(user_folder(shared)) == 0o700
    assert make_private(made) == made


def test_a_job_may_be_named_like_the_folder_of_a_user(shared: Path) -> None:
    own = user_folder(shared)
    assert make_private(own / own.name / "run").is_dir()
    inside = user_folder(own / "local")
    assert make_private(inside / "visits" / "run").is_dir()
    assert mode_of(own) == mode_of(inside) == 0o700


def test_a_folder_that_others_could_read_is_closed(shared: Path) -> None:
    user_folder(shared).mkdir()
    user_folder(shared).chmod(0o755)
    make_private(user_folder(shared) / "visits")
    assert mode_of(user_folder(shared)) == 0o700


def test_a_folder_in_which_others_could_write_is_refused(shared: Path) -> None:
    user_folder(shared).mkdir()
    for mode in (0o770, 0o707, 0o1777):
        user_folder(shared).chmod(mode)
        with pytest.raises(UnsafeFolderError, match="others can write there"):
            make_private(user_folder(shared) / "visits")
    assert list(user_folder(shared).iterdir()) == []


def test_a_link_in_place_of_the_folder_is_refused(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    user_folder(shared).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolderError, match="it is a link"):
        make_private(user_folder(shared) / "visits")
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_two_users_share_a_host_and_neither_takes_the_other_ones_folder(shared: Path) -> None:
    for above in shared.parents:
        if not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)  # pytest's folders are closed to others
    make_private(user_folder(shared) / "visits")
    # The second user is a process that changes its user after it has imported all it needs.
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from strandline.errors import UnsafeFolderError\n"
        "from strandline.runtime.protocol.user_folder import make_private, user_folder\n"
        f"shared, root = Path({str(shared)!r}), user_folder({str(shared)!r})\n"
        f"os.setuid({NOBODY})\n"
        "print(make_private(user_folder(shared) / 'visits'))\n"
        "try:\n"
        "    list(root.iterdir())\n"
        "except PermissionError:\n"
        "    print('closed')\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert told[:2] == [str(shared / f"strandline-{NOBODY}" / "visits"), "closed"]

    os.chown(user_folder(shared), NOBODY, NOBODY)
    with pytest.raises(UnsafeFolderError, match=f"it belongs to user {NOBODY}"):
        make_private(user_folder(shared) / "visits")


@pytest.mark.parametrize("parent", ["/proc/nowhere", "{file}"])
def test_a_folder_that_cannot_be_created_is_named_with_the_reason_and_the_option(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = user_folder(parent.format(file=tmp_path / "file")) / "job"
    with pytest.raises(StorageRefusedError, match=rf"cannot create the local folder {folder}: .*option local_dir"):
        make_private(folder)
