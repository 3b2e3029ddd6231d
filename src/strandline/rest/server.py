"""The server of the REST interface and the page: one in a process for each address, in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strandline.config import Config, ports_of
from strandline.errors import ConfigError, StrandlineError
from strandline.observe.views import Jobs, JobView
from strandline.rest.access import Access, new_token, with_token

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from strandline.rest.triggers import Triggers

log = logging.getLogger(__name__)

FIRST_PORT = 8081
THREAD = "strandline-rest-"
"""The beginning of the name of a server's thread. It outlives the runs that the server shows."""
KEPT_RUNS = 50
"""How many runs a server shows. Beyond that, those that ended first are left out."""
START_SECONDS = 15.0
STOP_SECONDS = 5.0
LINGER_SECONDS = 3.0
"""How long a process that ends waits for clients to ask for the ends of their operations."""


@dataclass(frozen=True, slots=True)
class RestSettings:
    """Where a server listens, and whom it answers.

    Attributes:
        bind: The address to listen at.
        ports: The ports to try, in this order; 0 is any free one.
        token: The token of changing calls; None makes one that lives as long as the process.
        hosts: Further names under which clients reach the server.
        token_for_reads: Whether reading needs the token on loopback, too.
    """

    bind: str = "127.0.0.1"
    ports: range = range(FIRST_PORT, FIRST_PORT + 50)
    token: str | None = field(default=None, repr=False)
    hosts: tuple[str, ...] = ()
    token_for_reads: bool = False

    @classmethod
    def of(cls, config: Config) -> RestSettings:
        """The settings that the options of a job ask for. Raises `ConfigError` if they ask for no server."""
        ports = ports_of(config.rest_port)
        if ports is None:
            raise ConfigError('rest_port is "off", so this job has no REST interface and no page')
        return cls(config.rest_bind, ports, config.rest_token, config.rest_hosts)


@dataclass(frozen=True, slots=True)
class Served:
    """A job, or several, that a server shows.

    Attributes:
        url: Where the page is, without the token.
        token: The token of changing calls.
    """

    url: str
    token: str = field(repr=False)
    _close: Callable[[], None] = field(repr=False)

    @property
    def url_with_token(self) -> str:
        """The link that opens the page with its token. Whoever has it can steer the job, so do not log it."""
        return with_token(self.url, self.token)

    def close(self) -> None:
        """Show it no longer. The server stops when it shows nothing any more."""
        self._close()


class ShownJobs:
    """The runs of this process that a server shows, one for each job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._views: dict[str, JobView] = {}

    def add(self, view: JobView) -> None:
        """Show a run in place of earlier runs of the same job."""
        with self._lock:
            self._views.pop(view.id, None)
            self._views[view.id] = view
            for id, other in list(self._views.items()):
                if len(self._views) <= KEPT_RUNS:
                    break
                if other is not view and other.control is None:
                    del self._views[id]

    def remove(self, view: JobView) -> bool:
        """Show a run no longer. Returns whether nothing is left."""
        with self._lock:
            if self._views.get(view.id) is view:
                del self._views[view.id]
            return not self._views

    def all(self) -> Sequence[JobView]:
        """The jobs, newest first."""
        with self._lock:
            return list(reversed(self._views.values()))

    def get(self, job: str) -> JobView | None:
        """The newest run of the job of that id or name."""
        with self._lock:
            found = self._views.get(job)
            return found or next((view for view in reversed(self._views.values()) if view.name == job), None)


@dataclass(slots=True)
class _Shared:
    jobs: ShownJobs
    server: _Server


_lock = threading.Lock()
_running: set[_Server] = set()
_servers: dict[tuple[int, RestSettings], _Shared] = {}
"""The servers of this process. The process id keeps a forked process from taking its parent's servers for its own."""


def serve(view: JobView, config: Config | RestSettings) -> Served:
    """Show a run. Runs of one process with equal settings share a server, and stay visible after they ended.

    Raises `ConfigError` if the one port is taken, or the address is none of this host's.
    """
    settings = config if isinstance(config, RestSettings) else RestSettings.of(config)
    key = (os.getpid(), settings)
    with _lock:
        shared = _servers.get(key)
        if shared is None:
            jobs = ShownJobs()
            shared = _servers[key] = _Shared(jobs, _start(jobs, settings))
        shared.jobs.add(view)

    def close() -> None:
        with _lock:
            if shared.jobs.remove(view) and _servers.get(key) is shared:
                del _servers[key]
                shared.server.stop()

    return Served(shared.server.url, shared.server.token, close)


