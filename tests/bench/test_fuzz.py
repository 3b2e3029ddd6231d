"""A sample of the fuzz machine: mutated files of every format are read or refused, and crashes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from strandline_bench.fuzz.format import MODES, Format
from strandline_bench.fuzz.formats import NAMES, make_formats
from strandline_bench.fuzz.machine import Result, fuzz
from strandline_bench.fuzz.worker import Finding, judge, make_input
from tests.examples import examples

SEED = 7


def told(result: Result) -> list[str]:
    return [f"{found.number} {found.format} {found.mode} {found.kind}: {found.detail}" for found in result.findings]


def test_mutated_files_of_all_formats_are_read_or_refused_and_nothing_else() -> None:
    result = fuzz(examples(10_000), SEED)
    assert told(result) == []
    assert sum(result.read.values()) + sum(result.refused.values()) == result.inputs
    assert {name for name, _mode in result.read} == set(NAMES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_mutated_files() -> None:
    assert told(fuzz(1_000_000, SEED)) == []


def test_the_samples_themselves_are_good(tmp_path: Path) -> None:
    for format in make_formats(tmp_path):
        for sample in format.samples:
            if format.name not in ("schemas", "stored values", "config files", "full snapshot", "segment"):
                format.read(sample)


def test_an_input_can_be_made_again_from_its_number(tmp_path: Path) -> None:
    formats, again = make_formats(tmp_path / "one"), make_formats(tmp_path / "two")
    for number in range(500):
        format, mode, data = make_input(formats, SEED, number)
        assert mode in MODES
        if "RocksDB" not in format.name:
            other, *rest = make_input(again, SEED, number)
            assert (other.name, *rest) == (format.name, mode, data)


def test_an_error_that_is_not_ours_is_a_finding(tmp_path: Path) -> None:
    class Buggy(Format):
        name = "buggy"

        def read(self, data: bytes) -> None:
            raise IndexError("of the reader")

    refused, finding = judge(Buggy(tmp_path), "plain", 3, b"x")
    assert not refused
    assert isinstance(finding, Finding)
    assert (finding.number, finding.kind, finding.data) == (3, "IndexError", b"x")
