"""The order of words in `strandline run`: our options, the script, more of our options, the script's arguments."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

HELP = ("-h", "--help")
"""Behind the script, they ask the script for help."""


class RunCommand(TyperCommand):
    """Moves the options right behind the script in front of it, where the parser expects them.

    `run -p 2 app.py in out` and `run app.py -p 2 in out` mean the same. From the first word on that is no option of
    ours, all words are the script's, and so are those behind `--`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # the type of `ctx` is private in Typer
        parameters: list[Any] = list(self.get_params(ctx))
        takes_value: dict[str, bool] = {
            name: not parameter.is_flag
            for parameter in parameters
            if parameter.param_type_name == "option"
            for name in parameter.opts
        }
        return super().parse_args(ctx, in_order(args, takes_value))


def in_order(words: list[str], takes_value: dict[str, bool]) -> list[str]:
    """The words with our options first, then the script, then its arguments."""
    before, rest = _own(words, takes_value)
    if not rest:
        return words
    behind, arguments = _own(rest[1:], {name: value for name, value in takes_value.items() if name not in HELP})
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    return [*before, *behind, rest[0], *arguments]


def _own(words: list[str], takes_value: dict[str, bool]) -> tuple[list[str], list[str]]:
    """The options at the beginning of `words` with their values, and what follows."""
    at = 0
    while at < len(words):
        width = _width(words[at], takes_value)
        if width == 0:
            break
        at += width
    return words[:at], words[at:]


def _width(word: str, takes_value: dict[str, bool]) -> int:
    """How many words an option takes: itself, and its value if that is not part of the word; 0 for other words."""
    if word in takes_value:
        return 2 if takes_value[word] else 1
    if word.startswith("--"):
        name, equals, _value = word.partition("=")
        return 1 if equals and takes_value.get(name, False) else 0
    return 1 if len(word) > 2 and takes_value.get(word[:2], False) else 0
