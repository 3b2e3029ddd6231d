"""One connection to PostgreSQL on which every call ends within a time, and whose errors are ours.

The server ends statements that take too long, as long as it lives. A watch ends the connection if the server does not
answer: a server that stands still keeps its connections and answers nobody.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from strandline.errors import SinkError, StorageFullError, StorageRefusedError
from strandline.redaction import without_values

if TYPE_CHECKING:
    import psycopg

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 10
LOCK_SECONDS = 10.0
"""How long a statement waits for a lock that another session holds."""
ANSWER_SECONDS = 30.0
"""How long the server may be silent after a request that is answered at once, such as BEGIN. For other statements this
time comes on top of `patience`, after which the server itself should have ended them."""
_LOCK_TRIES = 3

_MAY_PASS = ("08", "25", "40", "53", "55", "57", "58", "XX")
"""The beginnings of the SQLSTATEs that may pass: no connection, a transaction that stood still or is on a standby,
conflicts, no resources, locks, shutdown."""
_NO_RIGHT = "42501"
_REFUSED_AT_THE_DOOR = re.compile(
    r"password authentication failed|no password supplied|no pg_hba.conf entry|does not exist|permission denied|"
    r"is not permitted to log in"
)
"""The driver gives no SQLSTATE for an attempt to connect, but the server's words, which are English by default."""


