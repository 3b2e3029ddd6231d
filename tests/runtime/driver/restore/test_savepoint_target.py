"""Where a savepoint is to be written: a wrong directory is refused before anybody is asked for a savepoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.runtime.driver.restore.savepoints import SavepointTarget


@pytest.mark.parametrize("directory", ["nosuch://bucket/x", "s3:///", "/data/sur\udcff", "/data/nul\0l"])
def test_a_directory_that_nobody_can_write_is_refused(directory: str) -> None:
    with pytest.raises(ConfigError):
        SavepointTarget.within(directory, "visits", "canonical", {})


def test_every_target_is_a_new_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    one, another = (SavepointTarget.within(f"{tmp_path}/", "visits", "native", {}) for _ in range(2))
    assert one.settings.url.startswith(f"{tmp_path}/savepoint-visits-")
    assert one.settings.url != another.settings.url
    assert not list(tmp_path.iterdir())
