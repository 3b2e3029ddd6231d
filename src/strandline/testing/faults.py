"""A storage that is slow or fails on purpose, in every process of a run because its URL says so.

`faulty+file:///folder` is the storage `file:///folder` with the faults that the storage options name; any other storage
works as well (`faulty+s3://...`), and gets the options that are not listed in `FaultOptions`.
"""

from __future__ import annotations

import fcntl
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from strandline.errors import ConfigError, StorageError
from strandline.storage import Storage, StoredFile, open_storage

PREFIX = "faulty+"
"""How the URL of such a storage begins."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """The faults, as storage options name them; texts, for that is what storage options are."""

    bytes_per_second: str = ""
    """The rate of uploads, shared by all uploads of a process."""
    slow_pattern: str = ""
    """Only calls whose text `operation path` this regular expression finds are slowed down; default: all uploads."""
    fail_pattern: str = ""
    """Calls whose text `operation path` this regular expression finds fail, without any effect."""
    fail_times: str = ""
    """How many calls fail before the rest go well; default: all. Counted over all processes if there is a `switch`."""
    switch: str = ""
    """A local file that every process sees: there are faults only while it exists. Default: always."""

    @classmethod
    def taken_from(cls, options: Mapping[str, str]) -> tuple[FaultOptions, dict[str, str]]:
        """The faults among `options`, and the other options. A value that cannot be used is a `ConfigError`."""
        names = {field.name for field in fields(cls)}
        faults = cls(**{name: value for name, value in options.items() if name in names})
        for name, parse in (
            ("bytes_per_second", float),
            ("fail_times", int),
            ("slow_pattern", re.compile),
            ("fail_pattern", re.compile),
        ):
            value = getattr(faults, name)
            try:
                usable = not value or parse(value)
            except (ValueError, re.error) as error:
                raise ConfigError(f"storage option {name} = {value!r} cannot be used: {error}") from error
            if not usable and name == "bytes_per_second":
                raise ConfigError(f"storage option {name} = {value!r} cannot be used; allowed: a rate above 0")
        return faults, {name: value for name, value in options.items() if name not in names}


class FaultyStorage(Storage):
    """Another storage, with faults."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        """Open the storage behind `url`, which begins with `PREFIX`."""
        self._faults, others = FaultOptions.taken_from(options or {})
        self._inner = open_storage(url.removeprefix(PREFIX), others)
        # The root is that of the inner storage, absolute, so that the same URL means the same place everywhere.
        inner = self._inner.url
        self.url = PREFIX + (inner if "://" in inner else f"file://{inner}")
        self._rate = float(self._faults.bytes_per_second or "inf")
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._failed = 0

    def read(self, path: str) -> bytes:
        self._meet("read", path)
        return self._inner.read(path)

    def write(self, path: str, data: bytes) -> None:
        self._meet("write", path, len(data))
        self._inner.write(path, data)

    def create(self, path: str, data: bytes) -> None:
        self._meet("create", path, len(data))
        self._inner.create(path, data)

    def upload(self, source: Path, path: str) -> None:
        self._meet("upload", path, source.stat().st_size if source.is_file() else 0)
        self._inner.upload(source, path)

    def download(self, path: str, target: Path) -> None:
        self._meet("download", path)
        self._inner.download(path, target)

    def rename(self, source: str, target: str) -> None:
        self._meet("rename", source)
        self._inner.rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        doomed = list(paths)
        for path in doomed:
            self._meet("delete", path)
        self._inner.delete(doomed)

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        self._meet("list", prefix)
        return self._inner.list(prefix, after)

    def exists(self, path: str) -> bool:
        self._meet("exists", path)
        return self._inner.exists(path)

    # --- the faults ----------------------------------------------------------------------------

    def _meet(self, operation: str, path: str, size: int = 0) -> None:
        """Wait for as long as `size` bytes take, then fail if the call is one that fails."""
        faults = self._faults
        if faults.switch and not Path(faults.switch).exists():
            return
        call = f"{operation} {path}"
        if re.search(faults.slow_pattern or "^upload ", call):
            self._wait_for(size)
        if faults.fail_pattern and re.search(faults.fail_pattern, call) and self._one_more_failure():
            raise StorageError(f"{call}: this storage fails on purpose (fail_pattern = {faults.fail_pattern!r})")

    def _wait_for(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = free_at = max(now, self._free_at) + size / self._rate
        time.sleep(free_at - now)

    def _one_more_failure(self) -> bool:
        if not self._faults.fail_times:
            return True
        limit = int(self._faults.fail_times)
        with self._lock:
            if self._faults.switch:
                return _counted(Path(self._faults.switch), limit)
            self._failed += 1
            return self._failed <= limit


def _counted(switch: Path, limit: int) -> bool:
    """Note one more failure in the switch itself, a byte each; False once there are `limit`, or it is gone."""
    try:
        with switch.open("r+b") as count:
            fcntl.flock(count, fcntl.LOCK_EX)
            if len(count.read()) >= limit:
                return False
            count.write(b".")
            return True
    except FileNotFoundError:
        return False
