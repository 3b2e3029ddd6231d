"""Makes the cluster of a run from the user's options and the Spark session."""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from typing import TYPE_CHECKING

from strandline.config import Config
from strandline.errors import ConfigError
from strandline.logs import configure_from_environment
from strandline.pyspark_releases import check_supported
from strandline.runtime.driver.certificate import run_tls
from strandline.runtime.driver.cluster import Cluster
from strandline.runtime.protocol.address import Address, default_bind_host, driver_listens_on
from strandline.runtime.protocol.messages import ChangelogSettings, RunInfo, StorageSettings, UploadSettings
from strandline.runtime.protocol.process_limits import raise_descriptor_limit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def make_cluster(job: str, run_id: str, spark: SparkSession, config: Config) -> Cluster:
    """A cluster without task managers. Raises `ConfigError` for settings that do not fit Spark or this host."""
    _check_spark(spark, config)
    log_format = configure_from_environment()
    context = spark.sparkContext
    secret = secrets.token_hex(32)
    bind_host = default_bind_host(str(context.master), config.bind_host)
    # Executors reach Spark's driver by this name, so they reach our server by it, too.
    driver_host = context.getConf().get("spark.driver.host", None) or "127.0.0.1"
    own_bind_host, advertise_host = driver_listens_on(bind_host, driver_host)
    tls = run_tls(config)
    raise_descriptor_limit()

    def info(coordinator: Address) -> RunInfo:
        return RunInfo(
            job=job,
            run_id=run_id,
            secret=secret,
            coordinator=coordinator,
            local_dir=config.local_dir or tempfile.gettempdir(),
            bind_host=bind_host,
            heartbeat_timeout=config.heartbeat_timeout,
            storage=StorageSettings(absolute_location(config.checkpoint_dir), dict(config.storage_options)),
            uploads=UploadSettings(
                config.inline_threshold,
                config.small_file_threshold,
                config.max_space_amplification,
            ),
            local_recovery=config.local_recovery,
            changelog=_changelog(config),
            tls=tls,
            log_format=log_format,
            sys_path=[os.path.abspath(entry) for entry in sys.path if entry] + [os.getcwd()],
        )

    try:
        return Cluster(
            context, info, run_id=run_id, secret=secret, bind_host=own_bind_host, advertise_host=advertise_host, tls=tls
        )
    except OSError as error:
        raise ConfigError(
            f"bind_host={own_bind_host!r}: the driver cannot listen there ({error}); give an address of this host, "
            "'0.0.0.0' for every network, or leave it out"
        ) from error


def absolute_location(location: str) -> str:
    """The location in a form that means the same folder in every process, whatever its working directory is."""
    return location if "://" in location else os.path.abspath(location)


def _changelog(config: Config) -> ChangelogSettings | None:
    if not config.changelog:
        return None
    return ChangelogSettings(
        upload_timeout=config.changelog_upload_timeout,
        upload_attempts=config.changelog_upload_attempts,
        max_behind_bytes=config.changelog_max_in_flight,
        materialization_interval=config.materialization_interval,
        max_amplification=config.changelog_max_amplification,
        storage=(
            StorageSettings(absolute_location(config.changelog_dir), dict(config.storage_options))
            if config.changelog_dir is not None
            else None
        ),
    )


def _check_spark(spark: SparkSession, config: Config) -> None:
    check_supported(spark.version)
    context = spark.sparkContext
    if str(context.master).startswith("local") and "PYSPARK_PYTHON" not in os.environ:
        # Local workers must run in the interpreter that has this package.
        # Private Spark API: an undocumented attribute. The public setting, PYSPARK_PYTHON, is read only when a session
        # is made, and the user has made this one already.
        context.pythonExec = sys.executable
    limit = context.getConf().get("spark.executor.pyspark.memory", None)
    if limit is not None:
        raise ConfigError(
            f"spark.executor.pyspark.memory={limit} limits the address space of Python workers and of all processes "
            f"they start, so slots could not have state_memory of {config.state_memory} bytes. Remove the setting."
        )
