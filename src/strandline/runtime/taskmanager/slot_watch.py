"""Watches one slot process, from its start to its end, and kills it when it is frozen."""

from __future__ import annotations

import logging
import subprocess
import threading

from strandline.errors import StrandlineError
from strandline.runtime.liveness.processes import progress
from strandline.runtime.liveness.silence import Silence
from strandline.runtime.liveness.threads import BackgroundThread, OnFailure
from strandline.runtime.protocol.calls import NOTHING
from strandline.runtime.protocol.slot_calls import PULSE_EVERY, Pulse, SlotClient

log = logging.getLogger(__name__)

RELAY_PATIENCE = 1.5
"""After how many times the heartbeat timeout a slot is killed because its relay is silent. The task manager beside the
relay gets the time between to kill the relay."""


class SlotWatch:
    """Asks a slot for a sign of life every second, and kills its process when there is none for `timeout` seconds.

    A slot that does not answer but works is not killed: user code or RocksDB may hold the interpreter for long. While
    the slot starts, its lines on standard output are the signs of life. If the relay that keeps a slot busy goes
    silent, the slot is killed, too: nothing else could take the slot from the relay.
    """

    def __init__(self, process: subprocess.Popen[bytes], name: str, timeout: float, on_failure: OnFailure) -> None:
        """`on_failure` gets the error of a slot's background thread that has died, and that of the watch itself."""
        self._process = process
        self._name = name
        self.killed = ""
        """Why the watch killed the process; empty if it did not."""
        self._timeout = timeout
        self._on_failure = on_failure
        self._silence = Silence()
        self._work = progress(process.pid)
        self._client: SlotClient | None = None
        self._ended = threading.Event()
        BackgroundThread(f"watch-{name}", self._watch, on_failure).start()

    def heard(self) -> None:
        """The slot gave a sign of life."""
        self._silence.heard()

    def ask(self, client: SlotClient) -> None:
        """The slot has started: it is asked for signs of life from now on."""
        self._silence.heard()
        self._client = client

    def end(self) -> None:
        """The slot is ended on purpose."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(PULSE_EVERY) and self._process.poll() is None:
            self._listen()
            if self._silence.seconds() > self._timeout and not self._ended.is_set():
                self._kill(f"it has been silent for {self._timeout:g} s")

    def _listen(self) -> None:
        client = self._client
        if client is not None:
            try:
                pulse = client.pulse(NOTHING)
                self._silence.heard()
                self._look_at(pulse)
                return
            except StrandlineError:
                pass  # whether the slot is lost or busy is seen by what its process does
        work = progress(self._process.pid)
        if work != self._work:
            self._work = work
            self._silence.heard()

    def _look_at(self, pulse: Pulse) -> None:
        if pulse.failure is not None:
            self._on_failure(pulse.failure.error())
        if pulse.silent_relay > self._timeout * RELAY_PATIENCE:
            self._kill(f"the relay that keeps it busy has been silent for {pulse.silent_relay:.0f} s")

    def _kill(self, why: str) -> None:
        log.warning("%s is killed: %s", self._name, why)
        self.killed = why
        self._process.kill()
