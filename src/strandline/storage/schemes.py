"""Opens the storage of a URL, chosen by the scheme: local files, object stores, HDFS, and the schemes of plugins.

A plugin is an entry point of the group `strandline.storage` in any installed package. Its name is a scheme (`swift`),
or the beginning of schemes if the name ends with `+` (`faulty+` opens `faulty+file://` and `faulty+s3://`). Its value
is a function or class that takes the URL and the storage options and returns a `Storage`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING

from strandline.errors import ConfigError
from strandline.redaction import has_password
from strandline.storage.base import Storage
from strandline.storage.local import LocalStorage
from strandline.storage.object_store import SCHEMES as OBJECT_STORE_SCHEMES
from strandline.storage.object_store import ObjectStorage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PLUGIN_GROUP = "strandline.storage"
HDFS_SCHEMES = ("hdfs", "viewfs")


def open_storage(url: str, options: Mapping[str, str] | None = None, *, private: bool = True) -> Storage:
    """The storage whose root is `url`: a local path, or a URL (`file`, `s3`, `gs`, `az`, `hdfs`, or a plugin's scheme).

    `options` are settings of an object store (`endpoint`, `region`, `access_key_id`, ...) or of HDFS, and override
    those from the environment. Local files take none. Unless the storage is `private`, other users may read local
    files as the umask says. Opening contacts and creates nothing. Raises `ConfigError` for an unknown scheme, an
    unknown option, or a plugin that cannot be loaded.
    """
    storage = _open(url, options)
    storage.options = MappingProxyType(dict(options or {}))
    storage.private = private
    return storage


def is_local(url: str) -> bool:
    """Whether `url` is a path or a `file://` URL."""
    return _scheme(url) == "file"


def _open(url: str, options: Mapping[str, str] | None) -> Storage:
    if has_password(url):
        raise ConfigError(f"the storage {url!r} is refused: its URL holds a password; pass it as a storage option")
    scheme = _scheme(url)
    if scheme == "file":
        return LocalStorage(url)
    if scheme in (*OBJECT_STORE_SCHEMES, *HDFS_SCHEMES):
        _require_slashes(url, scheme)
        return ObjectStorage(url, options) if scheme in OBJECT_STORE_SCHEMES else _open_hdfs(url, options)
    plugins = _plugins(tuple(sys.path))
    names = [name for name in plugins if scheme == name or (name.endswith("+") and scheme.startswith(name))]
    if not names:
        # A name with "+" wraps another scheme. Such plugins are for tests, so the error does not offer them.
        whole = [name for name in plugins if not name.endswith("+")]
        supported = ", ".join(f"{name}://" for name in ("file", *OBJECT_STORE_SCHEMES, *HDFS_SCHEMES, *whole))
        raise ConfigError(
            f"the storage {url!r} cannot be opened: its scheme is not supported; supported: a local path, "
            f"{supported}. If another package provides the scheme, install that package on every host"
        )
    _require_slashes(url, scheme)
    return _opened_by(plugins[max(names, key=len)], url, options)


def _require_slashes(url: str, scheme: str) -> None:
    if not re.match(r"[^:]+://", url):
        raise ConfigError(f"the storage {url!r} is refused: after {scheme}: come two slashes, as in {scheme}://place")


def _open_hdfs(url: str, options: Mapping[str, str] | None) -> Storage:
    try:
        from strandline.storage.hdfs import HdfsStorage  # its client is an extra of the package
    except ImportError as error:
        raise ConfigError(
            f"the storage {url!r} needs the HDFS client, which is not installed: {error}; run pip install "
            '"strandline[hdfs]" on every host'
        ) from error
    return HdfsStorage(url, options)


def _scheme(url: str) -> str:
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):/", url)
    return match.group(1).lower() if match else "file"


@lru_cache(maxsize=4)
def _plugins(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """The plugins by name. The search reads files of every installed package, so the result is kept for each `path`."""
    from importlib.metadata import entry_points  # slow to import, and only needed for a scheme that is not built in

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for plugin in entry_points(group=PLUGIN_GROUP):
        found[plugin.name.lower()] = (*found.get(plugin.name.lower(), ()), plugin)
    return found


def _opened_by(plugins: tuple[EntryPoint, ...], url: str, options: Mapping[str, str] | None) -> Storage:
    plugin = plugins[0]
    if len({one.value for one in plugins}) > 1:
        raise ConfigError(
            f"the storage {url!r}: several packages provide the scheme {plugin.name!r}: "
            f"{' and '.join(map(_origin, plugins))}; uninstall all but one"
        )
    try:
        make = plugin.load()
    except Exception as error:  # the import of another package may raise anything
        raise ConfigError(
            f"the storage {url!r}: the plugin {_origin(plugin)} cannot be loaded: {type(error).__name__}: {error}; "
            "install what it needs, or another version of it"
        ) from error
    storage = make(url, options)
    if not isinstance(storage, Storage):
        raise ConfigError(
            f"the storage {url!r}: the plugin {_origin(plugin)} returned {type(storage).__name__}, which is not a "
            "strandline.storage.Storage; use another version of it"
        )
    return storage


def _origin(plugin: EntryPoint) -> str:
    package = f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist is not None else "an unknown package"
    return f"{plugin.value} of {package}"
