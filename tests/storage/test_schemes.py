"""Other packages add storage schemes: real packages on the import path, found by their entry points."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strandline.errors import ConfigError
from strandline.storage import Storage, is_local, open_storage
from strandline.storage import schemes as schemes_module
from strandline.testing.storage import StorageContract

SHELF = """
from strandline.storage.local import LocalStorage


class ShelfStorage(LocalStorage):
    def __init__(self, url, options):
        super().__init__(url.removeprefix("shelf://"))
        self.url = f"shelf://{self.root}"
        self.given = dict(options or {})


def nothing(url, options):
    return None
"""

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Install]:
    """Installs a package with a module and one storage plugin, as pip would, in a folder that goes after the test."""
    modules = set(sys.modules)
    before = list(sys.path)

    def make(name: str, code: str, scheme: str, value: str) -> Path:
        site = tmp_path_factory.mktemp("site")
        (site / f"{name}.py").write_text(code)
        info = site / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[strandline.storage]\n{scheme} = {value}\n")
        sys.path.insert(0, str(site))
        importlib.invalidate_caches()
        return site

    yield make
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.startswith("sl_test_"):
            del sys.modules[name]


class TestStorageOfAnotherPackage(StorageContract):
    @pytest.fixture
    def storage(self, install: Install, tmp_path_factory: pytest.TempPathFactory) -> Storage:
        install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
        return open_storage(f"shelf://{tmp_path_factory.mktemp('shelf')}/root")


def test_a_plugin_gets_the_url_and_the_options(install: Install, tmp_path: Path) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    storage = open_storage(f"shelf://{tmp_path}", {"colour": "red"})
    assert storage.given == {"colour": "red"}  # type: ignore[attr-defined]  # of the class in SHELF
    assert storage.options == {"colour": "red"}
    storage.write("a", b"1")
    assert open_storage(storage.url).read("a") == b"1"
    assert not is_local(storage.url)


def test_a_name_with_a_plus_opens_every_scheme_that_begins_with_it(install: Install, tmp_path: Path) -> None:
    install("sl_test_shelf", SHELF.replace("shelf://", "old+file://"), "old+", "sl_test_shelf:ShelfStorage")
    assert open_storage(f"old+file://{tmp_path}").url == f"old+file://{tmp_path}"


def test_a_name_without_a_plus_is_the_whole_scheme(install: Install) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    for url in ("shelfish://x", "she://x"):
        with pytest.raises(ConfigError, match="not supported"):
            open_storage(url)


def test_a_plugin_cannot_replace_a_scheme_that_is_built_in(install: Install, tmp_path: Path) -> None:
    install("sl_test_shelf", SHELF, "file", "sl_test_shelf:nothing")
    assert open_storage(f"file://{tmp_path}").url == str(tmp_path)


def test_an_unknown_scheme_names_the_schemes_of_plugins_too(install: Install) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    with pytest.raises(ConfigError, match=r"'swift://x'.*s3://.*shelf://.*install that package on every host"):
        open_storage("swift://x")


@pytest.mark.parametrize(
    ("code", "value", "message"),
    [
        ("import no_such_module_at_all", "sl_test_broken:Made", "ModuleNotFoundError: No module named 'no_such_mod"),
        ("raise SystemError('half installed')", "sl_test_broken:Made", "SystemError: half installed"),
        ("", "sl_test_broken:Made", "AttributeError"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named_with_its_package(
    install: Install, code: str, value: str, message: str
) -> None:
    install("sl_test_broken", code, "broken", value)
    with pytest.raises(
        ConfigError, match=f"'broken://x': the plugin {value} of sl_test_broken 1.2 cannot be loaded: {message}"
    ):
        open_storage("broken://x")


def test_a_plugin_that_makes_something_else_is_refused(install: Install) -> None:
    install("sl_test_shelf", SHELF, "odd", "sl_test_shelf:nothing")
    with pytest.raises(ConfigError, match=r"sl_test_shelf:nothing of sl_test_shelf 1\.2 returned NoneType"):
        open_storage("odd://x")


def test_two_packages_with_one_scheme_are_both_named(install: Install) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    install("sl_test_other", SHELF, "shelf", "sl_test_other:ShelfStorage")
    with pytest.raises(ConfigError, match=r"several packages .* of sl_test_other 1\.2 and .* of sl_test_shelf 1\.2"):
        open_storage("shelf://x")


def test_packages_are_searched_once_for_many_openings(install: Install, tmp_path: Path) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    open_storage(f"shelf://{tmp_path}")
    before = schemes_module._plugins.cache_info().misses
    for _ in range(20):
        open_storage(f"shelf://{tmp_path}")
    assert schemes_module._plugins.cache_info().misses == before


# --- HDFS ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["hdfs:///x", "hdfs://namenode/x"])
def test_an_hdfs_that_no_configuration_names_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HADOOP_CONF_DIR", "HADOOP_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"hdfs://host:8020/folder.*HADOOP_CONF_DIR"):
        open_storage(url)


def test_opening_an_hdfs_contacts_nobody_and_checks_the_options() -> None:
    url = "hdfs://namenode.invalid:8020/x"
    assert open_storage(f"{url}/", {"dfs.client.socket-timeout": "1000"}).url == url
    with pytest.raises(ConfigError, match="unknown storage option 'endpoint'"):
        open_storage(url, {"endpoint": "http://x"})


def test_without_its_client_hdfs_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    monkeypatch.delitem(sys.modules, "strandline.storage.hdfs", raising=False)
    with pytest.raises(ConfigError, match=r"strandline\[hdfs\]"):
        open_storage("hdfs://namenode:8020/x")


def test_a_url_with_a_password_is_refused_and_the_password_not_shown() -> None:
    with pytest.raises(ConfigError, match="holds a password") as raised:
        open_storage("s3://me:hunter2@bucket/x")
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("url", ["s3:/bucket/state", "hdfs:/state", "shelf:/state"])
def test_a_url_with_one_slash_is_refused_before_its_path_is_misread(install: Install, url: str) -> None:
    install("sl_test_shelf", SHELF, "shelf", "sl_test_shelf:ShelfStorage")
    with pytest.raises(ConfigError, match="two slashes"):
        open_storage(url)


@pytest.mark.parametrize("url", ["dbfs:/state", "dbfs://state"])
def test_an_unknown_scheme_is_told_with_the_known_ones_whatever_its_slashes(url: str) -> None:
    with pytest.raises(ConfigError, match="its scheme is not supported; supported: a local path, file://, s3://"):
        open_storage(url)
