"""The machine of `strandline chaos`: what it draws, what its oracle sees, and a sample of its trials."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from strandline.sinks.names import new_final_name, staged_name
from strandline.testing.fault_options import FaultOptions
from strandline.testing.triggers import Control
from strandline_bench.chaos import soak, soak_job
from strandline_bench.chaos.cli import app
from strandline_bench.chaos.job import Place
from strandline_bench.chaos.machine import Trial
from strandline_bench.chaos.oracle import output_problems
from strandline_bench.chaos.plan import (
    LIES,
    STORIES,
    WEIGHTS,
    Variant,
    check_repeatable,
    draw,
    label,
    pattern_of,
    plan_at,
    variants,
)
from strandline_bench.chaos.stories import Teller
from strandline_bench.chaos.trial_report import markdown, report, show
from strandline_bench.chaos.two_drivers import facts_of_log
from tests.runtime.driver.restore.generations import Generation, Mortal

JOURNAL = [
    "storage list trial/log",
    "storage create trial/log/00000000000000000001.json",
    "storage create trial/log/00000000000000000002.json",
    "storage upload trial/shared/59b2b88105e24b1fbb886c22d90a2d30-OPTIONS-000007",
    "call commit",
    "call await:0f3e1f9e-1f0b-4a5e-9d69-d1b62f0a3c11",
    "rows open",
]


def test_an_operation_of_another_run_matches_the_pattern_of_its_label() -> None:
    other = [
        "storage list trial/log",
        "storage create trial/log/00000000000000000017.json",
        "storage create trial/log/00000000000000000018.json",
        "storage upload trial/shared/00112233445566778899aabbccddeeff-OPTIONS-000011",
        "call commit",
        "call await:ffffffff-1f0b-4a5e-9d69-d1b62f0a3c11",
        "rows open",
    ]
    for mine, theirs in zip(JOURNAL, other, strict=True):
        assert label(mine) == label(theirs)
        assert [bool(re.search(pattern_of(label(mine)), one)) for one in other].count(True) in (1, 2)
        assert re.search(pattern_of(label(mine)), theirs)


@pytest.mark.parametrize("kind", sorted(WEIGHTS.keys() - LIES.keys()))
def test_a_seed_decides_about_the_fault(kind: str) -> None:
    variant = variants()[0]
    one, again = (draw(5, variant, kind, JOURNAL, "folder") for _ in range(2))
    assert one == again
    drawn = [draw(seed, variant, kind, JOURNAL, "folder") for seed in range(60)]
    assert len({(plan.control.pattern, plan.control.number) for plan in drawn}) > 2
    for plan in drawn:
        assert plan_at(plan.operation, plan.seed, variant, kind, "folder") == plan
        assert any(re.search(plan.control.pattern, operation) for operation in JOURNAL)
        assert (plan.signal != "") == kind.startswith(("kill", "stop"))
        assert plan.control.happening == ("ask" if plan.signal else "hang" if kind == "storage hangs" else "fail")


@pytest.mark.parametrize("kind", LIES)
def test_a_storage_lies_with_options_that_it_knows(kind: str) -> None:
    plan = draw(5, variants()[0], kind, JOURNAL, "folder")
    _faults, others = FaultOptions.taken_from(plan.options)
    assert others == {}
    assert plan.control == Control()


def test_every_story_is_told_by_somebody() -> None:
    assert len(variants()) == 4 * len(STORIES)
    for variant in variants():
        assert Variant.named(variant.name) == variant
        assert hasattr(Teller, "_" + variant.story.replace("-", "_"))


@pytest.mark.parametrize("sink", ["parquet", "foreach"])
def test_the_oracle_sees_missing_wrong_and_doubled_rows(tmp_path: Path, sink: str) -> None:
    place = Place(tmp_path, 3, Variant.named(f"plain/snapshots/{sink}"))
    place.write(2)
    rows = sorted(place.expected().elements())

    def written(some: list[tuple[object, ...]]) -> list[str]:
        for file in place.output.iterdir():
            file.unlink()
        if sink == "parquet":
            columns = {name: [row[at] for row in some] for at, name in enumerate(("key", "n", "s"))}
            pq.write_table(pa.table(columns), place.output / "part.parquet")
        else:
            (place.output / "rows.jsonl").write_text(json.dumps(some))
        return list(output_problems(place))

    assert written(rows) == []
    assert "1 of" in written(rows[1:])[0]
    assert "wrong or twice" in written([*rows, ("k1", 1, -1)])[0]
    # A foreach sink gets rows at least once.
    assert bool(written([*rows, rows[0]])) == (sink == "parquet")


def test_the_oracle_sees_a_staged_file_where_the_sink_puts_it(tmp_path: Path) -> None:
    place = Place(tmp_path, 3, Variant.named("plain/snapshots/parquet"))
    assert list(output_problems(place)) == []
    staged = place.output / staged_name(new_final_name("trial", 1))
    staged.parent.mkdir()
    staged.touch()
    (problem,) = output_problems(place)
    assert problem == f"1 staged files are left in the sink's folder, such as {staged.relative_to(place.output)}"


def test_the_soak_sees_lost_and_doubled_rows(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    table = pa.concat_tables([soak_job.rows_of(7, number) for number in range(2)])
    sums = table.group_by("key").aggregate([("x", "count"), ("x", "sum")]).rename_columns(["key", "n", "s"])
    pq.write_table(sums, tmp_path / "out" / "a.parquet")
    assert soak_job.output_problems(tmp_path, 7, 2) == []
    assert len(soak_job.output_problems(tmp_path, 7, 3)) == 2
    pq.write_table(sums.slice(0, 1), tmp_path / "out" / "b.parquet")
    assert soak_job.output_problems(tmp_path, 7, 2) == ["some counts of a key are there twice"]


def test_the_soak_draws_every_quantity_and_sees_what_grows(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [
        {"at_s": 10.0 * at, **dict.fromkeys(soak.QUANTITIES, 100.0), "handles": 10.0 * at, "recovery_s": None}
        for at in range(30)
    ]
    soak.draw({"samples": samples, "kills": [{"at_s": 60.0}]}, tmp_path / "soak.png")
    assert 10_000 < (tmp_path / "soak.png").stat().st_size < 200_000
    flat = {name: soak.judged([one[name] for one in samples])["flat"] for name in soak.QUANTITIES}
    assert flat == {**dict.fromkeys(soak.QUANTITIES, True), "handles": False, "recovery_s": None}


@pytest.mark.parametrize(("last", "flat"), [(0.62, True), (0.63, False)])
def test_the_soak_has_the_same_margin_for_small_quantities(last: float, flat: bool) -> None:
    found = soak.judged([0.5] * 20 + [last] * 10)
    assert found == {"before": 0.5, "after": last, "flat": flat}
    problems = soak.growth_problems({"threads": soak.judged([1.0] * 30), "recovery_s": found})
    expected = "not flat: loss until whole again (s): 0.5 in the second third, 0.6 in the last third"
    assert problems == ([] if flat else [expected])


def test_the_soak_does_not_judge_a_few_samples() -> None:
    found = soak.judged([1.0] * 20 + [9.0] * 7)
    assert found["flat"] is None
    assert soak.growth_problems({"threads": found}) == []


VARIANT = "plain/changelog/parquet"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trials", "-1"], "--trials"),
        (["--trials", "0"], "--trials"),
        (["--workers", "0"], "--workers"),
        (["--minutes", "-1"], "--minutes"),
        (["--stories", "plane"], "'plane'"),
        (["--kinds", "kill slott"], "'kill slott'"),
        (["--work-dir", "/no/such/folder"], "--work-dir"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "kill slott"], "'kill slott'"),
        (["repeat", "--seed", "1", "--variant", "plain/x/y", "--kind", "kill slot"], "'plain/x/y'"),
        (["repeat", "--seed", "1", "--variant", "plain", "--kind", "kill slot"], "'plain'"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "kill slot", "--at", "foo"], "'foo'"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "kill slot", "--at", "after 0 ."], "'after 0 .'"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "kill slot", "--at", "after 3 (x"], "'(x'"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "storage is slow", "--at", "after 3 x"], "--at"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "call fails before", "--at", "after 3 x"], "after"),
        (["repeat", "--seed", "1", "--variant", VARIANT, "--kind", "kill slot", "--times", "0"], "--times"),
        (["two-drivers", "--minutes", "0"], "--minutes"),
        (["soak", "--kill-every", "0"], "--kill-every"),
        (["summary", "/no/such/file"], "/no/such/file"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], told: str) -> None:
    ended = CliRunner().invoke(app, arguments, env={"COLUMNS": "400"})
    assert ended.exit_code == 2
    assert isinstance(ended.exception, SystemExit)
    assert told in ended.output


def test_a_run_without_trials_is_reported_as_such() -> None:
    console = Console(file=StringIO(), width=140)
    show(report([], 7), console)
    assert isinstance(console.file, StringIO)
    assert "No trial was run." in console.file.getvalue()
    assert "None" not in console.file.getvalue()


def test_a_trial_without_a_fault_is_repeated_without_one() -> None:
    check_repeatable("", "none")
    plan = draw(5, variants()[0], "none", JOURNAL, "folder")
    assert (plan.control, plan.options, plan.operation) == (Control(), {}, "")


def test_the_log_tells_how_often_two_drivers_took_over_and_what_they_completed(tmp_path: Path) -> None:
    place = Place(tmp_path, 3, Variant.named(VARIANT))
    assert facts_of_log(place) == {"takeovers": 0, "checkpoints": 0, "log_entries": 0}
    for name in ("one", "other"):
        driver = Generation(Mortal(str(place.checkpoints)), job="trial")
        driver.checkpoint(add=name[0])
    driver.checkpoint(add="z")
    assert facts_of_log(place) == {"takeovers": 2, "checkpoints": 3, "log_entries": 5}


def test_the_report_counts_per_kind_and_says_how_to_repeat_a_failure() -> None:
    variant = Variant.named("plain/changelog/parquet")

    def trial(kind: str, verdict: str, recovery: float | None) -> Trial:
        plan = plan_at("before 2 ^call commit$", 11, variant, kind, "folder")
        return Trial(plan, verdict, "call commit", 0, [], [], 2.0, recovery, 0)  # type: ignore[arg-type]

    result = report([trial("kill slot", "survived", 1.0), trial("kill slot", "wrong", 3.0)], 7)
    assert result["verdicts"] == {"survived": 1, "wrong": 1}
    assert result["kinds"]["kill slot"]["recovery_p50_s"] == 2.0
    assert "| kill slot | 2 | 2 | 1 | 1 | 0 | 0 | 2.00 s | 2.98 s |" in markdown(result)
    (failure,) = result["failures"]
    assert failure["repeat"] == (
        'strandline chaos repeat --seed 11 --variant plain/changelog/parquet --kind "kill slot" '
        "--at 'before 2 ^call commit$'"
    )


@pytest.mark.spark
@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_sample_of_the_trials_survives(tmp_path: Path) -> None:
    """As its users start it. Every kind of fault but the loss of the driver, which needs another JVM."""
    kinds = [kind for kind in WEIGHTS if "driver" not in kind and "hang" not in kind and kind not in LIES]
    command = [sys.executable, "-m", "strandline.admin.cli.main", "chaos", "--stories", "plain", "--kinds"]
    ended = subprocess.run(
        [*command, ",".join(kinds), "--trials", "5", "--seed", "7", "--work-dir", str(tmp_path), "--json"],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
    result = json.loads(ended.stdout)
    verdicts = Counter(result["verdicts"])
    assert verdicts["survived"] == result["trials"] >= 8
    assert sum(one["fired"] for one in result["kinds"].values()) >= 3
    assert list(tmp_path.iterdir()) == []
