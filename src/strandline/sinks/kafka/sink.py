"""`KafkaSink`: rows as messages in a topic."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pyarrow as pa

from strandline.errors import JobDefinitionError
from strandline.sinks.base import ExactlyOnceSink, SinkContext, SinkTarget, Stager
from strandline.sinks.kafka.at_least_once import DirectStager, DirectTarget
from strandline.sinks.kafka.cluster import checked_options
from strandline.sinks.kafka.messages import Content, MessageForm, MessageStager
from strandline.sinks.kafka.target import KafkaTarget
from strandline.sinks.staging import ArrowStager

Delivery = Literal["exactly_once", "at_least_once"]
JAVA_PARTITIONER = "murmur2_random"
"""librdkafka's name for what producers in Java, Spark among them, do by default."""
_LONGEST = 249
_TOPIC = re.compile(rf"[a-zA-Z0-9._-]{{1,{_LONGEST}}}")


@dataclass(frozen=True, slots=True)
class KafkaSink(ExactlyOnceSink):
    """Writes each row as a message into a topic of Kafka, exactly once to readers with `read_committed`.

    The rows of a checkpoint become visible in one transaction. Messages with the same key keep their order. The topic
    must exist. Needs `pip install "strandline[kafka]"`.
    """

    bootstrap_servers: str
    """Some brokers of the cluster: `"broker1:9092,broker2:9092"`."""
    topic: str
    """The topic. The sink does not make it."""
    key: Content | None = None
    """The key of a message: a column as it is (other types than text and binary as JSON), a list of columns as a JSON
    object, or a function of a `pyarrow.RecordBatch` that returns one `bytes` per row. By default the key of the step
    before the sink; `key=[]` for none."""
    value: Content | None = None
    """The value of a message, as `key`; by default a JSON object with all columns but those of `headers` and
    `partition`. A null makes a tombstone."""
    headers: str | None = None
    """A column with the headers: a map of text to binary or text, or a struct."""
    partition: str | None = None
    """An integer column with the partition; where it is null, the partitioner chooses."""
    timestamp: str | None = None
    """A column with the time of the message: a timestamp, or milliseconds. By default the time of the write."""
    partitioner: str | Callable[[pa.RecordBatch], Any] = JAVA_PARTITIONER
    """How a partition follows from the key: a name that librdkafka knows, or a function of a `pyarrow.RecordBatch` that
    returns one partition per row. The default is that of producers in Java."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Settings of librdkafka, such as `security.protocol`, `compression.type` or `transaction.timeout.ms`."""
    transactional_id: str | None = None
    """Fences drivers of the job that were taken over. By default `strandline/<job>/<topic>`. Never change it."""
    delivery: Delivery = "exactly_once"
    """`"at_least_once"`: rows are written at once, without transactions, and may come again after a failure."""
    marker_topic: str | None = None
    """The compacted topic that says which rows are there. By default `strandline-<job>-<topic>`; the sink makes it."""
    cluster: str | None = None
    """Names the cluster in checkpoints, by default `bootstrap_servers`. Set it if the addresses of brokers may change:
    for a checkpoint, a sink with another name is another sink."""

    @property
    def place(self) -> str:
        """The cluster and the topic."""
        return f"kafka:{self.cluster or self.bootstrap_servers}/{self.topic}"

    @property
    def librdkafka_partitioner(self) -> str:
        """The partitioner for rows without a partition of their own."""
        return self.partitioner if isinstance(self.partitioner, str) else JAVA_PARTITIONER

    def bound(self, context: SinkContext) -> KafkaSink:
        """This sink with the columns of its key and value, and with its names."""
        what = f"KafkaSink({self.topic!r})"
        where = f"job {context.job!r}: {what}"
        if not _TOPIC.fullmatch(self.topic) or self.topic in (".", ".."):
            raise JobDefinitionError(f"{where}: this is no name of a topic: use letters, digits, '.', '_' and '-'")
        names: dict[str, object] = {"bootstrap_servers": self.bootstrap_servers, "cluster": self.cluster or "-"}
        for name, text in names.items():
            if not isinstance(text, str) or not text or re.search(r"[\s/@\x00-\x1f]", text):
                wanted = "a name" if name == "cluster" else "one text, host:port,host:port,"
                raise JobDefinitionError(f"{where}: {name}={text!r}: give {wanted} without spaces")
        if self.delivery not in ("exactly_once", "at_least_once"):
            raise JobDefinitionError(f"{where}: delivery={self.delivery!r}: use 'exactly_once' or 'at_least_once'")
        if self.partition is not None and callable(self.partitioner):
            raise JobDefinitionError(f"{where}: give partition= or a function as partitioner=, not both")
        markers = self.marker_topic
        if markers is not None and (not _TOPIC.fullmatch(markers) or markers == self.topic):
            raise JobDefinitionError(f"{where}: marker_topic={markers!r}: give another topic")
        form = self._form(where, context).bound(context.schema)
        return replace(
            self,
            key=form.key if form.key is not None else [],
            value=form.value,
            options=checked_options(where, self.options, self.librdkafka_partitioner),
            transactional_id=self.transactional_id or f"strandline/{context.job}/{self.topic}",
            marker_topic=self.marker_topic or _marker_topic(context.job, self.topic),
        )

    def _key_of(self, context: SinkContext) -> Content | None:
        if self.key is not None:
            return self.key if callable(self.key) or len(self.key) else None
        if len(context.keys) == 1:
            return context.keys[0]
        return context.keys or None

    def _form(self, where: str, context: SinkContext) -> MessageForm:
        """How the rows become messages."""
        function = self.partitioner if callable(self.partitioner) else None
        return MessageForm(
            where, self._key_of(context), self.value, self.headers, self.partition or function, self.timestamp
        )

    def stager(self, context: SinkContext) -> Stager:
        """Rows wait as messages in the job's checkpoint folder; or they are written at once."""
        form = self._form(f"job {context.job!r}: KafkaSink({self.topic!r})", context)
        direct = DirectStager(
            self.place, self.bootstrap_servers, self.topic, self.librdkafka_partitioner, dict(self.options)
        )
        exact = self.delivery == "exactly_once"
        return MessageStager(form, ArrowStager.of(context, self.place) if exact else direct)

    def target(self, context: SinkContext) -> SinkTarget:
        """Writes the rows of a checkpoint in one transaction; or does nothing."""
        return KafkaTarget(self, context) if self.delivery == "exactly_once" else DirectTarget(self, context)


def _marker_topic(job: str, topic: str) -> str:
    """The name of the topic of markers. Characters that a topic cannot have, and what is too long, become a hash."""
    name = f"strandline-{job}-{topic}"
    if _TOPIC.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{re.sub(r'[^a-zA-Z0-9._-]', '_', name)[: _LONGEST - 13]}-{digest}"
