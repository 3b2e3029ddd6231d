"""The wheel that users install: what is in it, and what its command line says about what is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import strandline

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy: a build leaves files beside the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", source / "dist", source], check=True, timeout=120
    )
    (built,) = (source / "dist").glob("strandline-*.whl")
    return built


def command(wheel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the wheel's command line beside the libraries of this environment, but not its editable packages."""
    # With -S nobody reads the .pth files that lead to the checkout. Python imports pure packages from a zip file.
    paths = [str(wheel), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    return subprocess.run(
        [sys.executable, "-S", "-m", "strandline.admin.cli.main", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80"},
        cwd=wheel.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    own = {"strandline", "pyspark_strandline", f"strandline-{strandline.__version__}.dist-info"}
    assert {name.split("/")[0] for name in names} == own
    assert "strandline/py.typed" in names
    assert "strandline/runtime/slot/process.py" in names
    rooms = {part for name in names for part in Path(name).parts[:-1]}
    assert rooms.isdisjoint({"tests", "bench", "demo", "strandline_bench"})


@pytest.mark.parametrize("name", ["demo", "bench"])
def test_demo_and_bench_say_how_to_get_them_where_only_the_wheel_is_installed(wheel: Path, name: str) -> None:
    ended = command(wheel, name, "--json")
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.count("\n") == 1
    assert f"`strandline {name}` is in the package strandline_bench, which is not installed" in ended.stderr
    assert "run `make setup`" in ended.stderr


def test_the_help_of_the_wheel_names_every_command(wheel: Path) -> None:
    ended = command(wheel, "--help")
    assert ended.returncode == 0, ended.stderr
    for name in ("demo", "bench", "checkpoints", "savepoint", "version"):
        assert name in ended.stdout
