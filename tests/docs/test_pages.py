"""The pages of the documentation: links, names of files and modules, the reference, the built site."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import strandline as sl
from tests.docs.pages import PAGES, ROOT, check_docs, name_of

CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(r"[\w*./-]*\w\.(?:py|sh|toml)|[\w.-]+(?:/[\w.-]+)*/")
MODULE = re.compile(r"strandline(?:\.\w+)+")
REPOSITORY = [
    f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}"
    for folder in ("src", "tests", "bench", "examples", "scripts", "docs")
    for path in (ROOT / folder).rglob("*")
    if "__pycache__" not in path.parts
] + [f"/{path.name}{'/' if path.is_dir() else ''}" for path in ROOT.iterdir()]
MADE_FOLDERS = {"log/", "history/", "shared/", "chk-N/", "sp/", "site/", ".matrix/"}
"""Folders that pages name and that jobs and make targets make. They are not part of the repository."""


def in_code(page: Path) -> list[str]:
    """What a page sets in code type, outside its blocks of code."""
    return CODE.findall(check_docs.FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(check_docs.broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_an_empty_line_separates_tables_and_headings_from_their_neighbours(page: Path) -> None:
    """Without it, the lines after a table become rows of the table, headings too."""
    lines = check_docs.FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    joined = [
        line
        for before, line in pairwise(lines)
        if before.strip() and line.strip() and (is_row(before) != is_row(line) or re.match("#+ ", line))
    ]
    assert joined == []


def is_row(line: str) -> bool:
    return line.startswith("|")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_every_file_and_folder_that_a_page_names_exists(page: Path) -> None:
    named = {code for code in in_code(page) if FILE.fullmatch(code) and code not in MADE_FOLDERS}
    assert [name for name in sorted(named) if not any(path.endswith(f"/{name}") for path in REPOSITORY)] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name_of)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    for name in {code for code in in_code(page) if MODULE.fullmatch(code)}:
        parts = name.split(".")
        for known in range(len(parts), 0, -1):
            try:
                found: object = importlib.import_module(".".join(parts[:known]))
            except ModuleNotFoundError:
                continue
            for attribute in parts[known:]:
                found = getattr(found, attribute)
            break


def test_the_reference_has_every_public_name() -> None:
    reference = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    described = set(re.findall(r"^::: strandline\.(\w+)$", reference, re.MULTILINE))
    assert set(sl.__all__) - described == set()


def test_the_index_lists_every_design_note() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    notes = [note.name for note in (ROOT / "docs" / "design").glob("*.md")]
    assert [note for note in notes if f"(design/{note})" not in index] == []


def test_the_site_builds_without_a_broken_link_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert built.returncode == 0, built.stderr
    assert list(check_docs.broken_in_site(tmp_path / "site")) == []
