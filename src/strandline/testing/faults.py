"""A storage that is slow or fails on purpose. Its URL selects it, so every process of a run has the same faults.

`faulty+file:///folder` is the storage `file:///folder` with the faults that the storage options name. Other storages
work too (`faulty+s3://...`). They get the options that are not listed in `FaultOptions`.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from strandline.errors import ConfigError, StorageError
from strandline.storage import Storage, StoredFile, open_storage

PREFIX = "faulty+"
"""The prefix of the URL of such a storage."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """The faults, as storage options. All values are strings, because storage options are strings."""

    bytes_per_second: str = ""
    """The total rate of all slow calls of a process, or the path of a local file that holds the rate, so that a test
    can change it during a run."""
    slow_pattern: str = ""
    """Calls whose text `operation path` matches this regular expression are slow. Default: all uploads."""
    fail_pattern: str = ""
    """Calls whose text `operation path` matches this regular expression fail without any effect."""
    fail_times: str = ""
    """The number of matching calls that fail; later ones succeed. Default: all fail. With a `switch`, all processes
    count together."""
    kill_pattern: str = ""
    """A process is killed, as with kill -9, when it makes a call whose text `before operation path` or
    `after operation path` matches this regular expression."""
    switch: str = ""
    """A local file that all processes can access. Faults happen only while it exists. Calls that wait because of the
    rate continue when it is deleted. Default: faults always happen."""
    journal: str = ""
    """A local file that gets a line for every finished call: `operation path`, or `failed operation path`."""

    @classmethod
    def taken_from(cls, options: Mapping[str, str]) -> tuple[FaultOptions, dict[str, str]]:
        """Split `options` into the faults and the other options. Raises `ConfigError` for an invalid value."""
        names = {field.name for field in fields(cls)}
        faults = cls(**{name: value for name, value in options.items() if name in names})
        for name in ("fail_times", "slow_pattern", "fail_pattern", "kill_pattern"):
            value = getattr(faults, name)
            try:
                int(value or "0") if name == "fail_times" else re.compile(value)
            except (ValueError, re.error) as error:
                raise ConfigError(f"storage option {name} = {value!r} cannot be used: {error}") from error
        faults.rate()
        return faults, {name: value for name, value in options.items() if name not in names}

    def rate(self) -> float:
        """The bytes per second at this moment. Raises `ConfigError` for an invalid value."""
        given = self.bytes_per_second or "inf"
        text = Path(given).read_text() if given.startswith("/") else given
        try:
            rate = float(text)
        except ValueError:
            rate = 0.0
        if rate <= 0:
            raise ConfigError(f"storage option bytes_per_second = {text!r} cannot be used; allowed: a number above 0")
        return rate


class FaultyStorage(Storage):
    """Another storage, with faults."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        """Open the storage that follows `PREFIX` in `url`."""
        self._faults, others = FaultOptions.taken_from(options or {})
        self._inner = open_storage(url.removeprefix(PREFIX), others)
        # The absolute root of the inner storage, so that the URL names the same place in every process.
        inner = self._inner.url
        self.url = PREFIX + (inner if "://" in inner else f"file://{inner}")
        self._lock = threading.Lock()
        self._asked = 0.0
        self._passed = 0.0
        self._passed_at = time.monotonic()
        self._failed = 0

    def read(self, path: str) -> bytes:
        with self._call("read", path):
            return self._inner.read(path)

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._call("read", path, length):
            return self._inner.read_range(path, offset, length)

    def write(self, path: str, data: bytes) -> None:
        with self._call("write", path, len(data)):
            self._inner.write(path, data)

    def create(self, path: str, data: bytes) -> None:
        with self._call("create", path, len(data)):
            self._inner.create(path, data)

    def upload(self, source: Path, path: str) -> None:
        with self._call("upload", path, source.stat().st_size if source.is_file() else 0):
            self._inner.upload(source, path)

    def download(self, path: str, target: Path) -> None:
        with self._call("download", path):
            self._inner.download(path, target)
            self._slow_down(f"download {path}", target.stat().st_size)

    def rename(self, source: str, target: str) -> None:
        with self._call("rename", source):
            self._inner.rename(source, target)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete file by file, so that a pattern can match a single one."""
        for path in paths:
            with self._call("delete", path):
                self._inner.delete([path])

    def list(self, prefix: str = "", after: str | None = None) -> Iterator[StoredFile]:
        with self._call("list", prefix):
            return self._inner.list(prefix, after)

    def exists(self, path: str) -> bool:
        with self._call("exists", path):
            return self._inner.exists(path)

    # --- the faults ----------------------------------------------------------------------------

    @contextmanager
    def _call(self, operation: str, path: str, size: int = 0) -> Iterator[None]:
        """Wait as long as `size` bytes take, fail or kill if the options say so, and write the journal."""
        call = f"{operation} {path}"
        try:
            self._slow_down(call, size)
            if self._switched_on():
                self._fail_if_told_to(call)
            self._die_if_told_to(f"before {call}")
            yield
            self._die_if_told_to(f"after {call}")
        except BaseException:
            self._note(f"failed {call}")
            raise
        self._note(call)

    def _slow_down(self, call: str, size: int) -> None:
        if size and self._switched_on() and re.search(self._faults.slow_pattern or "^upload ", call):
            self._wait_for(size)

    def _switched_on(self) -> bool:
        return not self._faults.switch or Path(self._faults.switch).exists()

    def _wait_for(self, size: int) -> None:
        """Return when all bytes that were requested earlier, and these, have passed at the rate."""
        with self._lock:
            self._pass()
            self._asked += size
            mine = self._asked
        while self._switched_on():
            with self._lock:
                self._pass()
                if self._passed >= mine:
                    return
            time.sleep(0.02)

    def _pass(self) -> None:
        now = time.monotonic()
        self._passed = min(self._asked, self._passed + (now - self._passed_at) * self._faults.rate())
        self._passed_at = now

    def _fail_if_told_to(self, call: str) -> None:
        pattern = self._faults.fail_pattern
        if pattern and re.search(pattern, call) and self._one_more_failure():
            raise StorageError(f"{call}: this storage fails on purpose (fail_pattern = {pattern!r})")

    def _die_if_told_to(self, moment: str) -> None:
        pattern = self._faults.kill_pattern
        if pattern and self._switched_on() and re.search(pattern, moment):
            self._note(f"killed {moment}")
            os.kill(os.getpid(), signal.SIGKILL)

    def _note(self, line: str) -> None:
        if self._faults.journal:
            with Path(self._faults.journal).open("a") as journal:
                # One short write, so that the lines of several processes do not mix.
                journal.write(f"{line}\n")

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
    """Count a failure as one byte in the switch file. False if there are `limit` already, or the file is gone."""
    try:
        with switch.open("r+b") as count:
            fcntl.flock(count, fcntl.LOCK_EX)
            if len(count.read()) >= limit:
                return False
            count.write(b".")
            return True
    except FileNotFoundError:
        return False
