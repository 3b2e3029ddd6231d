"""Opens an Iceberg catalogue, with timeouts, and says what its errors mean."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from strandline.errors import ConfigError, SinkError, StorageFullError, StorageRefusedError, StrandlineError
from strandline.redaction import secret_values, without_values

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from requests import Session

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
"""How long a call to a REST catalogue waits for a connection, and for each part of the answer."""

_FILE_SETTINGS = {
    "endpoint": "s3.endpoint",
    "access_key_id": "s3.access-key-id",
    "secret_access_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
    "region": "s3.region",
}
"""Our storage options for S3, and what PyIceberg calls them."""


def open_catalogue(catalog: str | Mapping[str, str], storage_options: Mapping[str, str]) -> Catalog:
    """The catalogue of a configured name, or with the given properties. Contacts it.

    Its files are read and written with `storage_options`, where its properties say nothing else.
    """
    from pyiceberg.catalog import infer_catalog_type, load_catalog
    from pyiceberg.utils.config import Config

    name = catalogue_name(catalog)
    files = {_FILE_SETTINGS[key]: value for key, value in storage_options.items() if key in _FILE_SETTINGS}
    known = {} if not isinstance(catalog, str) else (Config().get_catalog_config(name) or {})
    if isinstance(catalog, str) and not known:
        raise ConfigError(
            f"PyIceberg knows no catalogue {name!r}: describe it in .pyiceberg.yaml or with PYICEBERG_CATALOG__... "
            "variables on the driver's host, or give its properties to the sink as catalog={...}"
        )
    given = known if isinstance(catalog, str) else {key: value for key, value in catalog.items() if key != "name"}
    properties: dict[str, Any] = {**files, **given}
    if "py-catalog-impl" not in properties and _is_rest(infer_catalog_type(name, properties)):
        properties.pop("type", None)
        return _rest_catalogue(name, properties)
    return load_catalog(name, **properties)


def catalogue_name(catalog: str | Mapping[str, str]) -> str:
    """The name of the catalogue. A catalogue in a database keeps its tables under that name."""
    return catalog if isinstance(catalog, str) else str(catalog.get("name", "default"))


def storage_options_of(catalog: str | Mapping[str, str]) -> dict[str, str]:
    """The settings of S3 that the properties of a catalogue hold, as our storage options."""
    if isinstance(catalog, str):
        return {}
    return {ours: str(catalog[theirs]) for ours, theirs in _FILE_SETTINGS.items() if theirs in catalog}


def _is_rest(kind: Any) -> bool:
    return bool(getattr(kind, "value", kind) == "rest")


def _rest_catalogue(name: str, properties: Mapping[str, str]) -> Catalog:
    from pyiceberg.catalog.rest import RestCatalog
    from requests import PreparedRequest, Response
    from requests.adapters import HTTPAdapter

    class Timely(HTTPAdapter):
        """Gives every request a timeout: PyIceberg gives none, and would wait for a frozen server forever."""

        def send(self, request: PreparedRequest, *args: Any, **options: Any) -> Response:
            options["timeout"] = options.get("timeout") or (CONNECT_SECONDS, ANSWER_SECONDS)
            return super().send(request, *args, **options)

    class TimelyCatalog(RestCatalog):
        def _create_session(self) -> Session:
            session = super()._create_session()
            for scheme in ("http://", "https://"):
                session.mount(scheme, Timely())
            return session

    return TimelyCatalog(name, **properties)


@contextmanager
def translated(place: str, job: str, catalog: str | Mapping[str, str]) -> Iterator[None]:
    """Errors of PyIceberg and of what it uses, as errors of ours that show no secret."""
    from pyiceberg import exceptions
    from requests import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    no_right = (exceptions.UnauthorizedError, exceptions.ForbiddenError, exceptions.OAuthError, PermissionError)
    refused = (
        *no_right,
        exceptions.BadRequestError,
        exceptions.NotInstalledError,
        exceptions.NoSuchPropertyException,
        ValueError,
        NotImplementedError,
        ImportError,
    )
    passing = (
        exceptions.RESTError,
        exceptions.CommitFailedException,
        exceptions.ValidationException,
        exceptions.ValidationError,
        exceptions.ResolveError,
        exceptions.SignError,
        exceptions.WaitingForLockException,
        exceptions.DynamoDbError,
        exceptions.NoSuchTableError,
        exceptions.NoSuchNamespaceError,
        RequestException,
        SQLAlchemyError,
        OSError,
    )
    try:
        yield
    except StrandlineError:
        raise
    except (*refused, *passing) as error:
        known = {} if isinstance(catalog, str) else catalog
        text = without_values(f"{type(error).__name__}: {error}", secret_values(known))
        if _is_full(error):
            raise StorageFullError(f"{place}: no space left for the table: {text}") from error
        if isinstance(error, no_right) or _is_no_right(error):
            raise StorageRefusedError(
                f"{place}: job {job!r} lacks a right: {text}. Rows that are staged stay so; give the user of the "
                "catalogue, and the credentials of its storage, the right to read and write the table, and start the "
                "job again"
            ) from error
        if isinstance(error, NotADirectoryError | FileExistsError):
            raise StorageRefusedError(
                f"{place}: job {job!r} cannot write there, because a file is where the table needs a folder: {text}. "
                "Rows that are staged stay so; move the file away, or give the catalogue another warehouse, and start "
                "the job again"
            ) from error
        if isinstance(error, refused) and not isinstance(error, RequestException):
            raise StorageRefusedError(
                f"{place} refuses what job {job!r} does there: {text}. The rows stay staged; change the rights, the "
                "table, or the settings of the catalogue, and start the job again"
            ) from error
        raise SinkError(f"{place}: {text}") from error


def _is_no_right(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
