"""Every option of a job: its type, its default, its check, and the Flink keys that set it.

Job, runtime, operators, state, admin and testing may import it. It imports nothing but `errors`.
"""

import inspect

from strandline.config.config import Config
from strandline.config.reference import reference_markdown, reference_text

__all__ = ["Config", "reference_markdown"]

# `inspect.getdoc` gives None under `python -OO`, which drops docstrings.
Config.__doc__ = f"{inspect.getdoc(Config) or ''}\n\n{reference_text()}\n"
