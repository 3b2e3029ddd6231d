"""Two S3 servers that share no code, and a proxy with faults before each of them: storage keeps its contract."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from strandline.errors import (
    AlreadyExistsError,
    ConfigError,
    NotFoundError,
    StorageError,
    UnknownOutcomeError,
)
from strandline.storage import Storage, open_storage
from strandline.storage.fencing import probe_create
from strandline.storage.object_store import ObjectStorage
from strandline.testing.fault_proxy import Fault, FaultProxy
from strandline.testing.storage import StorageContract
from tests.s3 import BUCKET, KEYS, second_s3_server

_roots = count()


def opened(endpoint: str, **options: str) -> Storage:
    """An empty storage on a server."""
    return open_storage(f"s3://{BUCKET}/servers-{next(_roots)}/nested/", {"endpoint": endpoint, **KEYS, **options})


@pytest.fixture(scope="module")
def second_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with second_s3_server(tmp_path_factory.mktemp("second-s3")) as endpoint:
        yield endpoint


def before_server(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    endpoint = request.getfixturevalue("s3_endpoint" if request.param == "moto" else "second_s3")
    with FaultProxy(endpoint) as proxy:
        yield proxy


@pytest.fixture(params=["moto", "versitygw"])
def proxy(request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
    """A proxy before each of the servers, without faults."""
    yield from before_server(request)


class TestSecondS3(StorageContract):
    @pytest.fixture
    def storage(self, second_s3: str) -> Storage:
        return opened(second_s3)


class TestS3ThroughAllFaults(StorageContract):
    """A part of all requests is throttled, cut off, loses its answer, or is late. Only a `create` is spared."""

    @pytest.fixture(params=["moto", pytest.param("versitygw", marks=pytest.mark.slow)])
    def proxy(self, request: pytest.FixtureRequest) -> Iterator[FaultProxy]:
        yield from before_server(request)

    @pytest.fixture
    def storage(self, proxy: FaultProxy) -> Iterator[Storage]:
        spared = "(?!.* if absent$)"
        for seed, fault in enumerate(
            [Fault(status=503), Fault(lose_answer=True), Fault(cut_request=True), Fault(delay=0.02)]
        ):
            proxy.fail_at_random(f"^{spared}", fault, share=0.04, seed=seed)
        proxy.fail_at_random("^GET ", Fault(cut_answer=True), share=0.1, seed=99)
        yield opened(proxy.url)
        assert proxy.faults or len(proxy.requests) < 200


LOST = Fault(lose_answer=True)
CUT = Fault(cut_request=True)
THROTTLED = Fault(status=503)


def repeated(call: Callable[[], object]) -> None:
    """What every caller does: an error is followed by another try."""
    try:
        call()
    except NotFoundError:
        raise
    except StorageError:
        call()


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        ("PUT .*/small$", 2),
        ("POST .*uploads=", 1),
        ("PUT .*partNumber=2", 2),
        ("POST .*uploadId=", 1),
        ("PUT .*/renamed$", 2),
        ("POST .*delete", 1),
        ("HEAD ", 1),
        ("GET .*list-type", 2),
    ],
)
def test_when_the_answer_to_any_request_is_lost_a_repetition_makes_it_good(
    proxy: FaultProxy, tmp_path: Path, pattern: str, times: int
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(bytes(9 << 20))
    storage = opened(proxy.url)
    proxy.fail(pattern, LOST, times=times)
    repeated(lambda: storage.write("small", b"1"))
    repeated(lambda: storage.upload(source, "large"))
    try:
        repeated(lambda: storage.rename("large", "renamed"))
    except NotFoundError:
        # The first try renamed it, but could not say so.
        assert storage.exists("renamed")
    repeated(lambda: storage.download("renamed", target))
    assert target.read_bytes() == source.read_bytes()
    assert [file.path for file in storage.list()] == ["renamed", "small"]
    assert proxy.faults == times


@pytest.mark.parametrize(
    ("fault", "there"),
    [(LOST, True), (CUT, False), (THROTTLED, False), (Fault(status=409, code="OperationAborted"), False)],
    ids=["lost", "cut", "throttled", "conflict"],
)
def test_the_outcome_of_a_create_is_known_or_said_to_be_unknown(proxy: FaultProxy, fault: Fault, there: bool) -> None:
    storage = opened(proxy.url)
    proxy.fail("if absent$", fault, times=1)
    with pytest.raises(UnknownOutcomeError):
        storage.create("log/1", b"mine")
    assert storage.exists("log/1") == there
    if not there:
        storage.create("log/1", b"theirs")
    with pytest.raises(AlreadyExistsError):
        storage.create("log/1", b"mine")
    assert storage.read("log/1") == (b"mine" if there else b"theirs")


def test_an_upload_over_a_slow_line_arrives(proxy: FaultProxy, tmp_path: Path) -> None:
    """A part may take longer than the time-out of other requests."""
    source = tmp_path / "source"
    source.write_bytes(bytes(9 << 20))
    storage = opened(proxy.url)
    assert isinstance(storage, ObjectStorage)
    impatient = open_storage(storage.url, {"endpoint": proxy.url, "timeout": "200ms", **KEYS})
    assert isinstance(impatient, ObjectStorage)
    storage._store = impatient._store
    proxy.fail("PUT .*(partNumber|large)", Fault(bytes_per_second=16 << 20))
    storage.upload(source, "file")
    storage.write("large", bytes(6 << 20))
    assert [file.size for file in storage.list()] == [9 << 20, 6 << 20]
    assert len([request for request in proxy.requests if "partNumber=1" in request]) == 1


@pytest.mark.parametrize("size", [0, 20 << 20])
def test_an_object_too_large_for_a_copy_is_renamed_all_the_same(proxy: FaultProxy, size: int) -> None:
    storage = opened(proxy.url)
    assert isinstance(storage, ObjectStorage)
    storage.copy_limit = -1
    data = os.urandom(size)
    storage.write("staged", data)
    proxy.fail("GET .*staged", Fault(cut_answer=True), times=1)
    storage.rename("staged", "published/file")
    assert storage.read("published/file") == data
    assert [file.path for file in storage.list()] == ["published/file"]
    with pytest.raises(NotFoundError, match="staged"):
        storage.rename("staged", "again")


def test_a_rename_that_ends_in_the_middle_leaves_the_old_object_alone(proxy: FaultProxy) -> None:
    storage = opened(proxy.url)
    assert isinstance(storage, ObjectStorage)
    storage.copy_limit = -1
    storage.write("staged", bytes(20 << 20))
    proxy.fail("PUT .*partNumber=2", Fault(status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match="published/file"):
        storage.rename("staged", "published/file")
    assert [file.path for file in storage.list()] == ["staged"]
    proxy.heal()
    proxy.fail("GET .*staged", Fault(status=403, code="AccessDenied"))
    with pytest.raises(StorageError, match="published/file"):
        storage.rename("staged", "published/file")
    assert [file.path for file in storage.list()] == ["staged"]


# --- fencing -------------------------------------------------------------------------------------


def names(folder: str) -> Callable[[], str]:
    numbers = count()
    return lambda: f"{folder}/{next(numbers)}-probe"


def test_a_server_that_honours_conditions_passes_the_probe(proxy: FaultProxy) -> None:
    storage = opened(proxy.url)
    probe_create(storage, names("a"))
    for fault in (LOST, CUT, THROTTLED):
        proxy.fail("if absent$", fault, times=2)
        probe_create(storage, names("b"))
    assert list(storage.list("a")) == []
    proxy.fail("if absent$", THROTTLED)
    with pytest.raises(UnknownOutcomeError):
        probe_create(storage, names("c"))


def test_a_server_that_ignores_conditions_is_refused(tmp_path: Path) -> None:
    with second_s3_server(tmp_path, conditional_writes=False) as endpoint:
        storage = opened(endpoint)
        with pytest.raises(ConfigError, match=r"does not honour conditional writes.*allow_unfenced_storage"):
            probe_create(storage, names("a"))
        assert list(storage.list()) == []


def test_a_server_without_conditional_writes_is_an_error_that_says_so(proxy: FaultProxy) -> None:
    proxy.fail("if absent$", Fault(status=501, code="NotImplemented"))
    with pytest.raises(ConfigError, match=r"cannot do conditional writes"):
        probe_create(opened(proxy.url), names("a"))
