"""Commands in a real terminal: a pseudo-terminal of a given size, with keys that are pressed."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from contextlib import suppress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-B0-2]|\r")


def in_terminal(
    *arguments: str, press: Mapping[str, bytes] | None = None, code: int = 0, seconds: float = 120.0
) -> str:
    """Run `strandline` in a terminal, check its exit code, and return what the terminal showed, without colours.

    `press` gives keys to press once a text is on the screen.
    """
    waiting = dict(press or {})
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 160, 0, 0))
    command = [sys.executable, "-m", "strandline.admin.cli.main", *arguments]
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    os.close(slave)
    shown = b""
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    read = os.read(master, 65536)
                except OSError:  # the last process has closed the terminal
                    break
                if not read:
                    break
                shown += read
            for text in [text for text in waiting if text.encode() in shown]:
                os.write(master, waiting.pop(text))
        ended = process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        os.close(master)
        with suppress(ProcessLookupError):
            process.kill()
        process.wait(10)
    text = ESCAPES.sub("", shown.decode(errors="replace"))
    assert ended == code, text
    assert not waiting, text
    return text
