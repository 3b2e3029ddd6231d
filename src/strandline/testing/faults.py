"""A storage that is slow or fails on purpose, in every process of a run because its URL says so.

`faulty+file:///folder` is the storage `file:///folder` with the faults that the storage options name; any other storage
works as well (`faulty+s3://...`), and gets the options that are not listed in `FaultOptions`.
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
"""How the URL of such a storage begins."""


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """The faults, as storage options name them; texts, for that is what storage options are."""

    bytes_per_second: str = ""
    """The rate of uploads, and of downloads if `slow_pattern` names them, which a process makes one after the other; or
    a local file that holds the rate, so that a test can change it meanwhile."""
    slow_pattern: str = ""
    """Only calls whose text `operation path` this regular expression finds are slowed down; default: all uploads."""
    fail_pattern: str = ""
    """Calls whose text `operation path` this regular expression finds fail, without any effect."""
    fail_times: str = ""
    """How many calls fail before the rest go well; default: all. Counted over all processes if there is a `switch`."""
    kill_pattern: str = ""
    """The process that makes a call whose text `before operation path`, or `after operation path`, this regular
    expression finds is killed at that moment, as with kill -9."""
    switch: str = ""
    """A local file that every process sees: there are faults only while it exists, and whoever waits because of a rate
    goes on when it is gone. Default: always."""
    journal: str = ""
    """A local file that gets a line for every call that has ended: `operation path`, with `failed ` before it if so."""

    @classmethod
    def taken_from(cls, options: Mapping[str, str]) -> tuple[FaultOptions, dict[str, str]]:
        """The faults among `options`, and the other options. A value that cannot be used is a `ConfigError`."""
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
        """The bytes per second at this moment. One that cannot be used is a `ConfigError`."""
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
        """Open the storage behind `url`, which begins with `PREFIX`."""
        self._faults, others = FaultOptions.taken_from(options or {})
        self._inner = open_storage(url.removeprefix(PREFIX), others)
        # The root is that of the inner storage, absolute, so that the same URL means the same place everywhere.
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
        """One call for every file, so that the pattern can name one of them."""
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
        """Wait for as long as `size` bytes take, fail if the call is one that fails, and note how it ended."""
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
        """Return when all bytes that were asked for before, and these, have passed."""
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
            with Path(self._faults.journal).open("a") as journal:  # one short write: lines of processes do not mix
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
