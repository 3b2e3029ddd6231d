"""Every option of a job: its type, its default, its check, and the Flink keys that set it.

Job, runtime, operators, state, admin and testing may import it. It imports nothing but `errors`.
"""

import inspect

from strandline.config.config import Config
from strandline.config.reference import reference_markdown, reference_text
from strandline.config.values import ports_of

__all__ = ["Config", "ports_of", "reference_markdown"]

# The descriptors of 40 options make a signature that nobody can read; the docstring describes them all.
_options = [
    inspect.Parameter("checkpoint_dir", inspect.Parameter.KEYWORD_ONLY, annotation="str | PathLike[str]"),
    inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation="object"),
]
_self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
Config.__signature__ = inspect.Signature(_options)
Config.__init__.__signature__ = inspect.Signature([_self, *_options])  # type: ignore[attr-defined]  # `inspect` reads it

# `inspect.getdoc` gives None under `python -OO`, which drops docstrings.
Config.__doc__ = f"{inspect.getdoc(Config) or ''}\n\n{reference_text()}\n"
