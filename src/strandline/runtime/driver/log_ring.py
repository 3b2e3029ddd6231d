"""The driver's own log: the last lines of Strandline's loggers in this process, in memory."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

from strandline.logs import LOGGER, environment_format, formatter
from strandline.runtime.protocol.logs import DRIVER, LogText

KEPT_LINES: Final = 2000
"""How many events are kept."""
LONGEST_EVENT: Final = 20_000
"""Characters of an event that are kept: a traceback of Spark's can be much longer."""


class LogRing(logging.Handler):
    """Keeps the last events. It changes no level, so it keeps what the user's levels let through."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._secrets: set[str] = set()
        self._more = False
        self.hide(())

    def hide(self, secrets: Iterable[str]) -> None:
        """Show none of `secrets` in events from now on."""
        self._secrets.update(secrets)
        self.setFormatter(formatter(environment_format(), secrets=sorted(self._secrets)))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)[:LONGEST_EVENT]
        except Exception:  # noqa: BLE001 - a message that does not fit its arguments; logging's own way to say so
            self.handleError(record)
            return
        self._more = self._more or len(self._lines) == KEPT_LINES
        self._lines.append(line)
        last_resort = logging.lastResort
        if last_resort is not None and record.levelno >= last_resort.level and self._is_alone(record.name):
            last_resort.handle(record)

    def _is_alone(self, name: str) -> bool:
        """Whether no other handler gets an event: Python would write it to standard error if it were not for this."""
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True

    def end(self, max_bytes: int) -> LogText:
        """The last lines, at most so many bytes of them."""
        kept: list[str] = []
        left = max_bytes
        lines = list(self._lines)
        for line in reversed(lines):
            left -= len(line.encode()) + 1
            if left < 0:
                break
            kept.append(line)
        text = "".join(f"{line}\n" for line in reversed(kept))
        return LogText(DRIVER, text, self._more or len(kept) < len(lines))


_ring: LogRing | None = None
_making = threading.Lock()


def driver_log() -> LogRing:
    """The ring of this process. It listens from the first call on."""
    global _ring
    with _making:
        if _ring is None:
            _ring = LogRing()
            logging.getLogger(LOGGER).addHandler(_ring)
        return _ring
