"""A storage that is slow, fails or lies on purpose. Its URL selects it, so every process of a run has the same faults.

`faulty+file:///folder` is the storage `file:///folder` with the faults that the storage options name. Other storages
work too (`faulty+s3://...`). They get the options that are not listed in `FaultOptions`.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from strandline.errors import StorageError, UnknownOutcomeError
from strandline.storage import Storage, StoredFile, open_storage
from strandline.testing.fault_options import FaultOptions, Turns
from strandline.testing.stale import StaleStorage
from strandline.testing.triggers import Control, Trigger

PREFIX = "faulty+"
"""The prefix of the URL of such a storage."""

_WRITES = ("write", "create", "upload", "rename")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class FaultyStorage(Storage):
    """Another storage, with faults."""

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        """Open the storage that follows `PREFIX` in `url`."""
        self._faults, others = FaultOptions.taken_from(options or {})
        self._inner = open_storage(url.removeprefix(PREFIX), others)
        # The absolute root of the inner storage, so that the URL names the same place in every process.
        inner = self._inner.url
        self.url = PREFIX + (inner if "://" in inner else f"file://{inner}")
        self.must_be_probed = self._inner.must_be_probed
        if self._faults.stale_folder:
            self._inner = StaleStorage(
                self._inner,
                Path(self._faults.stale_folder),
                float(self._faults.stale_seconds or "1"),
                self._faults.stale_pattern,
                self._switched_on,
            )
        self._trigger = Trigger(Path(self._faults.trigger)) if self._faults.trigger else None
        self._lock = threading.Lock()
        self._asked = 0.0
        self._passed = 0.0
        self._passed_at = time.monotonic()
        self._turns = Turns(self._faults)

    @property
    def private(self) -> bool:
        """See `Storage.private`."""
        return self._inner.private

    @private.setter
    def private(self, value: bool) -> None:
        self._inner.private = value

    def read(self, path: str) -> bytes:
        with self._call("read", path):
            data = self._inner.read(path)
            self._slow_down(f"read {path}", len(data))
            return data

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

    def unfinished(self, prefix: str = "") -> Iterator[StoredFile]:
        return self._inner.unfinished(prefix)

    def delete_unfinished(self, paths: Iterable[str]) -> None:
        self._inner.delete_unfinished(paths)

    # --- the faults ----------------------------------------------------------------------------

    @contextmanager
    def _call(self, operation: str, path: str, size: int = 0) -> Iterator[None]:
        """Wait as long as `size` bytes take, do the fault that is due, and write the journal."""
        call = f"{operation} {path}"
        try:
            self._delay(call)
            self._slow_down(call, size)
            mode = self._fault_due(call)
            if mode and not mode.endswith("after"):
                self._do(mode, call)
            self._die_if_told_to(f"before {call}")
            try:
                with self._trigger.around(f"storage {call}", _failure) if self._trigger is not None else nullcontext():
                    yield
            finally:
                # The caller does not learn how the call ended, so this error replaces an error of the storage, too.
                if mode.endswith("after"):
                    self._do(mode, call)
            self._die_if_told_to(f"after {call}")
        except BaseException:
            self._note(f"failed {call}")
            raise
        self._note(call)

    def _fault_due(self, call: str) -> str:
        """The `fail_mode` if this call is one that fails, or ""."""
        pattern = self._faults.fail_pattern
        if pattern and self._switched_on() and re.search(pattern, call) and self._turns.take():
            return self._faults.fail_mode or "before"
        return ""

    def _do(self, mode: str, call: str) -> None:
        self._note(f"fault {mode} {os.getpid()} {call}")
        told = f"{call}: this storage fails on purpose (fail_pattern = {self._faults.fail_pattern!r}"
        kind = mode.removesuffix("-after")
        if kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[kind])
        elif kind == "hang":
            self._hang()
        elif mode == "before":
            raise StorageError(f"{told})")
        elif call.split(" ", 1)[0] in _WRITES:
            raise UnknownOutcomeError(f"{told}, fail_mode = {mode!r}); the outcome is unknown")
        else:
            raise StorageError(f"{told}, fail_mode = {mode!r})")

    def _hang(self) -> None:
        """Wait until `hang_seconds` are over, or the switch is deleted."""
        until = time.monotonic() + float(self._faults.hang_seconds or "inf")
        while time.monotonic() < until and self._switched_on():
            time.sleep(0.02)

    def _delay(self, call: str) -> None:
        if self._faults.delay_seconds and self._is_slow(call):
            time.sleep(float(self._faults.delay_seconds))

    def _slow_down(self, call: str, size: int) -> None:
        if size and self._is_slow(call):
            self._wait_for(size)

    def _is_slow(self, call: str) -> bool:
        return self._switched_on() and re.search(self._faults.slow_pattern or "^upload ", call) is not None

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


def _failure(text: str, control: Control) -> Exception:
    return UnknownOutcomeError(text) if control.after or control.seconds else StorageError(text)
