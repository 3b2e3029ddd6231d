"""Decides whether a failed run restarts, and after how many seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from strandline.config import Config


@dataclass(slots=True)
class RestartStrategy:
    """Counts failures against `Config.restart_*`. The count starts anew after `reset_after` seconds without failure."""

    kind: str
    attempts: int
    delay: float
    max_delay: float
    multiplier: float
    reset_after: float
    _failures: int = 0
    _last: float = field(default=float("-inf"))

    @classmethod
    def of(cls, config: Config) -> RestartStrategy:
        """The strategy that the options name."""
        return cls(
            config.restart_strategy,
            config.restart_attempts,
            config.restart_delay,
            config.restart_max_delay,
            config.restart_multiplier,
            config.restart_reset_after,
        )

    def after_failure(self, now: float) -> float | None:
        """How many seconds to wait before the restart; None if the run does not restart."""
        if now - self._last > self.reset_after:
            self._failures = 0
        self._last = now
        self._failures += 1
        if self.kind == "none" or 0 <= self.attempts < self._failures:
            return None
        if self.kind == "fixed-delay":
            return self.delay
        exponent = min(self._failures - 1, 64)  # far above any sensible max_delay, and no overflow
        return min(self.max_delay, self.delay * self.multiplier**exponent)
