"""A topic whose rows and marker are written in one transaction of Kafka.

Every driver of the job has the same transactional id, and writes the marker with it. When a producer begins, Kafka
ends the transactions of all earlier producers of the id, and refuses theirs from then on. So a driver begins a
producer, reads the marker, and knows: as long as its producer is not fenced, nobody else has written a marker. That
makes the commit conditional.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strandline.checkpoint.metadata import SinkFile
from strandline.errors import (
    DirectoryNotOursError,
    MarkerMovedError,
    SinkError,
    SinkFilesMissingError,
    StorageRefusedError,
)
from strandline.sinks.base import SinkContext, SinkStart
from strandline.sinks.kafka.cluster import Cluster
from strandline.sinks.kafka.marker_topic import MarkerTopic
from strandline.sinks.kafka.producer import FencedProducerError, TransactionalProducer
from strandline.sinks.marked import MarkedTarget, Marker
from strandline.sinks.staging import rows_of

if TYPE_CHECKING:
    from strandline.sinks.kafka.sink import KafkaSink

logger = logging.getLogger(__name__)

MOST_FENCES = 3
"""How many commits in a row may meet a strange producer with our transactional id."""


class KafkaTarget(MarkedTarget):
    """A topic, with the marker in another topic."""

    def __init__(self, sink: KafkaSink, context: SinkContext) -> None:
        super().__init__(context, sink.place)
        assert sink.transactional_id is not None
        assert sink.marker_topic is not None
        self._topic = sink.topic
        self._keyless = sink.key is not None and not callable(sink.key) and not sink.key
        self._partitioner = sink.librdkafka_partitioner
        self._transactional_id = sink.transactional_id
        self._cluster = Cluster(sink.bootstrap_servers, sink.options, self.place)
        self._markers = MarkerTopic(self._cluster, sink.marker_topic, sink.transactional_id, self.place)
        self._producer: TransactionalProducer | None = None
        self._known: Marker | None = None
        """The marker, as long as the producer is not fenced."""
        self._fenced = False
        """Whether the last producer was fenced."""
        self._fences = 0
        """How many commits in a row met a strange producer."""

    def check(self, start: SinkStart) -> int:
        try:
            return super().check(start)
        except SinkFilesMissingError as error:
            if not self._markers.held_up:
                raise
            raise SinkError(
                f"{self.place}: a transaction is open in the topic of markers {self._markers.name}, so the newest "
                f"marker of job {self.job!r} cannot be read. If it is that of another sink, whose driver died in a "
                "commit, it ends with its transaction.timeout.ms, by default after 15 minutes: start the job again then"
            ) from error

    def check_target(self) -> None:
        check_topic(self._cluster, self._topic, self.place, self.job)
        if self._keyless and "compact" in self._cluster.topic_options(self._topic).get("cleanup.policy", ""):
            raise StorageRefusedError(
                f"{self.place}: the topic is compacted, and takes no message without a key. Give the sink of job "
                f"{self.job!r} a key=, or set cleanup.policy=delete"
            )
        self._markers.check()

    def prepare(self) -> None:
        facts = self._cluster.topic(self._topic)
        self._markers.make(facts.replicas if facts is not None else -1)

    @property
    def marker_home(self) -> str:
        return f" in the topic {self._markers.name!r}"

    def committed(self) -> Marker | None:
        text = self._markers.newest(settled=self._producer is not None)
        return self._decoded(text)

    def commit(self, staged: Sequence[SinkFile], marker: Marker, replaces: Marker | None) -> None:
        producer = self._producer or self._begin()
        self.check_not_moved(self._known, replaces)
        try:
            producer.write(
                rows_of(self.staging.storage, staged), self._markers.name, self._markers.key, marker.encoded()
            )
        except FencedProducerError:
            self._drop()
            self._fenced = True
            raise MarkerMovedError(f"{self.place}: a newer producer has {self._transactional_id}") from None
        except BaseException:
            self._drop()
            raise
        self._known = marker
        if not self._fenced:
            self._fences = 0
        self._fenced = False

    def _begin(self) -> TransactionalProducer:
        """A new producer, and the marker as of now."""
        producer = TransactionalProducer(self._cluster, self._topic, self._partitioner, self._transactional_id)
        known = self._decoded(self._markers.newest(settled=True))
        if self._fenced:
            self._meet_stranger(moved=known != self._known)
        self._known, self._producer = known, producer
        return producer

    def _meet_stranger(self, *, moved: bool) -> None:
        """The producer was fenced. If the marker did not move, somebody else uses the transactional id.

        That may be an earlier driver of the job that woke up, looked at the marker, and ended. It may also be another
        program, and both would fence each other for ever.
        """
        if moved:
            self._fences = 0
            return
        self._fences += 1
        logger.warning("%s: another producer with %s was there", self.place, self._transactional_id)
        if self._fences >= MOST_FENCES:
            raise StorageRefusedError(
                f"{self.place}: another program uses the transactional id {self._transactional_id!r}: it has fenced "
                f"the producer of job {self.job!r} in {self._fences} commits in a row, and it is no driver of the job. "
                "The rows stay staged. Stop that program, or give it another transactional id. Do not change the id of "
                "the sink: it tells which rows are in the topic"
            )

    def _decoded(self, text: str | None) -> Marker | None:
        if text is None:
            return None
        marker = Marker.decoded(text, f"{self.place}, topic of markers {self._markers.name}")
        if marker.job != self.job:
            raise DirectoryNotOursError(
                f"{self.place}: the transactional id {self._transactional_id!r} is that of job {marker.job!r}; give "
                "one of the two jobs another transactional_id="
            )
        return marker

    def _drop(self) -> None:
        self._producer = None

    def close(self) -> None:
        self._drop()
        self._markers.close()
        self._cluster.close()


def check_topic(cluster: Cluster, topic: str, place: str, job: str) -> None:
    """Raise `StorageRefusedError` unless the topic exists and may be written."""
    facts = cluster.topic(topic)
    if facts is None:
        raise StorageRefusedError(
            f"{place}: there is no topic {topic!r}. Job {job!r} does not make it, because the number of its partitions "
            f"is yours to choose: kafka-topics.sh --create --topic {topic} --partitions ..."
        )
    if facts.operations is not None and not facts.operations & {"WRITE", "ALL"}:
        raise StorageRefusedError(
            f"{place}: the user of job {job!r} may not write to the topic {topic!r}: give it the right Write"
        )
