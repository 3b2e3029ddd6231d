"""Optional libraries: what a sink needs is imported late, and an error names the extra to install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from strandline.errors import ConfigError


def required(module: str, extra: str, what: str) -> ModuleType:
    """The module `module`. Raises `ConfigError` if it is not installed; `what` names what needs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs {module}, which is not installed on this host: {error}; run pip install "
            f'"strandline[{extra}]"'
        ) from error
