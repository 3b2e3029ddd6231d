"""Durable storage behind one abstract class, and one builder for every path of a job.

Everything above may import it: the coordinator's runtime, slots, sinks, the CLI. It knows nothing of checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from strandline.errors import ConfigError
from strandline.storage.base import Storage, StoredFile
from strandline.storage.local import LocalStorage
from strandline.storage.object_store import SCHEMES as OBJECT_STORE_SCHEMES
from strandline.storage.object_store import ObjectStorage
from strandline.storage.paths import JobPaths

__all__ = ["JobPaths", "Storage", "StoredFile", "is_local", "open_storage"]


def open_storage(url: str, options: Mapping[str, str] | None = None) -> Storage:
    """The storage whose root is `url`: a local path, or a `file://`, `s3://`, `gs://` or `az://` URL.

    `options` are settings of an object store (`endpoint`, `region`, `access_key_id`, ...) and go before those from the
    environment; local files take none. Nothing is contacted or created yet. A scheme that is not supported, or an
    option that does not exist, is a `ConfigError`. Other packages add schemes through the entry point group
    `strandline.storage`: its name is how the scheme begins, its value a class that takes `url` and `options`.
    """
    storage = _open(url, options)
    storage.options = MappingProxyType(dict(options or {}))
    return storage


def _open(url: str, options: Mapping[str, str] | None) -> Storage:
    scheme = _scheme(url)
    if scheme == "file":
        return LocalStorage(url)
    if scheme in OBJECT_STORE_SCHEMES:
        return ObjectStorage(url, options)
    for plugin in entry_points(group="strandline.storage"):
        if scheme.startswith(plugin.name):
            opened: Storage = plugin.load()(url, options)
            return opened
    supported = ", ".join(f"{name}://" for name in ("file", *OBJECT_STORE_SCHEMES))
    raise ConfigError(f"the storage {url!r} has a scheme that is not supported; supported: a local path, {supported}")


def is_local(url: str) -> bool:
    """Whether `url` is a path or a `file://` URL."""
    return _scheme(url) == "file"


def _scheme(url: str) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", url)
    return match.group(1).lower() if match else "file"
