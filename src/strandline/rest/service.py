"""What all paths share: the jobs, the cache of answers, and how an answer is sent."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import Depends, Path, Request, Response

from strandline.decoding import json_decoder
from strandline.errors import StorageError, StrandlineError
from strandline.observe.facts import JobFacts
from strandline.observe.views import JobControl, Jobs, JobView
from strandline.rest.answers import AnswerCache, Errors, RestError, encode
from strandline.rest.prometheus import metrics_text
from strandline.rest.triggers import Triggers

log = logging.getLogger(__name__)

T = TypeVar("T")
JSON = "application/json"
LARGEST = 2**63 - 1
"""The largest number that a path or query may give."""
MOST_JOBS = 1_000
"""How many jobs a list shows."""
REFERENCES = "#/components/schemas/{name}"


class Service:
    """The jobs that one server shows, and the answers about them."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.triggers = Triggers()
        self._cache = AnswerCache()
        self._scraping = threading.Lock()
        self._scraped: dict[bool, tuple[list[JobFacts], bytes]] = {}

    def view(self, job: str) -> JobView:
        """The job of that id or name. An unknown one is a 404."""
        found = self.jobs.get(job)
        if found is None:
            raise RestError(404, f"Job {job} not found: GET /jobs lists the ids and names of the jobs shown here.")
        return found

    def facts(self, job: str) -> JobFacts:
        """The newest facts of a job."""
        return facts_of(self.view(job))

    def metrics(self, *, subtasks: bool = False) -> bytes:
        """The metrics of all jobs, made once for each state of the jobs, however many scrapes there are."""
        jobs = all_facts(self.jobs)
        with self._scraping:
            known, text = self._scraped.get(subtasks, ([], b""))
            if (
                len(known) != len(jobs)
                or any(one is not other for one, other in zip(known, jobs, strict=True))
                or not text
            ):
                text = metrics_text(jobs, subtasks=subtasks)
                self._scraped[subtasks] = (jobs, text)
            return text

    def answer(self, facts: JobFacts, request: Request, build: Callable[[], object]) -> Response:
        """The answer to a request about one job. It is encoded once for each state of the job, and has a tag."""
        answer = self._cache.get(facts, f"{request.url.path}?{request.url.query}", build)
        headers = {"etag": answer.tag}
        if answer.tag in [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        return Response(answer.body, media_type=JSON, headers=headers)


def control_of(view: JobView) -> JobControl:
    """What steers a job. A job that has ended or runs elsewhere is a 409."""
    control = view.control
    if control is None:
        facts = facts_of(view)
        why = f"it is {facts.status}" if facts.status.ended else "its driver is another process, or is lost"
        raise RestError(409, f"Job {view.name} cannot be steered here: {why}.")
    return control


def decoded(body: bytes, kind: type[T]) -> T:
    """The body of a request. An empty one holds the defaults; a malformed one is a 400."""
    try:
        return json_decoder(kind).decode(body or b"{}")
    except msgspec.MsgspecError as error:
        raise RestError(400, f"The body of the request is not a valid {kind.__name__}: {error}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise RestError(400, f"The body of the request is no JSON: {error}") from error


async def _read(request: Request) -> bytes:
    return await request.body()


def facts_of(view: JobView) -> JobFacts:
    """The newest facts. Where the storage of a job's history cannot be read, a 503 says why."""
    try:
        return view.facts()
    except StorageError as error:
        raise RestError(503, f"the history of the job cannot be read at present: {error}") from error
    except StrandlineError as error:
        raise RestError(500, str(error)) from error


def all_facts(jobs: Jobs) -> list[JobFacts]:
    """The facts of all jobs, newest first. A job whose history cannot be read is left out, and logged."""
    found = []
    for view in jobs.all()[:MOST_JOBS]:
        try:
            found.append(view.facts())
        except StrandlineError as error:
            log.warning("job %s is left out of the list: %s", view.name, error)
    return found


def json(value: object, status: int = 200) -> Response:
    """An answer that is not kept."""
    return Response(encode(value), status_code=status, media_type=JSON)


def the_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Body = Annotated[bytes, Depends(_read)]
Shown = Annotated[Service, Depends(the_service)]
VertexId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The id of the vertex.")]
JobId = Annotated[str, Path(description="The id of the job, or its name.", min_length=1, max_length=255)]


class Schemas:
    """Collects the schemas of the answers for `/openapi.json`."""

    def __init__(self) -> None:
        self._types: dict[str, type] = {"Errors": Errors}

    def answers(self, kind: type, *errors: int, status: int = 200, text: str = "") -> dict[str, Any]:
        """What FastAPI takes to describe a path: an answer of that type, and errors of these statuses."""
        self._types[kind.__name__] = kind
        responses: dict[int | str, dict[str, Any]] = {
            status: {"description": text or first_line(kind), "content": {JSON: {"schema": reference(kind)}}}
        }
        responses |= self.errors(*errors)
        if status == 200:
            responses[304] = {"description": "Not changed since the answer with the given `If-None-Match`."}
        return {"responses": responses, "status_code": status}

    def errors(self, *errors: int) -> dict[int | str, dict[str, Any]]:
        """The errors of these statuses, and those that every path may answer."""
        return {
            error: {"description": _WORDS[error], "content": {JSON: {"schema": reference(Errors)}}}
            for error in sorted({400, 401, 403, 408, 413, 500, 503, *errors})
        }

    def list_of(self, kind: type, *errors: int) -> dict[str, Any]:
        """As `answers`, for a list of that type."""
        described = self.answers(kind, *errors)
        described["responses"][200]["content"] = {JSON: {"schema": {"type": "array", "items": reference(kind)}}}
        return described

    def body(self, kind: type, *, required: bool = False) -> dict[str, Any]:
        """What FastAPI takes to describe the body of a request."""
        self._types[kind.__name__] = kind
        return {
            "openapi_extra": {"requestBody": {"required": required, "content": {JSON: {"schema": reference(kind)}}}}
        }

    def components(self) -> Mapping[str, Any]:
        """The schemas by their names."""
        _, components = msgspec.json.schema_components(self._types.values(), ref_template=REFERENCES)
        return components


_WORDS = {
    400: "The request is malformed.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page elsewhere, or names another host.",
    404: "No such job, vertex, checkpoint or trigger.",
    408: "The body of the request came too slowly.",
    409: "The job is in a state in which this cannot be done.",
    413: "The body of the request is too large.",
    500: "The answer could not be made.",
    503: "The server or the storage is too busy, or cannot be reached.",
}


def reference(kind: type) -> dict[str, str]:
    """A reference to the schema of a type."""
    return {"$ref": REFERENCES.format(name=kind.__name__)}


def first_line(kind: type) -> str:
    """The first line of a type's docstring."""
    return (kind.__doc__ or kind.__name__).splitlines()[0]


schemas = Schemas()
