"""A request to change the parallelism of a running job, from the user's call to its answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from strandline.progress import Step
from strandline.runtime.driver.generation import Generation
from strandline.runtime.driver.recoveries import Began, Rescaling, moved_key_groups


@dataclass(slots=True)
class RescaleRequest:
    """A parallelism that a user asked for, and the times at which the steps towards it were done."""

    parallelism: int
    step: Step
    """Told what is being done next."""
    result: Future[Rescaling] = field(default_factory=Future)
    """What the user waits for."""
    began: Began = field(default_factory=Began.now)
    held: Began = field(default_factory=Began.now)
    """When the last batch with the old parallelism had ended."""
    covered: Began = field(default_factory=Began.now)
    """When the checkpoint of that batch was complete."""

    def rescaling(self, old: Generation, new: Generation, max_parallelism: int) -> Rescaling:
        """What the change took, now that the new generation runs."""
        return Rescaling(
            time=self.began.time,
            parallelism_before=old.parallelism,
            parallelism=self.parallelism,
            batch=old.batches.decided,
            duration_ms=self.began.ms_until(),
            pause_ms=self.held.ms_until(),
            checkpoint_ms=self.held.ms_until(self.covered.steady),
            slots_ms=new.opened.duration_ms,
            moved_key_groups=moved_key_groups(old.parallelism, self.parallelism, max_parallelism),
            local_bytes=new.opened.local_bytes,
            durable_bytes=new.opened.durable_bytes,
        )
