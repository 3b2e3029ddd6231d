"""The options of a storage with faults, and the count that says which call fails."""

from __future__ import annotations

import fcntl
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from strandline.errors import ConfigError

FAIL_MODES = ("before", "unknown", "after", "hang", "hang-after", "kill", "kill-after", "stop", "stop-after")


@dataclass(frozen=True, slots=True)
class FaultOptions:
    """The faults, as storage options. All values are strings, because storage options are strings.

    An operation is `read` (also of a part), `write`, `create`, `upload`, `download`, `rename`, `delete` (file by file),
    `list` or `exists`. The text of a call is `operation path`.
    """

    bytes_per_second: str = ""
    """The total rate of all slow calls of a process, or the path of a local file that holds the rate, so that a test
    can change it during a run."""
    delay_seconds: str = ""
    """How long a slow call waits before it does anything, whatever its size."""
    slow_pattern: str = ""
    """Calls whose text matches this regular expression are slow. Default: all uploads."""
    fail_pattern: str = ""
    """Calls whose text matches this regular expression fail, as `fail_mode` says."""
    fail_mode: str = ""
    """What happens to a call that fails:

    - `before` (default): nothing happens, and the call raises `StorageError`.
    - `unknown`: nothing happens, and a write raises `UnknownOutcomeError`, as after a 503.
    - `after`: the call takes effect, and a write raises `UnknownOutcomeError`; other calls raise `StorageError`.
    - `hang`, `hang-after`: the caller waits for `hang_seconds`, or until the switch is deleted, before or after the
      call takes effect; then it goes on without an error.
    - `kill`, `kill-after`, `stop`, `stop-after`: the process that makes the call gets SIGKILL or SIGSTOP, before or
      after the call takes effect. It is the test that sends SIGCONT; the journal names the process.
    """
    fail_from: str = ""
    """The number of the first matching call that fails; 1 is the first one. Default: 1."""
    fail_times: str = ""
    """The number of calls that fail, from `fail_from` on; later ones succeed. Default: all. 0 only counts."""
    fail_every: str = ""
    """The failures begin anew after so many calls: bursts of `fail_times` (default: 1) failures, as of a store that
    throttles."""
    counter: str = ""
    """A local file in which all processes count the matching calls together, one byte each. Default: the `switch`; with
    neither, every process counts its own calls. It need not exist."""
    hang_seconds: str = ""
    """How long a call hangs. Default: until the switch is deleted."""
    kill_pattern: str = ""
    """A process is killed, as with kill -9, when it makes a call whose text `before operation path` or
    `after operation path` matches this regular expression."""
    stale_folder: str = ""
    """A local folder that all processes can access. With it, the storage shows a changed file as it was before, for
    `stale_seconds` after the change: reads, `exists` and listings do not see a new file, see the old content of a
    replaced one, and still see a deleted one. `create` is exact."""
    stale_seconds: str = ""
    """How long a change stays unseen. Default: 1."""
    stale_pattern: str = ""
    """The calls whose text matches this regular expression are given the old state. Default: all reads, `exists` and
    listings."""
    switch: str = ""
    """A local file that all processes can access. Faults happen only while it exists. Calls that wait because of the
    rate or hang continue when it is deleted. Default: faults always happen."""
    journal: str = ""
    """A local file that gets a line for every finished call: `operation path`, or `failed operation path`; and a line
    `fault mode pid operation path` for every fault of `fail_pattern`."""
    trigger: str = ""
    """The path of a control file: a fault at one chosen operation, counted over all processes. See `triggers`."""

    @classmethod
    def taken_from(cls, options: Mapping[str, str]) -> tuple[FaultOptions, dict[str, str]]:
        """Split `options` into the faults and the other options. Raises `ConfigError` for an invalid value."""
        names = {field.name for field in fields(cls)}
        faults = cls(**{name: value for name, value in options.items() if name in names})
        for name in names:
            value = getattr(faults, name)
            try:
                if name.endswith("_pattern"):
                    re.compile(value)
                elif name in ("fail_from", "fail_times", "fail_every"):
                    _natural(value or "0")
                elif name.endswith("_seconds"):
                    _natural(value or "0", float)
                elif name == "fail_mode" and value and value not in FAIL_MODES:
                    raise ValueError(f"allowed: {', '.join(FAIL_MODES)}")
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

    def due(self, call: int) -> bool:
        """Whether the matching call with this number fails; 1 is the first one."""
        at = call - int(self.fail_from or "1")
        if at < 0:
            return False
        if int(self.fail_every or "0"):
            return at % int(self.fail_every) < int(self.fail_times or "1")
        return not self.fail_times or at < int(self.fail_times)


class Turns:
    """Counts the calls that match `fail_pattern`, over all processes if the options name a file for it."""

    def __init__(self, faults: FaultOptions) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._own = 0

    def take(self) -> bool:
        """Count a call. Returns whether it fails."""
        faults = self._faults
        if not (faults.fail_from or faults.fail_times or faults.fail_every):
            return True
        with self._lock:
            if faults.counter:
                number = _counted(Path(faults.counter), "ab")
            elif faults.switch:
                number = _counted(Path(faults.switch), "r+b")
            else:
                number = self._own = self._own + 1
            return number is not None and faults.due(number)


def _counted(file: Path, mode: str) -> int | None:
    """Add a byte to the file; returns how many there are now, or None if the file is gone."""
    try:
        with file.open(mode) as count:
            fcntl.flock(count, fcntl.LOCK_EX)
            number = count.seek(0, 2) + 1
            count.write(b".")
            return number
    except FileNotFoundError:
        return None


def _natural(text: str, kind: type[int] | type[float] = int) -> float:
    number = kind(text)
    if not number >= 0:
        raise ValueError("allowed: a number, 0 or above")
    return number
