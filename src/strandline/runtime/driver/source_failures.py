"""Says in plain words why a source failed, and whether a restart can help.

A broker that is down may be up again, so the restart strategy decides. Rows that are gone do not come back by
themselves: the run ends at once, before a later checkpoint covers the gap.

Private Spark API: the texts of the errors of Spark's connector to Kafka. Without them the text of Spark stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from strandline.errors import SourceDataLostError, SourceError, StrandlineError

_PLAN = re.compile(r"\n=== Streaming Query ===.*", re.DOTALL)
_LOST = re.compile(
    r"KafkaIllegalStateException|KAFKA_DATA_LOSS|OffsetOutOfRangeException"
    r"|Some data may have been lost because they are not availab"
)
_REASON = re.compile(r"^Reason:\s*(.+?)(?=\nwith consumer group|\.?\n\s*at |\Z)", re.MULTILINE | re.DOTALL)
_OUT_OF_RANGE = re.compile(r"OffsetOutOfRangeException: (.*)")
_NOT_READ = re.compile(r"java\.util\.concurrent\.TimeoutException: (Cannot fetch record for offset .*)")
_REFUSED = re.compile(r"org\.apache\.kafka\.common\.(?:errors\.)?(\w+): (.*)")

_REMEDIES = {
    "TimeoutException": (
        "no broker answers: look whether the brokers run, whether kafka.bootstrap.servers names them, and whether "
        "driver and executors reach the addresses that the brokers advertise"
    ),
    "UnknownTopicOrPartitionException": "the topic does not exist: create it, or correct the name in the source",
}
_RIGHTS = "look at the rights and the credentials of the source (its options kafka.security.protocol and kafka.sasl.*)"
_BROKERS = "look at the brokers and at the options of the source"


def failure_in_planning(where: str, text: str, topics: Sequence[str] = ()) -> StrandlineError:
    """The error for a query that failed outside a batch, where it asks its sources for their positions.

    `topics` are what its Kafka sources read.
    """
    text = _PLAN.sub("", text)
    refused = _REFUSED.search(text)
    known = lost_rows(where, text)
    if known is not None or refused is None:
        return known or StrandlineError(f"{where}: the query failed: {text}")
    kind, words = refused.groups()
    rights = "Authori" in kind or "Authenti" in kind
    remedy = _REMEDIES.get(kind, _RIGHTS if rights else _BROKERS)
    what = f"a Kafka source ({', '.join(topics)})" if topics else "a Kafka source"
    return SourceError(f"{where}: {what} cannot be read: {kind}: {words} -- {remedy}")


def failure_in_batch(where: str, text: str) -> StrandlineError | None:
    """The error for a batch whose task could not read rows from Kafka; None if the batch failed for another reason."""
    not_read = _NOT_READ.search(text)
    if not_read is not None:
        return SourceError(f"{where}: a Kafka source cannot be read: {not_read[1]} -- {_REMEDIES['TimeoutException']}")
    return lost_rows(where, text)


def lost_rows(where: str, text: str) -> SourceDataLostError | None:
    """The error for rows that Kafka has deleted before the job read them; None if `text` does not say so."""
    if _LOST.search(text) is None:
        return None
    reason = _REASON.search(text)
    out_of_range = _OUT_OF_RANGE.search(text)
    words = reason[1] if reason is not None else out_of_range[1] if out_of_range is not None else text
    return data_lost(where, " ".join(words.split()))


def data_lost(where: str, told: str) -> SourceDataLostError:
    """The error for rows that Kafka has deleted before the job read them."""
    return SourceDataLostError(
        f"{where}: rows that the job has not read yet are not in Kafka any more: {told} -- state and output are as of "
        "the last completed checkpoint, and a restart would fail again. The retention of the topic is too short for "
        "the time that the job was behind, or the topic was deleted. To go on without these rows, start the job with "
        "the option failOnDataLoss=false at its Kafka source"
    )
