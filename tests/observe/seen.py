"""A job that is seen as a test wants it to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from strandline.errors import StrandlineError
from strandline.observe.facts import JobFacts, job_id
from strandline.observe.views import JobControl, LogText
from strandline.runtime.driver.status import RunStatus
from tests.observe.generated import generated_facts


@dataclass
class Seen:
    """A job as a test wants it to be seen."""

    current: JobFacts
    control: JobControl | None = None

    @property
    def id(self) -> str:
        return self.current.id

    @property
    def name(self) -> str:
        return self.current.name

    def facts(self) -> JobFacts:
        return self.current

    def processes(self) -> Sequence[str]:
        return ()

    def log(self, process: str, max_bytes: int = 100_000) -> LogText:
        raise StrandlineError(f"no log of {process}")

    def become(self, status: RunStatus) -> None:
        self.current = msgspec.structs.replace(self.current, status=status)


def seen(checkpoint_dir: str, name: str = "visits", seed: int = 7) -> Seen:
    facts = generated_facts(name=name, seed=seed, checkpoints=3, samples=2)
    return Seen(msgspec.structs.replace(facts, id=job_id(checkpoint_dir, name), checkpoint_dir=checkpoint_dir))
