"""Runs the runtime tests on every supported pair of Spark and Python that this machine can offer.

Each pair has a virtual environment of its own in `.matrix/`, with the newest patch release of that Spark. Everything
but Spark has the version of `requirements.lock`. A Python that is not installed is named in the table and left out.

    python scripts/test_matrix.py                       all pairs
    python scripts/test_matrix.py --spark 4.1           one Spark, every Python
    python scripts/test_matrix.py --spark 4.2 --python 3.13 -- -x
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
SPARKS = ("4.1", "4.2", "4.3")
PYTHONS = ("3.11", "3.12", "3.13")

TESTS = (
    "tests/test_pyspark_releases.py",
    "tests/state/coding",
    "tests/state/handles",
    "tests/operators/aggregate",
    "tests/operators/spark",
    "tests/operators/windows",
    "tests/jobs/test_jobs.py",
    "tests/jobs/test_event_time.py",
    "tests/jobs/test_spark_processors.py",
    "tests/jobs/test_restore.py",
    "tests/jobs/test_savepoints.py",
    "tests/jobs/test_changelog.py",
)
"""The tests of what depends on Spark: types and rows, plans, local properties, the offset log, Python workers."""

TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "boto3", "moto[server]", "duckdb", "protobuf")
"""What the tests import beside the package itself; versions come from the lock."""

NOT_LOCKED = ("pyspark", "py4j")
"""Packages whose version depends on the pair."""


@dataclass(frozen=True)
class Outcome:
    """How one pair went."""

    spark: str
    python: str
    result: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.result in ("passed", "not installed")


def main() -> int:
    """Test the pairs one after the other and print the table; the exit code is 1 if a test failed."""
    arguments = _arguments()
    outcomes = []
    for spark in arguments.spark or SPARKS:
        for python in arguments.python or PYTHONS:
            outcomes.append(_test(spark, python, arguments.pytest))
            _say(_table(outcomes[-1:]).splitlines()[-1])
    table = _table(outcomes)
    (FOLDER / "result.md").write_text(table, encoding="utf-8")
    sys.stdout.write(table)
    return 0 if all(outcome.good for outcome in outcomes) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--spark", action="append", choices=SPARKS, help="only this Spark; may be given several times")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this Python; may be given repeatedly")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    return parser.parse_args()


def _test(spark: str, python: str, arguments: list[str]) -> Outcome:
    interpreter = _interpreter(python)
    if interpreter is None:
        return Outcome(spark, python, "not installed")
    wheel = _spark_wheel(spark)
    release = wheel.name.split("-")[1]
    environment = FOLDER / f"spark{spark}-python{python}"
    _install(environment, interpreter, wheel)
    report = environment / "report.xml"
    report.unlink(missing_ok=True)
    _say(f"testing Spark {release} with Python {python}")
    begin = time.monotonic()
    chosen = [] if any(argument.startswith("tests/") for argument in arguments) else list(TESTS)
    subprocess.run(
        [environment / "bin/python", "-m", "pytest", "-q", "-n", "2", f"--junitxml={report}", *chosen, *arguments],
        cwd=ROOT,
        env=_environment(environment),
        check=False,
    )
    seconds = time.monotonic() - begin
    if not report.exists():
        return Outcome(release, python, "broken off", seconds=seconds)
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert suite is not None
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    result = "failed" if failed or tests == skipped else "passed"
    return Outcome(release, python, result, tests - failed - skipped, failed, skipped, seconds)


def _interpreter(python: str) -> Path | None:
    """A Python of this version: from PATH, or among those that pyenv or uv have installed."""
    for candidate in _candidates(python):
        command: list[str | Path] = [candidate, "-c", "import ensurepip, sys; print(*sys.version_info[:2], sep='.')"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == python:
            return candidate
    return None


def _candidates(python: str) -> Iterator[Path]:
    found = shutil.which(f"python{python}")
    if found is not None:
        yield Path(found)
    homes = (os.environ.get("PYENV_ROOT", "~/.pyenv"), "~/.local/share/uv/python")
    for home in homes:
        yield from sorted(Path(home).expanduser().glob(f"**/bin/python{python}"), reverse=True)


def _spark_wheel(spark: str) -> Path:
    """The newest patch release of a Spark. PySpark comes as source only, so its wheel is built once and kept."""
    wheels = FOLDER / "wheels"
    found = sorted(wheels.glob(f"pyspark-{spark}.*.whl"))
    if not found:
        _say(f"fetching the newest PySpark {spark}")
        wheels.mkdir(parents=True, exist_ok=True)
        settings = wheels / "build.cfg"
        settings.write_text("[bdist_wheel]\ncompression = stored\n", encoding="utf-8")
        command: list[str | Path] = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels]
        subprocess.run(
            [sys.executable, *command, f"pyspark=={spark}.*"],
            env={**os.environ, "DIST_EXTRA_CONFIG": str(settings)},
            check=True,
        )
        found = sorted(wheels.glob(f"pyspark-{spark}.*.whl"))
    return found[-1]


def _install(environment: Path, interpreter: Path, wheel: Path) -> None:
    """Make the virtual environment of a pair, unless it is there and up to date."""
    stamp = environment / ".strandline-matrix"
    sources = [(ROOT / file).read_bytes() for file in ("requirements.lock", "pyproject.toml")]
    wanted = f"{hashlib.sha256(b''.join(sources)).hexdigest()} {wheel.name} {ROOT}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    _say(f"installing {wheel.name} into {environment.relative_to(ROOT)}")
    if not (environment / "bin/python").exists():
        subprocess.run([interpreter, "-m", "venv", environment], check=True)
    constraints = environment / "constraints.txt"
    constraints.write_text("\n".join(_locked()) + "\n", encoding="utf-8")
    pip: list[str | Path] = [
        environment / "bin/python",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-compile",
    ]
    subprocess.run(
        [*pip, "-c", constraints, f"pyspark @ {wheel.as_uri()}", *TOOLS, "-e", ROOT],
        env=_environment(environment),
        check=True,
    )
    stamp.write_text(wanted)


def _locked() -> list[str]:
    """The versions of the lock, without hashes and without what depends on the pair."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)(==\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    return [f"{name}{version}" for name, version in pins if name not in NOT_LOCKED]


def _environment(environment: Path) -> dict[str, str]:
    """The variables of this process without those that lead Python or Spark to another installation."""
    foreign = ("PYTHONPATH", "PYTHONHOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "VIRTUAL_ENV": str(environment), "PATH": f"{environment / 'bin'}:{kept.get('PATH', '')}"}


def _table(outcomes: list[Outcome]) -> str:
    lines = ["| Spark | Python | result | passed | failed | skipped | seconds |", "|---|---|---|---:|---:|---:|---:|"]
    lines += [
        f"| {outcome.spark} | {outcome.python} | {outcome.result} | {outcome.passed} | {outcome.failed} | "
        f"{outcome.skipped} | {outcome.seconds:.0f} |"
        for outcome in outcomes
    ]
    return "\n".join(lines) + "\n"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
