"""Runs every Python example of the documentation: the blocks of a page one after the other, as a reader would.

A block that cannot run here, because it needs a bucket, stands behind `<!-- example: compile only -->`, and is only
compiled. Every other block is executed, on small inputs and a real Spark session.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import strandline as sl
from tests.docs.pages import PAGES, name_of

FENCE = re.compile(
    r"^(?P<marker> *<!-- example: compile only -->\s*\n)?(?P<indent> *)```python\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
GUIDE = "docs/user-guide.md"
START = datetime(2026, 1, 1)
Names = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """One block of Python in a page."""

    page: str
    line: int
    code: str
    compile_only: bool

    def run(self, names: Names) -> None:
        compiled = compile("\n" * (self.line - 1) + self.code, self.page, "exec")
        if not self.compile_only:
            exec(compiled, names)


def examples(name: str, text: str) -> list[Example]:
    """The blocks of Python in the text of a page."""
    return [
        Example(
            name,
            text.count("\n", 0, found.start("code")) + 1,
            textwrap.dedent(found["code"]),
            found["marker"] is not None,
        )
        for found in FENCE.finditer(text)
    ]


EXAMPLES = {
    name_of(page): found for page in PAGES if (found := examples(name_of(page), page.read_text(encoding="utf-8")))
}


# --- what the pages read, and what comes out -----------------------------------------------------------

UTC = pa.timestamp("us", "UTC")
LATER = 100
"""Minutes: so much later than all other rows that every window closes and every timer fires."""


def at(minutes: float) -> datetime:
    return START + timedelta(minutes=minutes)


def write(folder: str, schema: dict[str, pa.DataType], *rows: tuple[Any, ...]) -> None:
    Path(folder).mkdir()
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), schema.values(), strict=True)]
    pq.write_table(pa.table(columns, names=list(schema)), f"{folder}/rows.parquet")


def clicks(_names: Names | None = None) -> None:
    """Clicks in the folder `in`, for jobs that count them per user."""
    write("in", {"user": pa.string(), "ms": pa.int64()}, ("alice", 5), ("bob", 7), ("alice", 9))


def inputs_of_the_guide(_names: Names | None = None) -> None:
    write(
        "clicks",
        {"user": pa.string(), "page": pa.string(), "ms": pa.int64(), "ts": UTC},
        ("alice", "/", 5, at(0)),
        ("bob", "/cart", 1200, at(1)),
        ("alice", "/cart", 9, at(LATER)),
    )
    write(
        "events",
        {"device": pa.string(), "event_id": pa.int64(), "ts": UTC},
        ("d1", 1, at(1)),
        ("d1", 1, at(2)),
        ("d1", 2, at(LATER)),
    )
    write(
        "orders",
        {"order": pa.int64(), "item": pa.string(), "ordered_at": UTC},
        (1, "book", at(1)),
        (2, "pen", at(2)),
        (3, "ink", at(LATER)),
    )
    write(
        "payments",
        {"order": pa.int64(), "amount": pa.float64(), "paid_at": UTC},
        (1, 9.5, at(3)),
        (3, 4.0, at(LATER)),
    )


def two_checkpoints_of_visits(names: Names) -> None:
    """The job `visits`, stopped, with two retained checkpoints."""
    clicks()
    job = sl.Job("visits", names["spark"], sl.Config(checkpoint_dir="ckpt", checkpoint_interval="1h", num_retained=3))
    visits = job.source(names["spark"].readStream.schema("user string, ms long").parquet("in"))
    visits.key_by("user").aggregate(n=sl.count(), slowest=sl.max("ms")).sink(sl.ParquetSink("out"))
    run = job.start()
    run.process_all_available()
    run.stop()
    assert {path.name for path in Path("ckpt/visits").glob("chk-*")} == {"chk-1", "chk-2"}
    names["job"] = job


def rows_of(folder: str) -> set[tuple[Any, ...]]:
    return {tuple(row.values()) for row in pq.ParquetDataset(folder).read().to_pylist()}


def visits_are_counted() -> None:
    assert rows_of("out") == {("alice", 2, 9), ("bob", 1, 7)}


SET_UP: dict[str, Callable[[Names], None]] = {
    "docs/operations.md": two_checkpoints_of_visits,
    GUIDE: inputs_of_the_guide,
}
AFTERWARDS: dict[str, Callable[[], None]] = {
    "README.md": visits_are_counted,
    "docs/operations.md": visits_are_counted,
    GUIDE: visits_are_counted,
}


@pytest.mark.spark
@pytest.mark.timeout(120)
class TestExamples:
    """One class, so that all pages share a Spark session."""

    @pytest.fixture(autouse=True)
    def folder(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """An empty working directory, in this process and for relative paths that Spark's JVM reads and writes."""
        tmp_path = Path(tempfile.mkdtemp(prefix="strandline-docs-", dir="/tmp"))
        jvm = spark._jvm
        assert jvm is not None
        hadoop = jvm.org.apache.hadoop.fs
        files = hadoop.FileSystem.get(spark._jsc.hadoopConfiguration())
        before = files.getWorkingDirectory()
        files.setWorkingDirectory(hadoop.Path(str(tmp_path)))
        users = jvm.java.lang.System.setProperty(
            "user.dir", str(tmp_path)
        )  # file systems that are made anew look there
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # local files of jobs with one name stay apart
        yield
        files.setWorkingDirectory(before)
        jvm.java.lang.System.setProperty("user.dir", users)
        shutil.rmtree(tmp_path, ignore_errors=True)

    @pytest.mark.parametrize("page", EXAMPLES)
    def test_the_examples_of_a_page_run_one_after_the_other(
        self,
        page: str,
        spark: SparkSession,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("STRANDLINE_LOG_FORMAT", "text")  # an example changes it
        names: Names = {"__name__": "__main__", "sl": sl, "spark": spark}
        if page in SET_UP:
            SET_UP[page](names)
        try:
            for example in EXAMPLES[page]:
                example.run(names)
            if page in AFTERWARDS:
                AFTERWARDS[page]()
        finally:
            for value in list(names.values()):
                if isinstance(value, sl.JobRun):
                    value.cancel()

    def test_every_step_of_the_user_guide_gives_rows(
        self,
        spark: SparkSession,
    ) -> None:
        inputs_of_the_guide()
        names: Names = {"__name__": "__main__", "sl": sl, "spark": spark}
        for example in EXAMPLES[GUIDE]:
            if "job.start" not in example.code and "run." not in example.code:
                example.run(names)
        steps = {
            name: stream
            for name, stream in names.items()
            if isinstance(stream, sl.Stream) and name not in ("clicks", "events", "orders", "payments")
        }
        for name, stream in steps.items():
            stream.sink(sl.ParquetSink(f"rows/{name}"))
        assert names["shop"].start(available_now=True, parallelism=1).await_termination(timeout=60)
        assert len(steps) > 10
        assert [name for name in steps if not rows_of(f"rows/{name}")] == []
        assert rows_of("visits") == {("alice", 2, 14), ("bob", 1, 1200)}


def test_every_page_with_examples_is_known() -> None:
    assert {"README.md", "CONTRIBUTING.md", "docs/user-guide.md", "docs/operations.md"} <= EXAMPLES.keys()


def test_every_block_of_python_is_found() -> None:
    """A fence that the pattern does not understand would be left out without a word."""
    fences = {name_of(page): page.read_text(encoding="utf-8").count("```python") for page in PAGES}
    assert {page: len(found) for page, found in EXAMPLES.items()} == {page: n for page, n in fences.items() if n}


def test_a_marked_example_is_compiled_and_not_run() -> None:
    page = "<!-- example: compile only -->\n```python\nraise RuntimeError\n```\n\n```python\nran = True\n```\n"
    marked, plain = examples("page.md", page)
    names: Names = {}
    marked.run(names)
    plain.run(names)
    assert names["ran"]
    with pytest.raises(SyntaxError):
        examples("page.md", page.replace("raise RuntimeError", "raise ="))[0].run(names)


def test_only_an_example_that_needs_a_bucket_may_be_marked() -> None:
    marked = [example for found in EXAMPLES.values() for example in found if example.compile_only]
    assert [example for example in marked if "://" not in example.code] == []
