"""Every command line in the documentation names commands, options and `make` targets that exist."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main

from strandline.admin.cli.main import app
from tests.docs.pages import PAGES, ROOT, name_of

BLOCK = re.compile(r"^ *```\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def lines_that_begin_with(command: str) -> list[tuple[str, str]]:
    """The page and the line of every use of a command in a block without a language."""
    return [
        (name_of(page), line.strip())
        for page in PAGES
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip().startswith(f"{command} ")
    ]


def group(words: list[str]) -> tuple[Any, list[str]]:
    """The root of the command line, and the words for it: `bench`, `chaos` and `demo` are of another package."""
    if words[:1] == ["bench"]:
        from strandline_bench.cli import app as bench

        return typer.main.get_command(bench), words[1:]
    if words[:1] == ["demo"]:
        from strandline_bench.demo.cli import app as demo

        return typer.main.get_command(demo), words[1:]
    if words[:1] == ["chaos"]:
        from strandline_bench.chaos.cli import app as chaos

        return typer.main.get_command(chaos), words[1:]
    return typer.main.get_command(app), words


@pytest.mark.parametrize(("page", "line"), lines_that_begin_with("strandline"))
def test_a_documented_command_can_be_parsed(page: str, line: str) -> None:
    command, words = group(shlex.split(line, comments=True)[1:])
    assert "--install-completion" not in words, f"{page}: parsing it would change the shell of whoever runs this test"
    context = command.make_context("strandline", words, resilient_parsing=False)
    while hasattr(command, "commands") and (context._protected_args or context.args):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)
    assert not context.args, f"{page}: {line}"


@pytest.mark.parametrize(("page", "line"), lines_that_begin_with("make"))
def test_a_documented_make_target_exists(page: str, line: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert shlex.split(line, comments=True)[1] in targets, f"{page}: {line}"
