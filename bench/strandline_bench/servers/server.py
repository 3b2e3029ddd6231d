"""A server in processes of its own on loopback, which a test or a benchmark may kill, freeze and restart."""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path

import psutil

from strandline.errors import StrandlineError

PATIENCE = 60.0
"""Seconds for a server to answer."""


class ServerMissingError(StrandlineError):
    """The programs of a server are not on this machine."""


class Server(ABC):
    """It keeps its port and its data, whatever happens to its processes."""

    ORDERLY_END = signal.SIGTERM

    def __init__(self, folder: Path, user: str | None = None) -> None:
        """The processes run as `user`, by default as the caller does."""
        self.folder = folder
        self._user = user
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """What runs the server until it is told to end."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether a client gets a reply from a server that has opened its port."""

    def start(self) -> None:
        """Returns when the server answers."""
        self._process = self._run(self.command())
        deadline = time.monotonic() + PATIENCE
        while not self._ready():
            if time.monotonic() > deadline:
                raise StrandlineError(f"{type(self).__name__} does not answer after {PATIENCE:g} s: {self.log()}")
            time.sleep(0.02)  # between two looks

    def stop(self) -> None:
        """An orderly end."""
        self._end(self.ORDERLY_END)

    def kill(self) -> None:
        """SIGKILL to all its processes: connections break, and what the server had in memory is lost."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """The server keeps its connections, and answers nobody."""
        for process in self._signal(signal.SIGSTOP):
            with contextlib.suppress(psutil.NoSuchProcess):
                while process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    time.sleep(0.001)  # the signal may take a moment

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def ensure_running(self) -> None:
        """Undo whatever was done to the processes."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        else:
            self.thaw()

    def log(self) -> str:
        """The end of what the server has printed."""
        return (self.folder / "log").read_text()[-3000:]

    def _run(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            # A session of its own: Ctrl-C reaches the caller alone, which then ends the server.
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                user=self._user,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                pass
        except OSError:
            return False
        return self.answers()

    def _signal(self, number: signal.Signals) -> list[psutil.Process]:
        """Returns those that got the signal."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        reached = []
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                reached.append(process)
        return reached

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._signal(signal.SIGCONT)
            children = psutil.Process(self._process.pid).children(recursive=True)
            if number == signal.SIGKILL:
                self._signal(number)
            else:
                self._process.send_signal(number)
            self._process.wait(60)
            psutil.wait_procs(children, 60)
        self._process = None


def _end_with_parent() -> None:
    """A caller that is killed leaves no server behind. Only Linux can do this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def free_port() -> int:
    """A port of loopback that nobody uses at the moment.

    It is below the range from which the system takes the ports of outgoing connections: one of these could take it
    before the server does, also while the server is down.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