class Session:
    """A connection. It may be used by one thread at a time."""

    def __init__(self, connection: psycopg.Connection[Any], place: str, patience: float) -> None:
        """The server ends a statement that takes longer than `patience` seconds."""
        self.place = place
        self.patience = patience
        self.given_up = False
        """Whether the watch has ended the connection."""
        self._connection = connection
        # A socket of its own, so that the watch cannot meet another file of the same number.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._deadline: float | None = None
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._watch, name="postgres-watch", daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._connection.close()
        self._socket.close()

    @property
    def user(self) -> str:
        """The name under which the server knows the session."""
        return self._connection.info.user

    # --- statements ------------------------------------------------------------------------------

    def rows(self, statement: str, parameters: Sequence[object] = (), seconds: float | None = None) -> list[Any]:
        """The rows of a statement. The server must answer within `seconds`, by default `patience` and some more."""
        with self._within(self.patience + ANSWER_SECONDS if seconds is None else seconds):
            # No parameters: the statement may be several, and its text is sent as it is.
            found = self._connection.execute(statement.encode(), parameters or None)
            return found.fetchall() if found.description else []

    def copy(self, statement: str, pieces: Iterable[Any]) -> None:
        """Send `pieces` with a `COPY ... FROM STDIN`."""
        try:
            self._allow(LOCK_SECONDS + ANSWER_SECONDS)
            with self._connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
                self._allow(None)
                for piece in pieces:
                    # The server takes no more than it can store: triggers and indexes may make that slow.
                    self._allow(self.patience + ANSWER_SECONDS)
                    copy.write(piece)
                    self._allow(None)
                self._allow(self.patience + ANSWER_SECONDS)
        except BaseException:
            self._allow(ANSWER_SECONDS)
            raise
        self._allow(None)

    # --- transactions ----------------------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All statements of the block together, or none if it raises."""
        self._begin()
        with self._to_commit():
            yield

    @contextmanager
    def alone(self, name: str, still_wanted: Callable[[], object] = lambda: None) -> Iterator[None]:
        """A transaction during which no other session is in one with the same `name`.

        A session that has been in such a transaction for `LOCK_SECONDS` may stand still, so it is ended: it cannot
        commit any more, and its driver sees an error that it can recover from. `still_wanted` is called before that in
        a transaction, and may raise an error instead.
        """
        import psycopg

        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], signed=True)
        for attempt in range(1, _LOCK_TRIES + 1):
            self._begin()
            try:
                # The lock belongs to the transaction: a pooler may give the next transaction another connection.
                self.rows("SELECT pg_advisory_xact_lock(%s)", [key], LOCK_SECONDS + ANSWER_SECONDS)
                break
            except psycopg.errors.LockNotAvailable:
                self._roll_back()
                if attempt == _LOCK_TRIES:
                    raise
            except BaseException:
                self._roll_back()
                raise
            with self.transaction():
                still_wanted()
                self._end_holders(key)
        with self._to_commit():
            yield

    @contextmanager
    def _to_commit(self) -> Iterator[None]:
        """Ends the transaction that has begun: commits it, or rolls it back if the block raises."""
        try:
            yield
            self.rows("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _begin(self) -> None:
        work = round(self.patience * 1000)
        self.rows(
            "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;"
            f"SET LOCAL lock_timeout = {round(LOCK_SECONDS * 1000)};"
            f"SET LOCAL statement_timeout = {work};"
            f"SET LOCAL idle_in_transaction_session_timeout = {work};"
            "SET LOCAL timezone = 'UTC';"
            # A database that may forget the last transactions after a crash would forget rows that are staged no more.
            "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'",
            seconds=ANSWER_SECONDS,
        )

    def _roll_back(self) -> None:
        import psycopg

        if not self._connection.closed:
            with suppress(psycopg.Error):
                self.rows("ROLLBACK", seconds=ANSWER_SECONDS)

    def _end_holders(self, key: int) -> None:
        """End the sessions that have an advisory lock."""
        high, low = (key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF
        holders = self.rows(
            "SELECT pid FROM pg_locks JOIN pg_database ON pg_database.oid = database "
            "WHERE datname = current_database() AND locktype = 'advisory' AND granted "
            "AND classid = %s AND objid = %s AND objsubid = 1",
            [high, low],
        )
        for (pid,) in holders:
            logger.warning("%s: session %d stands still in a transaction of the job, and is ended", self.place, pid)
            self.rows("SELECT pg_terminate_backend(%s)", [pid])

    # --- the watch -------------------------------------------------------------------------------

    @contextmanager
    def _within(self, seconds: float) -> Iterator[None]:
        self._allow(seconds)
        try:
            yield
        finally:
            self._allow(None)

    def _allow(self, seconds: float | None) -> None:
        """End the connection in `seconds` from now, unless this is called again."""
        with self._changed:
            self._deadline = None if seconds is None else time.monotonic() + seconds
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._closed:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    self.given_up = True
                    with suppress(OSError):
                        self._socket.shutdown(socket.SHUT_RDWR)
                    return
                self._changed.wait(left)


@contextmanager
def session(uri: str, place: str, job: str, patience: float, *, reached: bool = False) -> Iterator[Session]:
    """A connection for the block, which raises our errors instead of psycopg's.

    `reached` says that the server has let the run in before. Then what it refuses at the door may pass.
    """
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    opened: Session | None = None
    given = conninfo_to_dict(uri)
    defaults: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "application_name": f"strandline {job}",
        "tcp_user_timeout": round(ANSWER_SECONDS * 1000),
        "keepalives_idle": max(1, round(ANSWER_SECONDS)),
    }
    options: dict[str, Any] = {**defaults, **given, "client_encoding": "UTF8"}
    try:
        # Nothing is prepared: a pooler of transactions would not have it in the next one.
        connection = psycopg.connect(autocommit=True, prepare_threshold=None, **options)
        opened = Session(connection, place, patience)
        yield opened
    except psycopg.Error as error:
        if opened is None:
            raise _not_let_in(error, place, job, str(given.get("password", "")), reached=reached) from error
        raise _translated(error, opened, place, job, str(given.get("password", ""))) from error
    finally:
        if opened is not None:
            opened.close()


def _not_let_in(
    error: psycopg.Error, place: str, job: str, password: str, *, reached: bool
) -> SinkError | StorageRefusedError:
    text = without_values(_words(error), [password])
    if not _REFUSED_AT_THE_DOOR.search(text):
        return SinkError(f"{place}: {text}")
    if not reached:
        return StorageRefusedError(f"{place} refuses job {job!r}: {text}. Check the user, password and database")
    return SinkError(
        f"{place} let job {job!r} in before, and refuses it now: {text}. The rows stay staged. If the password was "
        "changed, see that the URI gives the new one: it is read again for every try"
    )


def _translated(
    error: psycopg.Error, opened: Session, place: str, job: str, password: str
) -> SinkError | StorageRefusedError | StorageFullError:
    state, text = error.sqlstate or "", without_values(_words(error), [password])
    if opened.given_up:
        return SinkError(f"{place} has stopped answering, and the connection was given up")
    if state == "53100":
        return StorageFullError(f"{place}: the disk of the database is full: {text}. The rows stay staged; free space")
    if state == "55P03":
        return SinkError(
            f"{place}: another session holds a lock for longer than {LOCK_SECONDS:g} s: {text}. To find it, look for "
            "pg_blocking_pids(pid) of this session in pg_stat_activity while it waits"
        )
    if state == "57014":
        return SinkError(
            f"{place}: the database took longer than {opened.patience:g} s: {text}. If it is not "
            "overloaded or blocked, raise timeout= of the sink"
        )
    if not state or state.startswith(_MAY_PASS):
        return SinkError(f"{place}: {text}")
    if state == _NO_RIGHT:
        return StorageRefusedError(
            f"{place} does not let the user {opened.user!r} of job {job!r} write: {text}. The rows stay staged; GRANT "
            "the user that right (the page on sinks lists all that are needed), and start the job again"
        )
    return StorageRefusedError(
        f"{place} refuses what job {job!r} writes: {text}. The rows stay staged; change the table, the rights of the "
        "user or the rows, and start the job again"
    )


def _words(error: psycopg.Error) -> str:
    """What the server says, and the column that it means."""
    said = error.diag
    if said.message_primary is None:
        return " ".join(str(error).split())
    column = re.search(r"column [^:,]+", said.context or "")
    parts = [said.message_primary, said.message_detail, column.group() if column else None]
    return "; ".join(part for part in parts if part)