def serve_jobs(jobs: Jobs, settings: RestSettings) -> Served:
    """Show jobs by a server of their own, as `strandline ui` does. Raises `ConfigError` as `serve` does."""
    server = _start(jobs, settings)
    return Served(server.url, server.token, server.stop)


def _start(jobs: Jobs, settings: RestSettings) -> _Server:
    access = Access(settings.token or new_token(), settings.bind, settings.hosts, settings.token_for_reads)
    listening = _listen(settings)
    try:
        server = _Server(jobs, access, listening)
        server.start()
    except BaseException:
        listening.close()
        raise
    if not _running:
        atexit.register(_linger)
    _running.add(server)
    log.info("REST interface and page at %s", server.url)
    return server


def _linger() -> None:
    deadline = time.monotonic() + LINGER_SECONDS
    for server in list(_running):
        if server.pid == os.getpid():
            server.triggers.await_told(deadline - time.monotonic())


class _Server:
    """A uvicorn server in a daemon thread. It never touches the signal handlers of the process."""

    def __init__(self, jobs: Jobs, access: Access, listening: socket.socket) -> None:
        self.token = access.token
        self.url = _url(access.bind, listening.getsockname()[1])
        self._listening = listening
        self._ended = threading.Event()
        self.pid = os.getpid()
        app, self._uvicorn = _uvicorn_server(jobs, access)
        self.triggers: Triggers = app.state.service.triggers
        self._thread = threading.Thread(target=self._run, name=f"{THREAD}{self.url}", daemon=True)

    def start(self) -> None:
        """Returns when the server answers."""
        self._thread.start()
        for _ in range(int(START_SECONDS / 0.01)):
            if self._uvicorn.started:
                return
            if self._ended.wait(0.01):
                break
        raise StrandlineError(f"the REST interface at {self.url} did not start: see the log for the cause")

    def stop(self) -> None:
        """Stop listening, and give requests that are under way a moment to end."""
        _running.discard(self)
        self._uvicorn.should_exit = True
        if self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve(sockets=[self._listening]))
        except Exception:
            log.exception("the REST interface at %s has ended", self.url)
        finally:
            with suppress(OSError):
                self._listening.close()
            self._ended.set()


def _uvicorn_server(jobs: Jobs, access: Access) -> tuple[FastAPI, uvicorn.Server]:
    import uvicorn

    from strandline.rest.app import create_app
    from strandline.rest.connections import HEADER_BYTES, MAX_CONNECTIONS, BoundedProtocol

    errors = logging.getLogger("uvicorn.error")
    if errors.level == logging.NOTSET:
        errors.setLevel(logging.WARNING)  # not what a server says when it starts and ends; unless the user wants it
    app = create_app(jobs, access)
    return app, uvicorn.Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
    )


def _listen(settings: RestSettings) -> socket.socket:
    if len(settings.ports) == 1:
        try:
            return _listen_at(settings.bind, settings.ports[0])
        except _PortTakenError as error:
            raise ConfigError(
                f"rest_port: port {settings.ports[0]} of {settings.bind} is in use; set rest_port to a free port, or "
                f"leave the option out for the first free one from {FIRST_PORT} on"
            ) from error
    for port in settings.ports:
        with suppress(_PortTakenError):
            return _listen_at(settings.bind, port)
    raise StrandlineError(
        f"all ports from {settings.ports[0]} to {settings.ports[-1]} of {settings.bind} are in use, so there is no "
        'REST interface and no page; set rest_port to a free port or another range, or to "off"'
    )


class _PortTakenError(Exception):
    """Another process, or another server of this one, listens at the port."""


def _listen_at(bind: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"rest_bind: {bind!r} is no address of this host: {error}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        # Without it, a port stays taken for a minute after a server closed connections there.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        if isinstance(error, PermissionError):
            raise ConfigError(f"rest_port: this user may not listen at port {port}; take one above 1023") from error
        if error.errno == errno.EADDRINUSE:
            raise _PortTakenError(f"port {port} of {bind} is in use") from error
        raise ConfigError(f"rest_bind: nothing can listen at {bind}, port {port}: {error}") from error
    return listening


def _url(bind: str, port: int) -> str:
    shown = socket.gethostname() if bind in ("0.0.0.0", "::") else bind
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
