"""What Spark says when a Kafka source fails becomes one line that says what, where and what to do."""

from __future__ import annotations

from strandline.errors import SourceDataLostError, SourceError, StrandlineError
from strandline.runtime.driver.source_failures import failure_in_batch, failure_in_planning

PLAN = """
=== Streaming Query ===
Identifier: [id = 735ca598, runId = 01b52309]
Logical Plan:
~WriteToMicroBatchDataSourceV1 ForeachBatch"""

LOST = """An error occurred while calling o961.collectToPython.
: org.apache.spark.sql.kafka010.KafkaIllegalStateException: Some data may have been lost because they are not \
available in Kafka any more;
either the data was aged out by Kafka or the topic may have been deleted before all the data in the
topic was processed.
If you don't want your streaming query to fail on such cases, set the source option failOnDataLoss to false.
Reason: Could not read records in offset [2, 4) for topic partition clicks-0
with consumer group spark-kafka-source-6616ac71-executor.
\tat org.apache.spark.sql.kafka010.KafkaExceptions$.couldNotReadOffsetRange(KafkaExceptions.scala:1)
"""


def test_rows_that_are_gone_are_named_and_end_the_run() -> None:
    error = failure_in_batch("job visits, batch 3", LOST)
    assert type(error) is SourceDataLostError
    assert str(error).startswith(
        "job visits, batch 3: rows that the job has not read yet are not in Kafka any more: Could not read records in "
        "offset [2, 4) for topic partition clicks-0 -- state and output"
    )
    assert type(failure_in_planning("job visits", LOST + PLAN)) is SourceDataLostError


def test_a_broker_that_does_not_answer_is_a_failure_that_may_pass() -> None:
    text = "org.apache.kafka.common.errors.TimeoutException: Timed out waiting for a node assignment. Call: listNodes"
    error = failure_in_planning("job visits", text + PLAN, ["clicks", "views"])
    assert type(error) is SourceError
    assert str(error).startswith("job visits: a Kafka source (clicks, views) cannot be read: TimeoutException: ")
    assert "Timed out waiting for a node assignment. Call: listNodes -- no broker answers" in str(error)
    assert "Logical Plan" not in str(error)
    read = "java.util.concurrent.TimeoutException: Cannot fetch record for offset 5 in 120000 milliseconds\n\tat org"
    assert type(failure_in_batch("job visits, batch 3", read)) is SourceError


def test_missing_rights_lead_to_the_options_of_the_source() -> None:
    text = "org.apache.kafka.common.errors.TopicAuthorizationException: Not authorized to access topics: [clicks]"
    assert "kafka.sasl" in str(failure_in_planning("job visits", text))


def test_failures_that_are_not_of_a_kafka_source_keep_their_text() -> None:
    error = failure_in_planning("job visits", "java.io.IOException: no such folder" + PLAN)
    assert type(error) is StrandlineError
    assert str(error) == "job visits: the query failed: java.io.IOException: no such folder"
    writer = "org.apache.kafka.common.errors.TimeoutException: Topic out not present in metadata after 60000 ms."
    assert failure_in_batch("job visits, batch 3", writer) is None, "a function of a sink may write to Kafka"
