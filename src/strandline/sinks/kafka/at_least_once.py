"""Messages that are written while their batch runs: they are there sooner, and may be there twice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from strandline.checkpoint.job_log import JobLog
from strandline.checkpoint.metadata import CheckpointMetadata, SinkFile
from strandline.errors import IncompatibleCheckpointError
from strandline.sinks.base import SinkCommit, SinkContext, SinkStart, SinkTakeover, SinkTarget, Stager
from strandline.sinks.kafka.cluster import Cluster
from strandline.sinks.kafka.producer import MessageProducer
from strandline.sinks.kafka.target import check_topic
from strandline.sinks.staging import waiting_rows

if TYPE_CHECKING:
    from strandline.sinks.kafka.sink import KafkaSink

_producers: dict[str, MessageProducer] = {}
"""The producers of this process, a slot or a worker of Spark, which serves many batches."""


@dataclass(frozen=True, slots=True)
class DirectStager(Stager):
    """Writes messages to the topic, and waits until they are there. Nothing is left to be published."""

    place: str
    servers: str
    topic: str
    partitioner: str
    options: Mapping[str, Any] = field(repr=False)

    def stage(self, batches: Iterator[pa.RecordBatch], batch: int, partition: int) -> Iterator[SinkFile]:
        from confluent_kafka import KafkaException

        first = next((messages for messages in batches if messages.num_rows), None)
        if first is None:
            return
        producer = self._producer()
        try:
            producer.send(first)
            for messages in batches:
                producer.send(messages)
            producer.flush()
        except BaseException as error:
            _producers.clear()  # what is still in the queue must not be sent with the rows of another task
            if isinstance(error, KafkaException):
                raise producer.failure(error.args[0], f"writing to the topic {self.topic}") from error
            raise
        yield from ()

    def _producer(self) -> MessageProducer:
        known = [self.place, self.servers, self.topic, self.partitioner, sorted(self.options.items())]
        settings = json.dumps(known, default=str)
        name = hashlib.sha256(settings.encode()).hexdigest()
        if name not in _producers:
            cluster = Cluster(self.servers, self.options, self.place)
            _producers[name] = MessageProducer(cluster, self.topic, self.partitioner)
        return _producers[name]


class DirectTarget(SinkTarget):
    """A topic that needs no commit. Rows may be staged for it all the same, from a time when the sink made commits."""

    def __init__(self, sink: KafkaSink, context: SinkContext) -> None:
        self.place = sink.place
        self._topic = sink.topic
        self._job = context.job
        self._staging = waiting_rows(context, self.place)
        self._cluster = Cluster(sink.bootstrap_servers, sink.options, self.place)

    @property
    def can_go_back(self) -> bool:
        return False

    def check(self, start: SinkStart) -> int:
        check_topic(self._cluster, self._topic, self.place, self._job)
        if start.restored is not None:
            self._check_nothing_waits(start.restored)
        return 0

    def _check_nothing_waits(self, restored: CheckpointMetadata) -> None:
        """Raise `IncompatibleCheckpointError` if rows that the checkpoint covers still wait for a transaction."""
        files = [file for file in restored.sink_files if file.sink == self.place]
        waiting = [file for file in files if self._staging.storage.exists(file.staged)]
        if waiting:
            raise IncompatibleCheckpointError(
                f"{restored.kind} {restored.checkpoint_id} of job {restored.job!r} cannot be restored: "
                f"{sum(file.rows for file in waiting)} rows for {self.place} are staged for a transaction, and "
                "delivery='at_least_once' makes none. Start the job once with delivery='exactly_once', which publishes "
                "them, and change it then."
            )

    def claim(self, log: JobLog) -> None:
        pass

    def recover(self, takeover: SinkTakeover) -> None:
        self._staging.discard(takeover.log.generation, takeover.check_not_fenced)

    def publish(self, commit: SinkCommit) -> None:
        pass

    def check_still_ours(self, log: JobLog) -> None:
        pass

    def close(self) -> None:
        self._cluster.close()
