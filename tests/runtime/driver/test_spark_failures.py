from __future__ import annotations

from strandline.errors import StrandlineError, UserCodeError
from strandline.runtime.driver.spark_failures import failure_of_batch

CAST = (
    "An error occurred while calling o93.collectToPython.\n: org.apache.spark.SparkException: Job aborted due to stage "
    "failure: Task 0 in stage 3.0 failed 1 times, most recent failure: org.apache.spark.SparkNumberFormatException: "
    '[CAST_INVALID_INPUT] The value \'many\' of the type "STRING" cannot be cast to "BIGINT" because it is malformed. '
    "SQLSTATE: 22018\n== DataFrame ==\n\tat org.apache.spark.sql.errors"
)


def test_a_value_that_an_expression_cannot_compute_ends_the_run() -> None:
    error = failure_of_batch("job visits, batch 3", CAST)
    assert type(error) is UserCodeError
    assert "The value 'many' of the type \"STRING\" cannot be cast" in str(error)
    assert "SQLSTATE: 22018 -- use an expression that gives null, such as try_cast" in str(error)


def test_other_failures_of_spark_may_pass() -> None:
    text = "[INTERNAL_ERROR] The plan is damaged. SQLSTATE: XX000"
    assert type(failure_of_batch("job visits, batch 3", text)) is StrandlineError
