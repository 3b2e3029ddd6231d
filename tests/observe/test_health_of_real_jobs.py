"""Alarms that real jobs raise, and that end when the cause ends: one job after the other is put into trouble.

Thresholds of the rules are lowered, because nobody waits for an hour here. The figures are those of the job.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import strandline as sl
from strandline.observe import live, samples
from strandline.observe.rules import failures, load, measures, state
from strandline.runtime.driver import generation, source_watch
from tests.jobs.place import Place, Sum
from tests.waiting import wait_until

pytestmark = pytest.mark.spark

FAST, STUCK = "1000000000", "1"
"""Bytes per second of the storage."""
FAILS_FROM = 1_000_000
"""The number of the first rename of a file of the sink that fails."""


@pytest.fixture
def place(tmp_path: Path, spark: SparkSession) -> Place:
    return Place(tmp_path, spark)


class Trouble:
    """A job that runs, and the faults of what it depends on."""

    def __init__(self, root: Path, spark: SparkSession) -> None:
        self.place = Place(root, spark)
        self.switch, self.rate, self._renames = root / "on", root / "rate", root / "renames"
        self.rate.write_text(FAST)
        self._faults = {
            "switch": str(self.switch),
            "bytes_per_second": str(self.rate),
            "delay_seconds": "0.4",
            "slow_pattern": "^(upload|write|create) .*/(shared|chk-)",
            "fail_pattern": "^rename .*parquet",
            "fail_from": str(FAILS_FROM),
            "fail_times": str(FAILS_FROM),
            "counter": str(self._renames),
        }
        self._users = 0
        self._writing = threading.Event()
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self.run: sl.JobRun

    def start(self) -> None:
        config = self.place.config(
            storage_options=self._faults,
            tolerable_failed_checkpoints=-1,
            checkpoint_timeout="1s",
            checkpoint_interval="500ms",
            local_recovery=True,
        ).replace(checkpoint_dir=f"faulty+file://{self.place.checkpoints}")
        self.run = self.place.sums(config=config, sink=f"faulty+file://{self.place.output}").start()
        self._writer.start()

    def end(self) -> None:
        self._ended.set()
        self._writer.join()
        self.switch.unlink(missing_ok=True)
        self.run.cancel()

    def let_the_sink_fail(self) -> None:
        self._renames.write_bytes(b"")
        os.truncate(self._renames, FAILS_FROM)
        self.switch.touch()

    def rows_come(self, come: bool = True) -> None:
        (self._writing.set if come else self._writing.clear)()

    def _write(self) -> None:
        while not self._ended.wait(0.2):
            if self._writing.is_set():
                self.place.write([(f"user-{number}", 1) for number in range(self._users, self._users + 100)])
                self._users += 100

    def findings(self, rule: str) -> list[Any]:
        return [one for one in self.run.health() if one.rule == rule]

    def fires(self, rule: str) -> Any:
        return wait_until(lambda: self.findings(rule), what=f"{rule} in {self.run.health()}")[0]

    def clears(self, rule: str) -> None:
        wait_until(lambda: not self.findings(rule), what=f"the end of {rule}")


@pytest.fixture(scope="class")
def trouble(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Trouble]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live, "FACTS_EVERY", 0.2)
        patch.setattr(samples, "SAMPLE_EVERY", 0.1)
        patch.setattr(generation, "FIGURES_EVERY", 0.2)
        patch.setattr(measures, "QUIET_MS", 0)
        for rules, name, value in (
            (load, "LEAST_ROWS", 900),
            (state, "LEAST_STATE", 0),
            (state, "GROWTH_SPAN_S", 3.0),
            (state, "GROWTH_PARTS", 3),
            (failures, "LEAST_MISSED", 1),
            (failures, "SLOT_LOSSES", 2),
        ):
            patch.setattr(rules, name, value)
        made = Trouble(tmp_path_factory.mktemp("trouble"), spark)
        made.start()
        yield made
        made.end()


def unless_gone(_function: Any, _path: str, error: tuple[Any, BaseException, Any]) -> None:
    """The task manager deletes old copies at the same time."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


