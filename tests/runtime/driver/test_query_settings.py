"""The session of the user has other settings only while a query starts, however many jobs start in it."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from strandline.runtime.driver.query_settings import QUERY_SETTINGS, QUICK_LOGS, query_settings

ADAPTIVE, FILES = "spark.sql.adaptive.enabled", "fs.file.impl"

pytestmark = pytest.mark.spark


def test_the_users_settings_come_back_after_the_last_of_several_starts(spark: SparkSession) -> None:
    names = {*QUERY_SETTINGS, *QUICK_LOGS}
    before = {name: spark.conf.get(name, None) for name in names}
    first, second = query_settings(spark, QUICK_LOGS), query_settings(spark, QUICK_LOGS)
    users = first.__enter__()
    assert spark.conf.get(ADAPTIVE) == QUERY_SETTINGS[ADAPTIVE]
    assert second.__enter__() == users == before  # not what the first one has set
    first.__exit__(None, None, None)
    assert spark.conf.get(FILES) == QUICK_LOGS[FILES]  # the second one is not through
    second.__exit__(None, None, None)
    assert {name: spark.conf.get(name, None) for name in names} == before


def test_a_start_that_fails_leaves_the_users_settings(spark: SparkSession) -> None:
    spark.conf.set(FILES, "the user's")
    try:
        with pytest.raises(RuntimeError), query_settings(spark, QUICK_LOGS) as users:
            raise RuntimeError
        assert (users[FILES], spark.conf.get(FILES)) == ("the user's", "the user's")
    finally:
        spark.conf.unset(FILES)
