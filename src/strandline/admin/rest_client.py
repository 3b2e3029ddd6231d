"""Talks to the REST server of a job: with deadlines and bounded answers, without redirects, directly on loopback."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from strandline.admin.problems import NoSuchJobError, NotAllowedError, NotReachedError, NotRunningError, UsageError
from strandline.decoding import json_decoder
from strandline.errors import StrandlineError
from strandline.observe.facts import JobFacts
from strandline.observe.views import LogText
from strandline.rest.access import is_loopback

T = TypeVar("T")

MAX_ANSWER: Final = 256 << 20
"""The largest answer that is read: the facts of a job with a thousand subtasks and its whole history are smaller."""
NEVER_MS: Final = 2**63 - 1
"""No sample is newer."""
POLL_SECONDS: Final = 0.2
LOST_AFTER: Final = 30.0
"""For how long a server may be silent while an operation goes on: a busy driver can be slow."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an operation is.

    Attributes:
        step: What it does now, in a few words.
        done: How much is done, in `unit`.
        total: How much there is to do; None if it is not known.
        unit: `bytes`, `steps` or `subtasks`.
    """

    step: str = ""
    done: int = 0
    total: int | None = None
    unit: str = "steps"


class RestClient:
    """The server of one or more jobs.

    Every method raises `NotReachedError` if the server does not answer as one of ours, `NotAllowedError` if it refuses
    the token, `NoSuchJobError` if it does not know the job, and `NotRunningError` if the job has ended.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout: float = 10.0) -> None:
        """`url` is where the page is. Raises `UsageError` if it is no `http` or `https` URL."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server; write it as http://127.0.0.1:8081")
        if parts.username is not None or parts.password is not None:
            raise UsageError("the address of a server holds no user and password; give the token with --token-file")
        self.url = url.rstrip("/")
        self._token = token
        self._timeout = timeout
        handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
        if is_loopback(parts.hostname):
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def jobs(self) -> list[tuple[str, str]]:
        """The ids and names of the server's jobs, newest first."""
        answer = self.call("GET", "/jobs/overview")
        try:
            return [(str(job["jid"]), str(job["name"])) for job in answer["jobs"]]
        except (TypeError, KeyError) as error:
            raise self._odd(f"its list of jobs cannot be read ({error!r})") from None

    def facts(self, job: str, *, checkpoints: int = 0, samples: bool = False) -> JobFacts:
        """The facts of a job, with so many of its newest checkpoints, without their subtasks, and with its samples."""
        after = 0 if samples else NEVER_MS
        return self._decoded(f"/jobs/{_quoted(job)}/facts?checkpoints={checkpoints}&samples_after={after}", JobFacts)

    def processes(self, job: str) -> list[str]:
        """The names of the processes of a job whose logs can be read."""
        return [str(name) for name in self.call("GET", f"/jobs/{_quoted(job)}/logs").get("processes", ())]

    def log(self, job: str, process: str, max_bytes: int) -> LogText:
        """The end of the log of a process."""
        return self._decoded(f"/jobs/{_quoted(job)}/logs/{_quoted(process)}?max_bytes={max_bytes}", LogText)

    def cancel(self, job: str) -> None:
        """End a run at once."""
        self.call("PATCH", f"/jobs/{_quoted(job)}?mode=cancel")

    def trigger(self, job: str, what: str, body: Mapping[str, Any] | None, *, method: str = "POST") -> str:
        """Ask for an operation, such as `savepoints`; returns its id."""
        answer = self.call(method, f"/jobs/{_quoted(job)}/{what}", body)
        found = answer.get("request-id") if isinstance(answer, dict) else None
        if not isinstance(found, str):
            raise self._odd("it gave no id for the operation")
        return found

    def result(
        self,
        job: str,
        what: str,
        request: str,
        report: Callable[[Progress], None],
        *,
        lost: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any]:
        """Wait until an operation is over, and return what it gave.

        `report` is called with its progress. `lost` says whether a server that does not answer is gone for good.
        Raises `StrandlineError` with the cause if the operation failed.
        """
        path = f"/jobs/{_quoted(job)}/{what}/{_quoted(request)}"
        answered = time.monotonic()
        while True:
            answer: Any = {}
            try:
                answer = self.call("GET", path)
                answered = time.monotonic()
            except (NotReachedError, NoSuchJobError) as error:
                # A driver that ends shows its job no longer, and is gone a moment later.
                if lost():
                    raise
                if time.monotonic() - answered > LOST_AFTER:
                    raise type(error)(f"{error}; it has got the request, and carries it out if it goes on") from None
            if _in(answer, "status", "id") == "COMPLETED":
                return self._operation(answer)
            report(_progress(_in(answer, "progress")))
            time.sleep(POLL_SECONDS)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Make one call, and return the answer, decoded from JSON."""
        content = self._content(method, path, body)
        try:
            return json.loads(content) if content else {}
        except (ValueError, RecursionError):
            raise self._odd("its answer is no JSON") from None

    def _decoded(self, path: str, kind: type[T]) -> T:
        try:
            return json_decoder(kind).decode(self._content("GET", path))
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._odd(f"its answer cannot be read ({error}); is it another version of Strandline?") from None

    def _content(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Accept", "application/json")
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return self._bounded(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            words = f"the server at {self.url} does not answer: {reason}"
            if method != "GET" and isinstance(reason, TimeoutError):
                words += "; if it has got the request, it carries it out when it goes on"
            raise NotReachedError(words) from None

    def _bounded(self, answer: Any) -> bytes:
        content: bytes = answer.read(MAX_ANSWER + 1)
        if len(content) > MAX_ANSWER:
            raise self._odd(f"its answer is larger than {MAX_ANSWER >> 20} MiB")
        return content

    def _refused(self, error: urllib.error.HTTPError) -> StrandlineError:
        words = _errors_in(error) or f"{error.code} {error.reason}"
        match error.code:
            case 401 | 403:
                how = ""
                if error.code == 401 and self._token is None:
                    words, how = (
                        "this needs the token of the job",
                        "; give it with --token-file FILE or STRANDLINE_TOKEN",
                    )
                return NotAllowedError(f"the server at {self.url} does not allow it: {words}{how}")
            case 404:
                return NoSuchJobError(words)
            case 409 | 410:
                return NotRunningError(words)
            case code if 300 <= code < 400:
                return self._odd("it sends its callers elsewhere")
            case 502 | 503 | 504:
                return NotReachedError(f"the server at {self.url} cannot answer now: {words}")
            case _:
                return StrandlineError(words)

    def _operation(self, answer: dict[str, Any]) -> dict[str, Any]:
        operation = answer.get("operation")
        cause = _in(answer, "operation", "failure-cause")
        if cause is not None:
            text = cause.get("stack-trace") or cause.get("class") if isinstance(cause, dict) else cause
            words = str(text or "the operation failed").strip()
            raise NotRunningError(words) if _in(cause, "class") == "JobFailedError" else StrandlineError(words)
        return operation if isinstance(operation, dict) else {}

    def _odd(self, what: str) -> NotReachedError:
        return NotReachedError(f"{self.url} does not answer as a server of Strandline: {what}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token goes to the server that it is for, and nowhere else."""

    def redirect_request(self, *_arguments: Any) -> None:
        return None


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _in(answer: Any, *names: str) -> Any:
    for name in names:
        answer = answer.get(name) if isinstance(answer, dict) else None
    return answer


def _errors_in(error: urllib.error.HTTPError) -> str:
    """The words of a refusal, as Flink and Strandline send them."""
    try:
        found = json.loads(error.read(1 << 20))
    except (ValueError, OSError, http.client.HTTPException, RecursionError):
        return ""
    words = _in(found, "errors")
    return "; ".join(map(str, words)) if isinstance(words, list) else ""


def _progress(given: Any) -> Progress:
    """What a server says of its progress."""
    if not isinstance(given, dict):
        return Progress()
    done, total = given.get("done"), given.get("total")
    return Progress(
        str(given.get("step") or ""),
        done if isinstance(done, int) else 0,
        total if isinstance(total, int) else None,
        str(given.get("unit") or "steps"),
    )