class TestOneJobInTrouble:
    """The tests share one job, in this order."""

    def test_a_hot_key_is_reported_until_other_keys_have_come(self, trouble: Trouble) -> None:
        assert trouble.run.health() == []
        trouble.place.write([("hot", 1)] * 1000)
        found = trouble.fires("skewed-key-groups")
        assert (found.severity, found.subject) == ("info", "sums")
        assert "took in 1,000 of 1,000 rows: 2.0 times its share" in found.text
        trouble.place.write([(f"other-{number % 2000}", 1) for number in range(33_000)])
        trouble.clears("skewed-key-groups")

    def test_a_state_that_grows_is_reported_until_it_does_not(self, trouble: Trouble) -> None:
        trouble.rows_come()
        assert trouble.fires("state-only-grows").subject == "sums"
        trouble.rows_come(False)
        trouble.clears("state-only-grows")

    def test_a_storage_that_hangs_and_then_is_slow_is_reported_until_it_is_fast(self, trouble: Trouble) -> None:
        trouble.rows_come()
        trouble.rate.write_text(STUCK)
        trouble.switch.touch()
        found = trouble.fires("failed-checkpoints")
        assert found.severity in ("warning", "critical")
        assert "because: " in found.text
        trouble.rate.write_text(FAST)
        trouble.clears("failed-checkpoints")
        assert "the interval is 500 ms" in trouble.fires("slow-checkpoints").text
        trouble.switch.unlink()
        trouble.clears("slow-checkpoints")

    def test_a_sink_whose_target_refuses_is_reported_until_it_takes_the_rows(self, trouble: Trouble) -> None:
        trouble.let_the_sink_fail()
        found = trouble.fires("sink-fails")
        assert (found.severity, found.subject) == ("critical", f"faulty+file://{trouble.place.output}")
        assert "fails on purpose" in found.text
        trouble.switch.unlink()
        trouble.clears("sink-fails")

    def test_slots_that_are_lost_and_local_files_that_are_gone(
        self, trouble: Trouble, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trouble.rows_come(False)
        trouble.run.process_all_available()

        def kill_a_slot() -> None:
            before = trouble.run.recoveries()
            os.kill(trouble.run.processes().slots[0].pid, signal.SIGKILL)
            wait_until(lambda: len(trouble.run.recoveries()) > len(before), what="a recovery")

        for name in ("copies", "snap-*", "seg-*"):
            for path in (trouble.place.root / "local").rglob(name):
                shutil.rmtree(path, onerror=unless_gone) if path.is_dir() else path.unlink(missing_ok=True)
        kill_a_slot()
        assert "100 % from storage" in trouble.fires("local-recovery-missed").text
        assert not trouble.findings("repeated-restarts")

        trouble.place.write([("one", 1)])
        trouble.run.process_all_available()
        kill_a_slot()
        trouble.clears("local-recovery-missed")
        assert trouble.fires("repeated-restarts").title == "Slot 0 is lost again and again"
        monkeypatch.setattr(failures, "AGAIN_S", 0.5)
        trouble.clears("repeated-restarts")
        assert trouble.run.health() == []


class Gated(DataSource):
    """A source that brings one row, and does not answer as long as its file `gate` is there."""

    @classmethod
    def name(cls) -> str:
        return "gated"

    def schema(self) -> str:
        return "user string, x long"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return GatedReader(Path(self.options["gate"]))


class GatedReader(DataSourceStreamReader):
    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def initialOffset(self) -> dict[str, int]:
        return {"rows": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]  # the form that every release calls
        while self.gate.exists():
            time.sleep(0.05)
        return {"rows": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(start["rows"], end["rows"])]

    def read(self, partition: InputPartition) -> Iterator[tuple[str, int]]:
        yield ("a", int(partition.value))


@pytest.mark.slow  # a job of its own for one rule
def test_a_source_that_does_not_answer_is_reported_until_it_does(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (live, "FACTS_EVERY", 0.2),
        (source_watch, "PATIENCE", 0.5),
        (source_watch, "LEAST_LOOKS", 3),
    ):
        monkeypatch.setattr(module, name, value)
    place.spark.dataSource.register(Gated)
    gate = place.root / "gate"
    job = place.job(parallelism=1)
    frame = place.spark.readStream.format("gated").option("gate", str(gate)).load()
    stream = job.source(frame).key_by("user").process(Sum(), Place.OUTPUT, uid="sums")
    stream.sink(sl.ParquetSink(str(place.output)))
    with job.start() as run:
        run.process_all_available()
        gate.touch()
        (found,) = wait_until(run.health, what="silent-source")
        assert (found.rule, found.severity) == ("silent-source", "warning")
        assert "has not answered for" in found.text
        gate.unlink()
        wait_until(lambda: run.health() == [], what="the end of silent-source")
