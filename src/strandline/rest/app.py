"""The application behind the server: all paths, and errors in Flink's form."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from strandline import web
from strandline.observe.views import Jobs
from strandline.rest import checkpoint_paths, job_paths, operation_paths, own_paths
from strandline.rest.access import Access
from strandline.rest.answers import Errors, RestError
from strandline.rest.guard import Guard
from strandline.rest.service import Service, json, schemas

log = logging.getLogger(__name__)

VERSION = "1"


def create_app(jobs: Jobs, access: Access) -> FastAPI:
    """The REST interface over `jobs`. All paths of Flink exist with and without `/v1`, as in Flink."""
    app = FastAPI(
        title="Strandline",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
    )
    app.state.service = Service(jobs)
    for router in (checkpoint_paths.router, job_paths.router, operation_paths.router, own_paths.router):
        app.include_router(router)
        app.include_router(router, prefix="/v1", include_in_schema=False)
    app.mount("/web", StaticFiles(directory=web.FOLDER))
    app.mount("/", StaticFiles(directory=web.FOLDER, html=True))
    app.add_middleware(Guard, access=access)
    _say_errors_as_flink(app)
    _describe(app)
    return app


def _say_errors_as_flink(app: FastAPI) -> None:
    @app.exception_handler(RestError)
    def refused(_request: Request, error: RestError) -> Response:
        return json(Errors([error.reason]), error.status)

    @app.exception_handler(RequestValidationError)
    def malformed(_request: Request, error: RequestValidationError) -> Response:
        reasons = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:20]]
        return json(Errors(reasons), 400)

    @app.exception_handler(HTTPException)
    def unknown(request: Request, error: HTTPException) -> Response:
        reason = f"Not found: {request.url.path[:200]}" if error.status_code == 404 else str(error.detail)
        answer = json(Errors([reason]), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(Exception)
    def failed(_request: Request, _error: Exception) -> Response:
        return json(Errors(["Internal server error: the log of the driver has its traceback."]), 500)


def _describe(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            components = described.setdefault("components", {})
            components["schemas"] = dict(schemas.components())
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            for path in described["paths"].values():
                for operation in path.values():
                    # FastAPI's own answer to malformed requests; ours is 400.
                    operation["responses"].pop("422", None)
                    operation["security"] = [{"token": []}, {}]
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does
